"""``make faults``: kills of every part until there are at least KILLS of them, and other faults.

Each line is one target: what was done how often, what was lost or doubled (zeros, or the exit
status is 1), what was done again, how long it took to come back. ``bench/faults.json`` has the
same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollstream.supervisor.services import SERVICES
from tests.faults.campaign import Outcome, campaign, config_of
from tests.faults.strikes import BROKER, BROKER_OF_THREE, BROKERS, DISK, Kind

RESULTS = Path(__file__).parents[2] / "bench" / "faults.json"
# Who is stopped for longer than its session lasts wakes as one who has been replaced.
PAUSED = (*SERVICES, BROKER)
# They share their partitions with whoever joins.
JOINED = ("rollouts", "processors")
_PER_RUN = 12
# Of the disk that is filled.
_DISK_BYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=108, help="over all targets")
    parser.add_argument("--others", type=int, default=2, help="of each other fault: how often")
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # So that what was mounted and started goes as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    only = arguments.only.split(",") if arguments.only else [*SERVICES, *BROKERS, DISK]
    plan = list(_plan(only, kills=arguments.kills, others=arguments.others))
    figures: dict[str, dict[str, object]] = {}
    sound = True
    for target, kind, count in plan:
        outcomes = list(_outcomes(target, kind, count, seed=arguments.seed))
        figures[f"{kind}.{target}"] = _figure(outcomes)
        sound &= all(outcome.sound for outcome in outcomes)
        print(f"{kind} {target}: {figures[f'{kind}.{target}']}", file=sys.stderr, flush=True)
    _merge(figures)
    _show(figures)
    return 0 if sound else 1


def _plan(only: list[str], *, kills: int, others: int) -> Iterator[tuple[str, Kind, int]]:
    """(target, fault, how often)."""
    killed = [target for target in (*SERVICES, *BROKERS) if target in only]
    if kills and killed:
        each = math.ceil(kills / len(killed))
        yield from ((target, Kind.KILL, each) for target in killed)
    if others:
        yield from ((target, Kind.PAUSE, others) for target in PAUSED if target in only)
        yield from ((target, Kind.JOIN, others) for target in JOINED if target in only)
        if DISK in only:
            yield DISK, Kind.FULL, others


@contextlib.contextmanager
def _run_folder(kind: Kind) -> Iterator[Path]:
    """A folder for a run; on a small disk of its own where that is to be filled (needs root)."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if kind is not Kind.FULL:
            yield Path(folder)
            return
        options = ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "faults"]
        subprocess.run(["mount", *options, folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _outcomes(target: str, kind: Kind, count: int, *, seed: int) -> Iterator[Outcome]:
    """Runs until the target was struck ``count`` times."""
    done = 0
    while done < count:
        with _run_folder(kind) as folder:
            config = config_of(folder, seed=seed, overrides=_settings(target))
            outcome = asyncio.run(
                campaign(config, targets=[target], strikes=min(count - done, _PER_RUN), kind=kind)
            )
        yield outcome
        done += outcome.strikes
        seed += 1


def _settings(target: str) -> tuple[str, ...]:
    three = ("bus.brokers=3", "bus.replication=3")
    return three if target == BROKER_OF_THREE else ()


def _figure(outcomes: list[Outcome]) -> dict[str, object]:
    recoveries = [r for outcome in outcomes for r in outcome.recovery_s]
    return {
        "strikes": sum(o.strikes for o in outcomes),
        "produced": sum(o.produced for o in outcomes),
        "lost": sum(o.lost for o in outcomes),
        "doubled": sum(o.doubled for o in outcomes),
        "redone": sum(o.redone for o in outcomes),
        "redone_steps": sum(o.redone_steps for o in outcomes),
        "max_staleness": max(o.max_staleness for o in outcomes),
        "recovery_s": round(statistics.median(recoveries), 2),
        "problems": [problem for o in outcomes for problem in o.problems],
    }


def _merge(figures: dict[str, dict[str, object]]) -> None:
    """Add to what earlier runs found: a long suite may be run part by part."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(known | figures, indent=1, sort_keys=True) + "\n")


def _show(figures: dict[str, dict[str, object]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = (
        "strikes", "produced", "lost", "doubled", "redone", "redone_steps", "max_staleness",
        "recovery_s",
    )  # fmt: skip
    table.add_column("fault")
    for name in columns:
        table.add_column(name, justify="right")
    for fault, figure in figures.items():
        table.add_row(fault, *(str(figure[name]) for name in columns))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
