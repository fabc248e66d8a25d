"""Control groups: limits on all processes of a session together (memory, processes, CPU time).

Owns one folder per executor in each hierarchy, and in it one group per session. Each folder
carries a lock that the executor holds for life: whoever can take it knows that the executor is
dead, and may kill and remove what is in it. Version 1 (a hierarchy per controller) and version 2
(one for all).

Where a hierarchy is missing or may not be written, limits stay per process, and ``missing`` says
so.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "rollstream-executor-"
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
WITHOUT = {
    "memory": "memory limit by control group (held per process, looked at while a command runs)",
    "pids": "process limit by control group (held by user)",
    "cpu": "CPU quota",
}
# An ended process may still hold its group for a moment.
_REMOVE_S, _GIVE_UP_S = 0.002, 1.0
_END_S = 10.0


@dataclass(slots=True, kw_only=True)
class Group:
    """One session's group: a folder in each hierarchy that limits something."""

    folders: Mapping[str, Path]
    unified: bool

    def join(self, pid: int) -> None:
        """Move a process in. It may block for some milliseconds: the kernel waits for all readers.

        Raises:
            OSError: the process is gone, or the kernel refuses.
        """
        for path in dict.fromkeys(self.folders.values()):
            (path / "cgroup.procs").write_text(str(pid), "ascii")

    def memory_killed(self) -> int:
        """Processes that were killed for memory so far."""
        file = "memory.events" if self.unified else "memory.oom_control"
        return self._count("memory", file, "oom_kill")

    def processes_refused(self) -> int:
        """Times that one process more was refused so far."""
        return self._count("pids", "pids.events", "max")

    def memory_bytes(self) -> int:
        name = "memory.current" if self.unified else "memory.usage_in_bytes"
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int((self.folders["memory"] / name).read_bytes())
        return 0

    async def remove(self) -> None:
        """Remove the group of an ended session."""
        for path in dict.fromkeys(self.folders.values()):
            delay = _REMOVE_S
            while not remove(path) and delay < _GIVE_UP_S:
                await asyncio.sleep(delay)
                delay *= 1.5

    def _count(self, controller: str, file: str, name: str) -> int:
        with contextlib.suppress(OSError, KeyError, ValueError):
            for line in (self.folders[controller] / file).read_text("ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
        return 0


class ControlGroups:
    """The groups of this executor. ``enforced``: the controllers that work here."""

    def __init__(self, root: Path = _ROOT) -> None:
        name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self._unified = (root / "cgroup.controllers").exists()
        self._homes: dict[str, Path] = {}
        self._locks: dict[Path, int] = {}
        for controller, base in _bases(root, self._unified).items():
            sweep(base)
            with contextlib.suppress(OSError):
                self._prepare(controller, base, base / name)

    @property
    def enforced(self) -> tuple[str, ...]:
        return tuple(self._homes)

    def missing(self) -> list[str]:
        """What is not enforced, in words."""
        return [WITHOUT[name] for name in _CONTROLLERS if name not in self._homes]

    def make(self, *, memory_bytes: int, pids: int, cpus: float) -> Group | None:
        """A group with these limits; None where nothing can be limited.

        Raises:
            OSError: the kernel refuses; nothing is left of it.
        """
        if not self._homes:
            return None
        name = uuid.uuid4().hex[:16]
        group = Group(
            folders={c: home / name for c, home in self._homes.items()}, unified=self._unified
        )
        try:
            for controller, path in group.folders.items():
                path.mkdir(exist_ok=True)
                for file, value in _limits(controller, memory_bytes, pids, cpus, self._unified):
                    # Swap may not be counted here: then there is none to limit.
                    with contextlib.suppress(FileNotFoundError):
                        (path / file).write_text(value, "ascii")
        except OSError:
            for path in group.folders.values():
                remove(path)
            raise
        return group

    def close(self) -> None:
        """Remove the folders; the sessions in them have been ended."""
        for home in dict.fromkeys(self._homes.values()):
            _end(home)
        self._homes.clear()
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _prepare(self, controller: str, base: Path, home: Path) -> None:
        """The folder of one controller, proved to hold limits."""
        if self._unified:
            if controller not in (base / "cgroup.controllers").read_text("ascii").split():
                return
            (base / "cgroup.subtree_control").write_text(f"+{controller}", "ascii")
        self._own(home)
        try:
            if self._unified:
                (home / "cgroup.subtree_control").write_text(f"+{controller}", "ascii")
            probe = home / "probe"
            probe.mkdir(exist_ok=True)
            for file, value in _limits(controller, 1 << 28, 16, 1.0, self._unified):
                with contextlib.suppress(FileNotFoundError):
                    (probe / file).write_text(value, "ascii")
            file, value = _limits(controller, 1 << 28, 16, 1.0, self._unified)[0]
            held = (probe / file).read_text("ascii").split() == value.split()
            remove(probe)
        except OSError:
            remove(home / "probe")
            if not self._homes or not self._unified:
                remove(home)
            raise
        if held:
            self._homes[controller] = home

    def _own(self, home: Path) -> None:
        """Make and lock the folder. An executor that starts just now may sweep it before."""
        while home not in self._locks:
            home.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if home.exists():
                    self._locks[home] = lock
                else:
                    os.close(lock)


def sweep(base: Path) -> None:
    """Kill and remove what dead executors left under ``base``."""
    for home in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end(home)
            finally:
                os.close(lock)


def remove(path: Path) -> bool:
    """Whether the (empty) group is gone now."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _end(home: Path) -> None:
    """Kill what is in the groups under ``home``, and remove them."""
    for group in [*(p for p in home.iterdir() if p.is_dir()), home]:
        for pid in (group / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(ProcessLookupError):
                if int(pid):
                    os.kill(int(pid), signal.SIGKILL)
        end = time.monotonic() + _END_S
        while not remove(group) and time.monotonic() < end:
            # Processes that were killed need a moment; the executor is starting or at its end.
            time.sleep(_REMOVE_S)


def _bases(root: Path, unified: bool) -> dict[str, Path]:
    """Where this process may make groups, by controller: under its own."""
    own = dict(_own(unified))
    bases = {}
    for controller in _CONTROLLERS:
        mount = root if unified else root / controller
        path = mount / own.get("" if unified else controller, "/").lstrip("/")
        bases[controller] = path if path.is_dir() else mount
    return {c: p for c, p in bases.items() if p.is_dir() and os.access(p, os.W_OK)}


def _own(unified: bool) -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if unified and not controllers:
            yield "", path
        for controller in controllers.split(","):
            yield controller, path


def _limits(
    controller: str, memory_bytes: int, pids: int, cpus: float, unified: bool
) -> list[tuple[str, str]]:
    quota = max(1000, int(cpus * _PERIOD_US))
    if controller == "memory":
        memory = str(memory_bytes - memory_bytes % 4096)
        if unified:
            return [("memory.max", memory), ("memory.swap.max", "0")]
        return [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)]
    if controller == "pids":
        return [("pids.max", str(pids))]
    if unified:
        return [("cpu.max", f"{quota} {_PERIOD_US}")]
    return [("cpu.cfs_quota_us", str(quota))]
