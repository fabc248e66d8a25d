"""The simulation in ``make test``: some seeds hold, a seed can be seen again, planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.mutations import MUTATIONS


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)


def test_books_balance_under_faults() -> None:
    done = _run("--seeds", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 seeds" in done.stdout and "0 failed" in done.stdout


def test_a_seed_gives_the_same_log_again() -> None:
    first, second = (_run("--seed", "7") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_found(name: str) -> None:
    done = _run("--seeds", "80", "--mutation", name)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{name}: seed " in done.stdout
