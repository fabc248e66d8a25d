"""The thread around an engine that works in steps: commands go in between two steps.

What it waits for: a command, or unfinished requests. Futures are resolved on the event loop, all of
one step in one call. When a step fails, everything that waits fails with an ``EngineBrokenError``
and the thread ends: a broken engine is not used further.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import structlog

from rollouts.engines.base import EngineBrokenError

log = structlog.get_logger(__name__)
# A step takes milliseconds, a start seconds; a thread that is still busy after this is left behind
# (it is a daemon).
_JOIN_S = 30.0
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Stepper(ABC, Generic[Answer]):
    """What the thread drives."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether there are unfinished requests."""

    @abstractmethod
    def step(self) -> Iterable[tuple[str, Answer]]:
        """One step; the requests that it finished, with their answers."""

    @abstractmethod
    def drop(self, request_id: str) -> None:
        """Forget a request that nobody waits for any more; nothing when it is not known."""


class StepThread(Generic[Answer]):
    """Runs a stepper in a thread of its own, for an asyncio caller."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._stepper: Stepper[Answer] | None = None
        self._failure: EngineBrokenError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` in the thread, between two steps."""
        self._check()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def command() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._tell(_fail, future, error)
            else:
                self._tell(_resolve, future, result)

        self._commands.put(command)
        return await future

    async def attach(self, make: Callable[[], Stepper[Answer]]) -> None:
        """Make the stepper in the thread and drive it from now on."""

        def command() -> None:
            self._stepper = make()

        await self.call(command)

    async def ask(self, request_id: str, add: Callable[[], None]) -> Answer:
        """Add a request (``add`` runs in the thread) and wait for its answer.

        A caller that is cancelled drops the request.
        """
        self._check()
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request_id] = future

        def command() -> None:
            try:
                add()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._tell(_fail, future, error)

        self._commands.put(command)
        try:
            return await future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._drop(request_id))
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def stop(self) -> None:
        """End the thread; what still waits fails."""
        if self._failure is None:
            self._failure = EngineBrokenError("the engine is stopped")
        self._commands.put(None)
        self._fail_all(self._failure)
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _drop(self, request_id: str) -> None:
        """In the thread: no caller is left to hear of an error."""
        try:
            if self._stepper is not None:
                self._stepper.drop(request_id)
        except Exception:
            log.exception("request not dropped", request=request_id)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            stepper = self._stepper
            idle = stepper is None or not stepper.busy()
            if not self._obey(block=idle):
                return
            stepper = self._stepper
            if stepper is None or not stepper.busy():
                continue
            try:
                done = list(stepper.step())
            except Exception as error:
                log.exception("engine step failed")
                self._failure = EngineBrokenError(
                    f"the engine broke: {error!r}", hint="the worker is started again without it"
                )
                self._tell(self._fail_all, self._failure)
                return
            if done:
                self._tell(self._deliver, done)

    def _obey(self, *, block: bool) -> bool:
        """Run the commands that are there; with ``block`` wait for one. False: stop."""
        try:
            while True:
                command = self._commands.get(block=block)
                if command is None:
                    return False
                command()
                block = False
        except queue.Empty:
            return True

    def _deliver(self, done: list[tuple[str, Answer]]) -> None:
        for request_id, answer in done:
            future = self._waiting.get(request_id)
            if future is not None:
                _resolve(future, answer)

    def _fail_all(self, error: EngineBrokenError) -> None:
        for future in (*self._waiting.values(), *self._calls):
            _fail(future, error)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back on the loop; a loop that is closed waits for nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


def _resolve(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Result], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
