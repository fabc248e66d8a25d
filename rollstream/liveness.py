"""Whether a service that has work does any: a consumer may stop consuming without dying.

Faust agents are known to after an outage of the broker, and any client may wait for an answer that
never comes. A service says how much work waits for it and how much it has done; when work waits and
nothing is done for ``stall_s``, it is ended with an error and begins again at its last commit. The
supervisor sees the exit, Kubernetes the failing ``/livez``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from rollstream.errors import InfraError

log = structlog.get_logger(__name__)

_LOOKS = 10
_LONGEST_LOOK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``waiting``: work that could be done now; ``done``: anything that moves when some is."""

    waiting: float
    done: float


class Stall:
    """Counts the time in which work waits and nothing is done. No clock of its own."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._still_s = 0.0
        self._done: float | None = None

    def look(self, progress: Progress | None, *, elapsed_s: float) -> bool:
        """Whether the service has stalled, ``elapsed_s`` after the last look. What is not known
        (None) proves nothing.
        """
        if progress is None:
            return False
        moved = progress.done != self._done
        self._done = progress.done
        if moved or progress.waiting <= 0:
            self._still_s = 0.0
        else:
            self._still_s += elapsed_s
        return self._still_s >= self._limit_s


async def watch(progress: Callable[[], Awaitable[Progress | None]], *, limit_s: float) -> None:
    """Returns when the service has stalled for ``limit_s``."""
    every_s = min(_LONGEST_LOOK_S, limit_s / _LOOKS)
    stall, looked = Stall(limit_s), time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now = time.monotonic()
        # A process that was stopped, or a machine that slept, has not stalled meanwhile.
        elapsed_s, looked = min(now - looked, 2 * every_s), now
        if stall.look(await _ask(progress), elapsed_s=elapsed_s):
            return


async def _ask(progress: Callable[[], Awaitable[Progress | None]]) -> Progress | None:
    try:
        async with asyncio.timeout(_LONGEST_LOOK_S):
            return await progress()
    except (InfraError, TimeoutError) as error:
        log.debug("progress not known", error=repr(error))
        return None
