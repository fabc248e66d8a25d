"""``make sim SEEDS=200`` or ``make sim SEED=n``: simulate, and say how to see a failure again."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.faults import FAULTS
from tests.simulation.kernel import collect
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.world import Report, simulate

_ENOUGH = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="this one only, told step by step")
    parser.add_argument(
        "--mutation", choices=MUTATIONS, help="plant this bug, and go on until it is found"
    )
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of strings is part of what a seed gives again.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    try:
        if arguments.mutation:
            seeds = range(arguments.first, arguments.first + arguments.seeds)
            return _find(MUTATIONS[arguments.mutation], seeds)
        if arguments.seed is not None:
            return _show(simulate(arguments.seed))
        return _many(range(arguments.first, arguments.first + arguments.seeds))
    finally:
        collect()


def _show(report: Report) -> int:
    print("\n".join(report.told))
    print(
        f"seed {report.seed}: {report.steps} steps, {report.virtual_s:.1f} virtual s,"
        f" log {report.digest[:16]}"
    )
    for violation in report.violations:
        print(f"violation: {violation}")
    return bool(report.violations)


def _find(mutation: Mutation, seeds: range) -> int:
    """1 as soon as a seed says what is to be said of a planted bug, as for any violation."""
    with mutation.plant():
        for seed in seeds:
            said = [v for v in simulate(seed).violations if mutation.finds in v]
            if said:
                print(f"{mutation.name}: seed {seed}: {said[0]}")
                return 1
    print(f"{mutation.name}: not found in {len(seeds)} seeds")
    return 0


def _many(seeds: range) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failed = []
    for done, seed in enumerate(seeds, start=1):
        report = simulate(seed)
        counts.update(report.counts)
        if report.violations:
            failed.append(seed)
            print(f"seed {seed}: {report.violations[0]}\n  make sim SEED={seed}", flush=True)
        elif done % 100 == 0:
            print(f"{done} seeds, {len(failed)} failed", flush=True)
    took = time.monotonic() - began
    print(f"{len(seeds)} seeds in {took:.0f} s ({len(seeds) / took:.2f}/s), {len(failed)} failed")
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    # Of a few seeds nothing can be expected.
    idle = [kind for kind in FAULTS if not counts[kind]] if len(seeds) >= _ENOUGH else []
    if idle:
        print(f"never struck: {', '.join(idle)}")
    return bool(failed or idle)


if __name__ == "__main__":
    sys.exit(main())
