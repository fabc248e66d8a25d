"""An executor of its own for a test, and what a test needs to see that nothing is left of it.

Owns the process that it starts and the temporary folder that the process works in. It is a real
executor, reached over gRPC: what a test proves with it holds for the service.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import grpc
import psutil

from rollstream.v1 import sandbox_pb2 as pb
from rollstream.v1 import sandbox_pb2_grpc
from sandboxes.cgroups import PREFIX

_START_S = 60.0
_STOP_S = 30.0
_ORDINARY = 65_534
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


class Executor:
    """A running executor: its address, its process, and everything below it."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, folder: Path) -> None:
        self.process = process
        self.target = f"127.0.0.1:{port}"
        self.folder = folder

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def descendants(self) -> list[psutil.Process]:
        """Every process below the executor, sessions included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self.process.pid).children(recursive=True))
        return []

    def groups(self) -> set[str]:
        """Control groups of its sessions."""
        return {str(path) for path in _groups() if path.parent.name in self.homes()}

    def homes(self) -> set[str]:
        """Folders of control groups that this process holds a descriptor of."""
        with contextlib.suppress(OSError):
            links = [os.readlink(fd) for fd in Path(f"/proc/{self.process.pid}/fd").iterdir()]
            return {Path(link).name for link in links if PREFIX in link and "cgroup" in link}
        return set()

    def leftovers(self) -> list[str]:
        """Temporary folders of the executor that are still there."""
        return sorted(path.name for path in (self.folder / "tmp").iterdir())

    def terminate(self) -> int:
        """SIGTERM, and wait for the end. Returns the exit status."""
        self.process.terminate()
        return self.process.wait(_STOP_S)

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self.process.kill()
        self.process.wait(_STOP_S)


@contextlib.contextmanager
def executor(
    overrides: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    ordinary_user: bool = False,
) -> Iterator[Executor]:
    """A started executor, configured by dotted ``overrides``; ended with the block.

    ``ordinary_user``: run it without root, also where the test runs as root.
    """
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="rollstream-test-"))
    # Sandbox users must be able to walk through it, as they can through /tmp.
    folder.chmod(0o711)
    (folder / "tmp").mkdir(mode=0o711)
    if ordinary_user and os.getuid() == 0:
        for place in (folder, folder / "tmp"):
            os.chown(place, _ORDINARY, _ORDINARY)
    running: Executor | None = None
    try:
        process = _spawn(port, folder, overrides, env, ordinary_user)
        running = Executor(process, port=port, folder=folder)
        wait_until(partial(_serves, running), what="the executor serves", deadline_s=_START_S)
        yield running
    finally:
        if running is not None and running.process.poll() is None:
            running.process.send_signal(signal.SIGTERM)
            try:
                running.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                running.kill()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], *, what: str, deadline_s: float = 10.0) -> None:
    """Return when ``condition`` holds; ``AssertionError`` naming ``what`` when it never does."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.01)


def _groups() -> Iterator[Path]:
    """Every control group of a session of any executor, whatever the hierarchy."""
    for place, folders, _ in os.walk("/sys/fs/cgroup"):
        if Path(place).name.startswith(PREFIX):
            yield from (Path(place, folder) for folder in folders)


def free_port() -> int:
    """A TCP port of loopback that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(
    port: int,
    folder: Path,
    overrides: Sequence[str],
    env: Mapping[str, str] | None,
    ordinary_user: bool,
) -> subprocess.Popen[bytes]:
    settings = [f"sandboxes.port={port}", f'run.dir="{folder / "run"}"', *overrides]
    command = [sys.executable, "-m", "sandboxes.main"]
    command += [word for setting in settings for word in ("--set", setting)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TMPDIR": str(folder / "tmp"), **(env or {})},
            preexec_fn=_lose_privileges if ordinary_user else None,
        )


def _serves(running: Executor) -> bool:
    if running.process.poll() is not None:
        raise AssertionError(f"the executor ended: {running.log}")
    with grpc.insecure_channel(running.target) as channel:
        try:
            sandbox_pb2_grpc.SandboxServiceStub(channel).Capacity(pb.CapacityRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return True


def _lose_privileges() -> None:
    """In the child, as root: become an ordinary user who can still walk to this Python.

    A folder on the way that others may not enter is hidden, in a mount namespace of the child, by
    an empty one that leads to nothing but what is needed.
    """
    if os.getuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix), Path(__file__).parent.parent}
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount namespace")
    held = {path: os.open(path, os.O_PATH) for path in needed if _blocked(path)}
    for top in {_blocked(path) for path in held}:
        libc.mount(b"none", os.fsencode(str(top)), b"tmpfs", 0, b"mode=755")
    for path, fd in held.items():
        path.mkdir(parents=True, exist_ok=True)
        if libc.mount(b"/proc/self/fd/%d" % fd, os.fsencode(path), None, _MS_BIND, None):
            raise OSError(ctypes.get_errno(), str(path))
        os.close(fd)
    os.setgroups([])
    os.setresgid(_ORDINARY, _ORDINARY, _ORDINARY)
    os.setresuid(_ORDINARY, _ORDINARY, _ORDINARY)


def _blocked(path: Path) -> Path | None:
    """The topmost folder on the way to ``path`` that others may not enter."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None
