"""Seeds of the simulation (``tests/simulation``) per second, in one process."""

from __future__ import annotations

import time

from bench.report import Report
from tests.simulation.kernel import collect
from tests.simulation.world import simulate

NAMES = ("sim.seeds_per_s",)
RUNS, SEEDS = 3, 20


def run(report: Report) -> None:
    rates = [_measure(range(n * SEEDS, (n + 1) * SEEDS)) for n in range(RUNS)]
    collect()
    report.median("sim.seeds_per_s", rates, unit="seeds/s")


def _measure(seeds: range) -> float:
    began = time.perf_counter()
    for seed in seeds:
        found = simulate(seed)
        if found.violations:
            raise SystemExit(f"seed {seed}: {found.violations[0]}: make sim SEED={seed}")
    return SEEDS / (time.perf_counter() - began)
