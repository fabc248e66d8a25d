"""Fills the run state: one task follows the control topics, one polls the services.

Both end when they are cancelled; a service that does not answer keeps its last numbers. Every poll
is also a line of ``metrics.jsonl``, so that the run can be drawn again from its folder.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import aiohttp
import psutil

from rollstream.bus import connect
from rollstream.config import Config
from rollstream.demo.state import RunState
from rollstream.supervisor.supervisor import Supervisor
from rollstream.topics import DEAD_LETTERS, EVALUATIONS, POLICY_VERSIONS, TRAINING_STEPS

# Totals that are shown as rates, by service.
_RATED = {
    "producers": "tasks_produced",
    "rollouts": "rollouts_done",
    "sandboxes": "execs_total",
    "processors": "events_total",
    "trainer": "samples_trained",
    "sink": "rows_total",
}


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"at": round(time.time(), 3), "kind": kind, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


async def follow_topics(config: Config, state: RunState, metrics: MetricsFile) -> None:
    """Follow steps, evaluations, versions and dead letters from the beginning of their logs."""
    handlers: dict[str, Callable[[Any], None]] = {
        TRAINING_STEPS.name: state.on_step,
        EVALUATIONS.name: state.on_evaluation,
        POLICY_VERSIONS.name: state.on_version,
        DEAD_LETTERS.name: state.on_dead_letter,
    }
    bus = connect(config)
    consumer = bus.consumer(
        [TRAINING_STEPS, EVALUATIONS, POLICY_VERSIONS, DEAD_LETTERS], client_id="demo-view"
    )
    await consumer.start()
    try:
        while True:
            for record in await consumer.poll(timeout_s=0.5):
                event = bus.decode(record)
                steps = len(state.steps)
                handlers[record.topic](event)
                if len(state.steps) > steps:
                    last = state.steps[-1]
                    metrics.write(
                        "step",
                        step=last.step,
                        reward=last.reward,
                        staleness=last.staleness,
                        samples=last.samples,
                        loss=last.loss,
                    )
    finally:
        await consumer.stop()


async def poll_services(supervisor: Supervisor, state: RunState, metrics: MetricsFile) -> None:
    """Ask every service for its numbers once a second."""
    previous: dict[str, tuple[float, float]] = {}
    async with aiohttp.ClientSession() as http:
        while True:
            for name, child in supervisor.children.items():
                state.states[name] = str(child.state)
                answer = await child.stats(http)
                if answer:
                    state.stats[name] = answer
                _rate(name, state, previous)
            state.states["kafka"] = supervisor.broker_state
            state.memory_bytes = _memory(supervisor)
            state.peak_memory_bytes = max(state.peak_memory_bytes, state.memory_bytes)
            state.phase = _phase(state)
            metrics.write(
                "services",
                elapsed_s=round(state.elapsed_s, 2),
                phase=state.phase,
                memory_bytes=state.memory_bytes,
                stats=state.stats,
                states=state.states,
            )
            await asyncio.sleep(1.0)


def _rate(name: str, state: RunState, previous: dict[str, tuple[float, float]]) -> None:
    key = _RATED.get(name, "")
    total = state.stats.get(name, {}).get(key)
    if total is None:
        return
    now = time.monotonic()
    before = previous.get(name)
    if before is not None and now - before[0] >= 2.0:
        state.rates[name] = max(0.0, (total - before[1]) / (now - before[0]))
        previous[name] = (now, total)
    elif before is None:
        previous[name] = (now, total)


def _phase(state: RunState) -> str:
    """The stage of the run in words, from what has happened."""
    if state.final is not None:
        return "final evaluation done"
    if state.final_version is not None:
        return "final evaluation"
    if state.baseline is not None:
        return "reinforcement learning"
    if state.versions:
        return "baseline evaluation"
    return "warm-up" if state.stats.get("trainer", {}).get("sft_step", 0) else "starting"


def _memory(supervisor: Supervisor) -> int:
    """Memory of everything that the run started, in bytes: unshared pages of each process once
    (USS).

    Falls back to the resident size where the kernel does not tell.
    """
    roots = [child.pid for child in supervisor.children.values() if child.pid]
    total = 0
    for pid in [*roots, *supervisor.broker_pids]:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        total += sum(_own_bytes(member) for member in family)
    return total


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss - getattr(process.memory_info(), "shared", 0))
    except psutil.Error:
        return 0
