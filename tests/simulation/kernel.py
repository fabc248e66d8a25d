"""An event loop of virtual time that runs many processes, one step of one of them at a time.

A step is one callback of the loop: what a task does between two awaits. Which process takes the next step is drawn
from the seed; within a process the order is asyncio's. Time passes only when nobody can take a step. A process that
is killed takes no further step, whatever it waited for: no ``finally`` runs, as with SIGKILL. Work given to a thread
is done in one step after a while, except that it may be cut at each effect it has (``Loop.effect``).

Everything that could differ between two runs of a seed is taken away: clocks, the order of sets of tasks, random
numbers of libraries, the collection of garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import logging
import random
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

# When the wall clock begins: 2027-01-15 08:00 UTC.
_EPOCH_S = 1_800_000_000.0
# Longest that work in a thread takes, unless something slows it.
WORK_S = 0.02

_COLLECT_EVERY = 25

_discarded: list[Loop] = []
_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Killed(BaseException):
    """The process ends here."""


class Stuck(Exception):
    """Nobody will ever take a step again, or the steps never end."""


class Process:
    """One operating-system process. ``fuse``: it dies after so many more steps or effects; ``cut``: after so many
    more effects, whatever is between them.
    """

    def __init__(self, loop: Loop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.fuse: int | None = None
        self.cut: int | None = None
        self.steps = 0
        self.ready: deque[asyncio.Handle] = deque()
        self.died: asyncio.Future[None] = loop.create_future()
        # What will never run is kept, so that nothing of it is cleaned up: it is gone.
        self.remains: list[Any] = []
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def current() -> Process | None:
    """Whose step this is; None: the world's."""
    return _current.get()


class Task(asyncio.Task[Any]):
    """A task whose place in a set depends on nothing but the order of making."""

    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Task._made += 1
        self._number = Task._made
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class Loop(asyncio.BaseEventLoop):
    """The loop. ``wall_offset_s``: by how much the wall clock is off; it may jump. ``work_s``: longest that work in a
    thread takes.
    """

    def __init__(self, rng: random.Random, *, max_steps: int) -> None:
        super().__init__()
        self.rng = rng
        self.now = 0.0
        self.wall_offset_s = 0.0
        self.work_s = WORK_S
        self.steps = 0
        self.effects = 0
        self.crashes: list[str] = []
        self._max_steps = max_steps
        self._world: deque[asyncio.Handle] = deque()
        self._processes: list[Process] = []
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        Task._made = 0

    # -- processes

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self._processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """The process takes no further step."""
        if not process.alive:
            return
        process.alive = False
        process.remains += process.ready
        process.ready.clear()
        if process in self._runnable:
            self._runnable.remove(process)
        if not process.died.done():
            process.died.set_result(None)

    def pause(self, process: Process) -> None:
        """SIGSTOP."""
        process.paused = True
        if process in self._runnable:
            self._runnable.remove(process)

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        process.paused = False
        if process.alive and process.ready and process not in self._runnable:
            self._runnable.append(process)

    def effect(self) -> None:
        """Something becomes durable now, or has: a process may die here.

        Raises:
            Killed: it does.
        """
        process = _current.get()
        if process is not None and (self.cuts(process) or self._burns(process)):
            raise Killed

    def cuts(self, process: Process) -> bool:
        """Something of this process becomes durable: whether it dies of it, which is the caller's to see to."""
        self.effects += 1
        if process.cut is None or not process.alive:
            return False
        process.cut -= 1
        return process.cut < 0

    def _burns(self, process: Process) -> bool:
        if process.fuse is None:
            return False
        process.fuse -= 1
        return process.fuse < 0

    # -- the loop

    def time(self) -> float:
        return self.now

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> Task:
        return Task(coro, loop=self, name=name, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Killed:
                process = _current.get()
                assert process is not None
                self.kill(process)
            except BaseException as error:  # noqa: BLE001 - a thread's errors are its caller's
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self.rng.uniform(0.0, self.work_s), work)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None:
            self.crashes.append(f"{context.get('message')}: {error!r}")

    def _enqueue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_current)  # type: ignore[attr-defined]
        if process is None:
            self._world.append(handle)
        elif not process.alive:
            process.remains.append(handle)
        else:
            process.ready.append(handle)
            if len(process.ready) == 1 and not process.paused:
                self._runnable.append(process)

    def _run_once(self) -> None:
        while not self._world and not self._runnable:
            self._pass_time()
        self.steps += 1
        if self.steps > self._max_steps:
            raise Stuck(f"no rest after {self._max_steps} steps, at {self.now:.1f} s")
        # The world counts as one among them.
        choices = len(self._runnable) + bool(self._world)
        choice = int(self.rng.random() * choices) if choices > 1 else 0
        if choice == len(self._runnable):
            handle = self._world.popleft()
        else:
            process = self._runnable[choice]
            if self._burns(process):
                self.kill(process)
                return
            process.steps += 1
            handle = process.ready.popleft()
            if not process.ready:
                self._runnable.remove(process)
        if not handle.cancelled():
            handle._run()  # type: ignore[attr-defined]

    def _pass_time(self) -> None:
        if not self._timers:
            raise Stuck(f"nobody waits for anything at {self.now:.1f} s")
        when = self._timers[0][0]
        self.now = max(self.now, when)
        while self._timers and self._timers[0][0] <= self.now:
            _, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                self._enqueue(handle)

    def discard(self) -> None:
        """Let go of everything; ``collect`` frees it."""
        for process in self._processes:
            self.kill(process)
        _discarded.append(self)
        if len(_discarded) >= _COLLECT_EVERY:
            collect()

    def _let_go(self) -> None:
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for process in self._processes:
            process.remains.clear()
        self._processes.clear()
        self._runnable.clear()
        self._world.clear()
        self._timers.clear()


def collect() -> None:
    """Free what discarded loops have held, without a word from what is cut off in the middle. It takes as long as a run,
    because everything in memory is looked at; so not after each.
    """
    logging.disable(logging.CRITICAL)
    with mock.patch.object(sys, "unraisablehook", lambda _: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Again: what is cut off may have made more on its way.
        for _ in range(3):
            for loop in _discarded:
                loop._let_go()
            gc.collect()
    for loop in _discarded:
        loop.close()
    _discarded.clear()
    logging.disable(logging.NOTSET)
    gc.enable()


@contextlib.contextmanager
def virtual_time(loop: Loop) -> Iterator[None]:
    """All clocks are the loop's; numbers that libraries draw come from the seed; no garbage is collected."""

    def wall_s() -> float:
        return _EPOCH_S + loop.now + loop.wall_offset_s

    state = random.getstate()
    random.seed(loop.rng.random())
    gc.disable()
    clocks = {
        "time": wall_s,
        "time_ns": lambda: int(wall_s() * 1e9),
        "monotonic": loop.time,
        "monotonic_ns": lambda: int(loop.now * 1e9),
        "perf_counter": loop.time,
    }
    try:
        with mock.patch.multiple(time, **clocks):
            yield
    finally:
        random.setstate(state)
