"""Sessions in Linux namespaces, forked from a zygote: the default on Linux.

The same isolation as bubblewrap's, and the same guest, at a quarter of the cost: nothing is
executed per session. Each session has its own user, pid, net (loopback only), mount, ipc, uts and
cgroup namespaces; a read-only toolchain (``/usr`` and this Python's prefix, nothing else of the
host); private writable ``/work`` and ``/tmp`` (an overlay over the layers of a snapshot, of limited
bytes and inodes together) and ``/dev/shm``; no capabilities; seccomp; a control group of its own
where the machine allows it.

As root every session gets a host uid of its own (200000 upward), so that nothing of root's can be
read. As an ordinary user it runs under that user's; where the kernel then cannot hold the process
limit per session, that is reported.

Failure: a dead zygote is replaced at the next ``create``; sessions that live go on. A session whose
channel closes is ended by its own PID 1, and by pidfd from here.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollstream.errors import ConfigError, InfraError, SandboxLostError
from rollstream.process import die_with_parent
from sandboxes import seccomp
from sandboxes.backends.base import (
    Backend,
    Isolation,
    SessionLimits,
    counts_processes_per_namespace,
    inodes,
)
from sandboxes.cgroups import ControlGroups, Group
from sandboxes.channel import Channel, RefusedError
from sandboxes.folders import ISOLATED, Folder
from sandboxes.layers import Layer

_ZYGOTE = Path(__file__).parent.parent / "zygote.py"
_FIRST_UID, _UIDS = 200_000, 60_000
_SHM_BYTES = 16 << 20
_START_S = 20.0
_CREATE_S = 20.0
_FILES = {"/etc/passwd": "sandbox:x:1000:1000::/work:/bin/sh\n"}
_PROBE = SessionLimits(
    memory_bytes=256 << 20, pids=32, disk_bytes=1 << 20, wall_s=5.0, output_bytes=1 << 16
)


class _Pid:
    """A process that is not our child, by pidfd: a recycled pid is never signalled."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self._fd < 0:
            return 0
        # Not select(): with many sessions descriptors are beyond what it can name.
        ended = select.poll()
        ended.register(self._fd, select.POLLIN)
        if not ended.poll(0):
            return None
        os.close(self._fd)
        self._fd = -1
        return 0

    def kill(self) -> None:
        if self._fd >= 0:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


class NativeBackend(Backend):
    """Owns one zygote and the folder that its root is built on."""

    name = "native"

    def __init__(self) -> None:
        self._root = os.getuid() == 0
        self._uids = itertools.cycle(range(_FIRST_UID, _FIRST_UID + _UIDS))
        self._filter = seccomp.program() if seccomp.supported() else b""
        self._folder: Folder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._groups: ControlGroups | None = None

    async def start(self) -> Isolation:
        self._folder = Folder(ISOLATED, mode=0o711)
        (self._folder.path / "root").mkdir()
        self._groups = ControlGroups()
        try:
            await (await self.create("python", _PROBE)).close()
        except InfraError as error:
            await self.stop()
            raise ConfigError(
                f"no sandbox can be made on this machine: {error.message}",
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
        if toolchain not in self.toolchains:
            raise ConfigError(f"unknown toolchain {toolchain!r}", hint="known: python")
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            channel.group = self._group(limits)
            self._ask(limits, theirs, below)
            theirs.close()
            pid = await channel.adopt(timeout_s=_CREATE_S)
            channel.owns(_Pid(pid))
            # While the session builds its mounts. Nothing is run in it before both are done.
            joining = asyncio.to_thread(channel.group.join, pid) if channel.group else _nothing()
            await asyncio.gather(channel.open(timeout_s=_CREATE_S), joining)
        except (OSError, SandboxLostError, RefusedError) as error:
            await channel.close()
            raise InfraError(
                f"a sandbox did not come up: {error}",
                hint="`rollstream doctor` tells what this machine can do",
            ) from error
        except BaseException:
            # Cancelled while it came up: it has no owner yet but us.
            await channel.close()
            raise
        finally:
            theirs.close()
        return channel

    def _group(self, limits: SessionLimits) -> Group | None:
        assert self._groups is not None, "start() first"
        return self._groups.make(
            memory_bytes=limits.memory_bytes, pids=limits.pids, cpus=limits.cpus
        )

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None
        if self._groups is not None:
            await asyncio.to_thread(self._groups.close)
            self._groups = None
        if self._folder is not None:
            # The zygote's mounts were in its own namespace and went with it: what is left is empty.
            self._folder.release()
            self._folder = None

    def _missing(self) -> tuple[str, ...]:
        missing = self._groups.missing() if self._groups is not None else []
        if not self.layered:
            missing.append("snapshots (need Linux 6.15)")
        if not self._root and not counts_processes_per_namespace():
            missing.append("process limit (needs root, or Linux 5.14)")
        if not self._filter:
            missing.append("seccomp filter (made for x86_64)")
        return tuple(missing)

    def _ask(
        self,
        limits: SessionLimits,
        end: socket.socket,
        below: Sequence[Layer],
    ) -> None:
        zygote = self._zygote()
        request = {
            "host_uid": next(self._uids) if self._root else None,
            "disk_bytes": limits.disk_bytes,
            "inodes": inodes(limits.disk_bytes),
            "shm_bytes": min(_SHM_BYTES, limits.disk_bytes),
            "seccomp": self._filter,
            "layered": self.layered,
            "python": _inside(Path(sys.base_prefix).resolve()),
        }
        descriptors = array.array("i", [end.fileno(), *(layer.fd for layer in below)])
        zygote.sendmsg(
            [marshal.dumps(request)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )

    def _zygote(self) -> socket.socket:
        """The control socket of a live zygote, which is started if there is none."""
        alive = self._process is not None and self._process.poll() is None
        if alive and self._control is not None:
            return self._control
        assert self._folder is not None, "start() first"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-E", str(_ZYGOTE), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        theirs.close()
        ours.settimeout(_START_S)
        ours.send(marshal.dumps(self._settings()))
        answer = ours.recv(4096)
        if not answer.startswith(b"ready"):
            ours.close()
            said = answer.decode("utf-8", "replace") or "it ended at once"
            raise InfraError(f"the sandbox zygote cannot start: {said}")
        self.layered = answer == b"ready layered"
        ours.settimeout(None)
        self._control = ours
        return ours

    def _settings(self) -> dict[str, object]:
        prefix = Path(sys.base_prefix).resolve()
        binds = [("/usr", "/usr")]
        if not prefix.is_relative_to("/usr"):
            binds.append((str(prefix), _inside(prefix)))
        return {
            "root": str(self._folder and self._folder.path / "root"),
            "binds": binds,
            "files": _FILES,
            "as_root": self._root,
        }


async def _nothing() -> None:
    return None


def _inside(prefix: Path) -> str:
    """Where a session sees the Python of ``prefix``."""
    return str(prefix) if prefix.is_relative_to("/usr") else "/opt/python"
