"""What a sandbox session is to those who use it: tools, verifiers, the agent loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command in the sandbox did. ``reason``: "exited", "signalled" or "timeout"."""

    exit_code: int
    reason: str
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    wall_s: float


class SandboxSession(Protocol):
    """A live sandbox session.

    Every method raises ``SandboxLostError`` when the session is gone and ``InfraError`` when the
    executor cannot be reached; a failing command or a timeout is a result.
    """

    @property
    def session_id(self) -> str: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> ExecResult:
        """Run a command to its end; its whole process tree is gone when this returns."""

    async def run_python(self, code: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run a script in a fork of the session's warm interpreter.

        A fresh ``__main__`` each time, the same file system.
        """

    async def put_files(self, files: Mapping[str, bytes]) -> None:
        """Write files, relative to the work folder; parents are made."""

    async def get_files(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        """Read regular files; a missing one is left out."""
