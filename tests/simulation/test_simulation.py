"""The simulation in ``make test``: some seeds hold, a seed can be seen again, planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.mutations import FOUND, Mutation

_REGRESSIONS = tomllib.loads((Path(__file__).parent / "regressions.toml").read_text("utf-8"))
_ELSEWHERE = {fault["mutation"] for fault in _REGRESSIONS["fault"]}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)


def test_books_balance_under_all_kinds_of_faults() -> None:
    done = _run("--seeds", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 seeds" in done.stdout and "0 failed" in done.stdout


def test_a_seed_gives_the_same_log_again() -> None:
    first, second = (_run("--seed", "7") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    "bug", [m for m in FOUND if m.name not in _ELSEWHERE], ids=attrgetter("name")
)
def test_planted_bugs_are_found(bug: Mutation) -> None:
    done = _run("--first", str(bug.first), "--seeds", "40", "--mutation", bug.name)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{bug.name}: seed " in done.stdout


@pytest.mark.parametrize("fault", _REGRESSIONS["fault"], ids=lambda fault: fault["mutation"])
def test_what_was_found_once_would_be_found_again(fault: dict[str, Any]) -> None:
    seed = str(fault["seed"])
    held = _run("--seeds", "1", "--first", seed)
    assert held.returncode == 0, held.stdout + held.stderr
    again = _run("--seeds", "1", "--first", seed, "--mutation", fault["mutation"])
    assert again.returncode == 1, again.stdout + again.stderr
