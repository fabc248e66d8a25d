"""Runs the suites, each alone in a process with one compute thread, and prints a table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys

from rich.console import Console
from rich.table import Table

import bench.suites
from bench.report import RESULTS, Report, merge

_SUITE_TIMEOUT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="names that begin so")
    parser.add_argument("--suite", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.suite:
        return _run_here(arguments.suite)
    figures: dict[str, dict[str, object]] = {}
    failed = []
    for name in _suites(arguments.only):
        print(f"bench: {name}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "bench", "--suite", name],
            stdout=subprocess.PIPE,
            text=True,
            timeout=_SUITE_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
        if done.returncode:
            failed.append(name)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        figures.update({k: v for k, v in found.items() if k.startswith(arguments.only)})
    merge(figures)
    _show(figures)
    for name in failed:
        print(f"error: suite {name} failed; its lines are above", file=sys.stderr)
    return 1 if failed or not figures else 0


def _suites(prefix: str) -> list[str]:
    """The suites that have a name with ``prefix``."""
    found = []
    for module in pkgutil.iter_modules(bench.suites.__path__):
        suite = importlib.import_module(f"bench.suites.{module.name}")
        if not prefix and getattr(suite, "EXTRA", False):
            continue
        if any(n.startswith(prefix) or prefix.startswith(n) for n in suite.NAMES):
            found.append(module.name)
    return found


def _run_here(name: str) -> int:
    report = Report()
    importlib.import_module(f"bench.suites.{name}").run(report)
    print(json.dumps(report.figures))
    return 0


def _show(figures: dict[str, dict[str, object]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name")
    table.add_column("median", justify="right")
    table.add_column("unit")
    table.add_column("n", justify="right")
    for name, figure in sorted(figures.items()):
        value = figure["value"]
        assert isinstance(value, float)
        table.add_row(name, f"{value:,.4g}", str(figure["unit"]), str(figure["n"]))
    Console().print(table)
    Console().print(f"written to {RESULTS.relative_to(RESULTS.parent.parent)}", style="dim")


if __name__ == "__main__":
    sys.exit(main())
