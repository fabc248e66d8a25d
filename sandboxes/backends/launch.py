"""Starting a guest process: what both backends share."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from rollstream.errors import InfraError, SandboxLostError
from sandboxes.channel import Channel

GUEST = Path(__file__).parent.parent / "guest.py"
_OPEN_S = 20.0
_MAX_ERROR_BYTES = 2000


async def launch(
    command: Callable[[int], Sequence[str]],
    *,
    pass_fds: Sequence[int] = (),
    user: int | None = None,
) -> Channel:
    """Start ``command(fd)``, whose guest answers on the inherited descriptor ``fd``.

    Raises:
        InfraError: the process could not be started or did not answer; nothing is left of it.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; the end is waited for
            command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno(), *pass_fds],
            env={},
            user=user,
            group=user,
            extra_groups=[] if user is not None else None,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise InfraError(f"a sandbox cannot be started: {error}") from error
    finally:
        theirs.close()
    channel = Channel(ours, process)
    try:
        await channel.open(timeout_s=_OPEN_S)
    except SandboxLostError as error:
        await channel.close()
        raise InfraError(
            f"a sandbox did not come up: {_said(process) or error}",
            hint="`rollstream doctor` tells what this machine can do",
        ) from error
    except BaseException:
        # Cancelled while it came up: it has no owner yet but us.
        await channel.close()
        raise
    if process.stderr is not None:
        process.stderr.close()
    return channel


def _said(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(OSError, ValueError):
        if process.stderr is not None:
            return process.stderr.read(_MAX_ERROR_BYTES).decode("utf-8", "replace").strip()
    return ""
