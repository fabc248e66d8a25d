"""Processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` that has the kernel kill the child when the thread that made it ends.

    Linux; elsewhere it does nothing. Start such children from a thread that lives as long as they
    should: the main thread.
    """
    parent = os.getpid()

    def pact() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the call: then nobody would send the signal.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return pact
