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
from pathlib import Path

import grpc
import psutil

from rollstream.v1 import sandbox_pb2 as pb
from rollstream.v1 import sandbox_pb2_grpc

_START_S = 60.0
_STOP_S = 30.0
_CLONE_NEWUSER = 0x10000000


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
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

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

    ``ordinary_user`` takes its privileges away by a user namespace in which it has none, so that the
    part that works without root can be tested as root.
    """
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="rollstream-test-"))
    # Sandbox users must be able to walk through it, as they can through /tmp.
    folder.chmod(0o711)
    (folder / "tmp").mkdir(mode=0o711)
    running = Executor(
        _spawn(port, folder, overrides, env, ordinary_user), port=port, folder=folder
    )
    try:
        wait_until(lambda: _serves(running), what="the executor serves", deadline_s=_START_S)
        yield running
    finally:
        if running.process.poll() is None:
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
    """In the child: user 1000 of a user namespace, with no capability anywhere after the exec."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "user namespace")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"1000 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"1000 {gid} 1", encoding="ascii")
