"""The thread around an engine: commands between steps, and what a broken engine does to its callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from rollouts.engines.base import EngineBrokenError
from rollouts.engines.stepping import Stepper, StepThread
from tests.waiting import until


class Countdown(Stepper[int]):
    """A request is a number of steps; its answer is the step at which it ended."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.broken = False

    def busy(self) -> bool:
        return bool(self.left)

    def step(self) -> Iterable[tuple[str, int]]:
        if self.broken:
            raise ZeroDivisionError("broken")
        self.steps += 1
        self.left = {name: n - 1 for name, n in self.left.items()}
        done = [name for name, n in self.left.items() if n == 0]
        for name in done:
            del self.left[name]
        return [(name, self.steps) for name in done]

    def drop(self, request_id: str) -> None:
        self.left.pop(request_id, None)


async def start() -> tuple[StepThread[int], Countdown]:
    thread: StepThread[int] = StepThread("countdown")
    stepper = Countdown()
    await thread.attach(lambda: stepper)
    return thread, stepper


async def test_requests_are_answered_and_commands_run_between_steps() -> None:
    thread, stepper = await start()

    def ask(name: str, steps: int) -> asyncio.Task[int]:
        return asyncio.create_task(thread.ask(name, lambda: stepper.left.update({name: steps})))

    answers = await asyncio.gather(ask("a", 3), ask("b", 50), thread.call(lambda: "done"))
    assert answers[2] == "done"
    assert thread.waiting == 0
    await thread.stop()


async def test_an_error_in_a_command_is_its_callers_alone() -> None:
    thread, stepper = await start()

    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await thread.call(refuse)
    with pytest.raises(ValueError, match="no"):
        await thread.ask("a", refuse)
    assert await thread.ask("b", lambda: stepper.left.update(b=1)) == 1
    await thread.stop()


async def test_a_cancelled_request_leaves_the_engine() -> None:
    thread, stepper = await start()
    asking = asyncio.create_task(thread.ask("a", lambda: stepper.left.update(a=10**12)))
    await until(lambda: "a" in stepper.left)
    asking.cancel()
    await until(lambda: not stepper.busy())
    assert thread.waiting == 0
    await thread.stop()


async def test_a_broken_engine_fails_all_that_wait_and_all_that_come() -> None:
    thread, stepper = await start()
    asking = [
        asyncio.create_task(thread.ask(name, lambda name=name: stepper.left.update({name: 10**12})))  # type: ignore[misc]
        for name in "abc"
    ]
    await until(lambda: len(stepper.left) == 3)
    stepper.broken = True
    for task in asking:
        with pytest.raises(EngineBrokenError, match="ZeroDivisionError"):
            await task
    with pytest.raises(EngineBrokenError):
        await thread.ask("d", lambda: None)
    with pytest.raises(EngineBrokenError):
        await thread.call(lambda: None)
    await thread.stop()


async def test_stopping_leaves_nobody_waiting() -> None:
    thread, stepper = await start()
    asking = asyncio.create_task(thread.ask("a", lambda: stepper.left.update(a=10**12)))
    await until(lambda: "a" in stepper.left)
    await thread.stop()
    with pytest.raises(EngineBrokenError, match="stopped"):
        await asking
