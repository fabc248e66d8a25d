"""Runs the demo from start to summary.

What it waits for, in order: every service ready; the final evaluation; books without anything in
flight; then it stops the services along the flow, lets the sink write what is left, and states the
books. Ctrl-C stops in the same order with short deadlines, and the run can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from rollstream import vllm_needs
from rollstream.config import Config
from rollstream.config.model import SftStage
from rollstream.demo import view
from rollstream.demo.feed import MetricsFile, follow_topics, poll_services
from rollstream.demo.plot import draw
from rollstream.demo.state import RunState
from rollstream.demo.summary import Summary, audit, show, summarise
from rollstream.errors import InfraError
from rollstream.supervisor.services import STOP_ORDER
from rollstream.supervisor.supervisor import Supervisor

_PLAIN_EVERY_S = 5.0
# After the final evaluation nothing new is made: what is in flight is a few groups, done in
# seconds.
_SETTLE_S = 90.0
# What makes events; the sink and the store record them and stop after.
_MAKERS = tuple(name for name in STOP_ORDER if name not in ("sink", "store"))


class InterruptedRunError(Exception):
    """The user asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """How much there is to do, for the progress bars."""

    steps: int
    sft: int

    @classmethod
    def of(cls, config: Config) -> Totals:
        sft = sum(s.steps for s in config.trainer.stages if isinstance(s, SftStage))
        return cls(steps=sum(s.steps for s in config.trainer.stages) - sft, sft=sft)


async def run(config: Config, console: Console) -> tuple[Summary | None, RunState]:
    """Run the demo of ``config`` (ports resolved). The summary is None when it was interrupted.

    Raises:
        ConfigError, InfraError: a part could not be started, failed for good, or the run took
            too long.
    """
    state = RunState(run_id=config.run.id, seed=config.run.seed)
    interrupt = _on_signals()
    supervisor = Supervisor(config, config.supervisor.services)
    metrics = MetricsFile(config.run.dir / "metrics.jsonl")
    try:
        async with _display(state, Totals.of(config), console):
            await supervisor.start()
            async with _feeds(supervisor, config, state, metrics):
                try:
                    await _until_final(supervisor, config, state, interrupt)
                    books = await settle(supervisor, config, state)
                except InterruptedRunError:
                    state.phase = "stopping (a second Ctrl-C kills)"
                    return None, state
                summary = summarise(state, books, engine=_engine(config))
        return summary, state
    finally:
        await _close(supervisor, interrupt)
        metrics.close()


def finish(summary: Summary, state: RunState, config: Config, console: Console) -> None:
    """Write ``summary.json`` and the curve, and show the summary."""
    summary.write(config.run.dir / "summary.json")
    draw(state, config.run.dir / "reward.png")
    show(summary, config.run.dir, console)


async def _until_final(
    supervisor: Supervisor, config: Config, state: RunState, interrupt: asyncio.Event
) -> None:
    limit = config.supervisor.timeout_s or float("inf")
    while state.final is None:
        supervisor.check()
        _check_interrupt(interrupt)
        if state.elapsed_s > limit:
            raise InfraError(
                f"no final evaluation after {limit:.0f} s (phase: {state.phase})",
                hint="see the logs in the run folder, or raise supervisor.timeout_s",
            )
        await asyncio.sleep(0.2)


async def settle(supervisor: Supervisor, config: Config, state: RunState) -> dict[str, object]:
    """Wait until nothing is in flight, stop what makes events, let the sink finish, state the
    books.
    """
    state.phase = "settling the books"
    deadline = time.monotonic() + _SETTLE_S
    books = await asyncio.to_thread(audit, config.run.dir)
    while books["in_flight"] and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        books = await asyncio.to_thread(audit, config.run.dir)
    await supervisor.stop(_MAKERS)
    while _sink_lag(state) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return await asyncio.to_thread(audit, config.run.dir)


def _sink_lag(state: RunState) -> float:
    return state.stats.get("sink", {}).get("lag_records", 0.0)


@contextlib.asynccontextmanager
async def _feeds(
    supervisor: Supervisor, config: Config, state: RunState, metrics: MetricsFile
) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(follow_topics(config, state, metrics), name="feed-topics"),
        asyncio.create_task(poll_services(supervisor, state, metrics), name="feed-services"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _display(state: RunState, totals: Totals, console: Console) -> AsyncIterator[None]:
    drawing = asyncio.create_task(
        _draw_live(state, totals, console) if console.is_terminal else _draw_lines(state, totals),
        name="view",
    )
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


async def _draw_live(state: RunState, totals: Totals, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            live.update(
                view.render(state, steps_total=totals.steps, sft_total=totals.sft), refresh=True
            )
            await asyncio.sleep(0.5)


async def _draw_lines(state: RunState, totals: Totals) -> None:
    while True:
        print(view.line(state, steps_total=totals.steps, sft_total=totals.sft), flush=True)  # noqa: T201
        await asyncio.sleep(_PLAIN_EVERY_S)


async def _close(supervisor: Supervisor, interrupt: asyncio.Event) -> None:
    """Stop what still runs; a further Ctrl-C meanwhile kills it."""
    interrupt.clear()
    closing = asyncio.create_task(supervisor.close(), name="close")
    impatient = asyncio.create_task(interrupt.wait(), name="impatient")
    await asyncio.wait({closing, impatient}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        for child in supervisor.children.values():
            child.kill()
    impatient.cancel()
    await closing


def _on_signals() -> asyncio.Event:
    interrupt = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt.set)
    return interrupt


def _check_interrupt(interrupt: asyncio.Event) -> None:
    if interrupt.is_set():
        raise InterruptedRunError


def _engine(config: Config) -> str:
    kind = config.rollouts.engine.kind
    if kind != "auto":
        return kind
    return "light" if vllm_needs.why_not() else "vllm"


def link_latest(run_dir: Path) -> None:
    """Point ``runs/latest`` at ``run_dir``; an existing link is replaced in one step."""
    link = run_dir.parent / "latest"
    temporary = run_dir.parent / f".latest-{run_dir.name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    try:
        temporary.replace(link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        print(f"warning: {link} cannot be updated: {error}", file=sys.stderr)  # noqa: T201
