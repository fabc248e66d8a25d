"""The simulation in ``make test``: some seeds hold, and a seed can be seen again."""

from __future__ import annotations

import os
import subprocess
import sys


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
