"""What is done to a run, and how long it takes until it is back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from enum import StrEnum
from pathlib import Path

from rollstream.bus.kafka import KafkaBus
from rollstream.errors import RollstreamError
from rollstream.process import die_with_parent
from rollstream.supervisor.child import State
from rollstream.supervisor.services import command, environment, spec_of
from rollstream.supervisor.supervisor import Supervisor
from rollstream.topics import TRAJECTORIES
from tests.waiting import until

BROKER = "broker"
# The same, in a run with three; another one each time.
BROKER_OF_THREE = "broker-of-three"
BROKERS = (BROKER, BROKER_OF_THREE)
DISK = "disk"
# Longer than ``bus.session_timeout_s`` of the run: who is stopped has lost its partitions when it
# wakes, and goes on with what it holds.
PAUSE_S = 8.0
# Long enough for a broker to give its log up and for a checkpoint to fail.
_FULL_S = 6.0
# A second worker has its partitions and works by then.
_JOINED_S = 6.0
_BACK_S = 120.0


class Kind(StrEnum):
    KILL = "kill"
    PAUSE = "pause"
    # A second worker comes, takes its share, and is killed.
    JOIN = "join"
    # No byte is left on the disk of the run for a while.
    FULL = "full"


async def strike(supervisor: Supervisor, target: str, kind: Kind) -> float:
    """Strike a service, the broker or the disk; the seconds from the blow (or from its end, where
    the fault is the time that it lasts) until the target is ready again.
    """
    if kind is Kind.FULL:
        return await _fill(supervisor)
    if kind is Kind.JOIN:
        return await _join(supervisor, target)
    victim = _pid(supervisor, target)
    os.kill(victim, signal.SIGKILL if kind is Kind.KILL else signal.SIGSTOP)
    if kind is Kind.PAUSE:
        await asyncio.sleep(PAUSE_S)
        os.kill(victim, signal.SIGCONT)
    began = time.monotonic()
    if target in BROKERS:
        await until(lambda: _serves(supervisor, victim, kind), seconds=_BACK_S)
    else:
        await until(lambda: _is_back(supervisor, target, victim, kind), seconds=_BACK_S)
    return time.monotonic() - began


def _pid(supervisor: Supervisor, target: str) -> int:
    pids = supervisor.broker_pids if target in BROKERS else [supervisor.children[target].pid]
    assert pids and pids[0], f"{target} does not run"
    # Restarts tell how often one was killed before.
    return pids[supervisor.broker_restarts % len(pids)] or 0


def _is_back(supervisor: Supervisor, target: str, victim: int, kind: Kind) -> bool:
    child = supervisor.children[target]
    fresh = child.pid not in (None, victim) or kind is Kind.PAUSE
    # The trainer is through with its stages when it has ended by itself.
    return fresh and child.state in (State.READY, State.BUSY, State.STOPPED)


async def _serves(supervisor: Supervisor, victim: int, kind: Kind) -> bool:
    if not supervisor.broker_alive or (kind is Kind.KILL and victim in supervisor.broker_pids):
        return False
    try:
        async with asyncio.timeout(5):
            await KafkaBus(supervisor.config).end_offsets(TRAJECTORIES)
    except (RollstreamError, TimeoutError):
        return False
    return True


async def _fill(supervisor: Supervisor) -> float:
    """Leave nothing of the disk that holds the run, then give it back."""
    filler = supervisor.config.run.dir / "filler"
    with filler.open("wb") as file:
        end = time.monotonic() + _FULL_S
        while time.monotonic() < end:
            # Again and again: what crashes gives space back.
            # Somebody may have taken what was free a moment ago.
            with contextlib.suppress(OSError):
                if free := shutil.disk_usage(filler).free:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
            await asyncio.sleep(0.1)
    filler.unlink()
    began = time.monotonic()
    for name in supervisor.children:
        await until(lambda n=name: _is_up(supervisor, n), seconds=_BACK_S)  # type: ignore[misc]
    await until(lambda: _serves(supervisor, -1, Kind.KILL), seconds=_BACK_S)
    return time.monotonic() - began


def _is_up(supervisor: Supervisor, name: str) -> bool:
    child = supervisor.children[name]
    return child.state in (State.READY, State.BUSY, State.STOPPED)


async def _join(supervisor: Supervisor, target: str) -> float:
    """Start a second worker beside the first and kill it: two rebalances, and what it held is lost
    with it. The seconds are those that the worker needs to be ready.
    """
    config = supervisor.config
    with tempfile.TemporaryDirectory(prefix="worker-") as folder:
        # A folder of its own for its address and caches, the run's blobs.
        overrides = (f'run.dir="{folder}"', f'blob.uri="{config.blob_uri}"')
        began = time.monotonic()
        with open(Path(folder, "log"), "wb") as log:  # noqa: ASYNC230
            worker = await asyncio.create_subprocess_exec(
                *command(spec_of(target), supervisor.config_path, overrides),
                stdout=log,
                stderr=log,
                env=environment(),
                preexec_fn=die_with_parent(),
            )
        try:
            address = Path(folder, "services", f"{target}.json")
            await until(address.exists, seconds=_BACK_S)
            took = time.monotonic() - began
            await asyncio.sleep(_JOINED_S)
            assert worker.returncode is None, Path(folder, "log").read_text()[-2000:]
        finally:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
    return took
