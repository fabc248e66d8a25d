"""The demo as a user runs it: books, files, interruption, resumption, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROLLSTREAM = Path(sys.executable).parent / "rollstream"
# Small enough for a test: a reward that an untrained policy gets now and then, and few steps.
SHORT = (
    "trainer.stages.0.steps=80",
    "trainer.stages.1.steps=3",
    "trainer.stages.1.groups_per_step=3",
    "evaluation.tasks=16",
    'domains.0.reward.components=[{name="form", evidence="format"}]',
    "supervisor.timeout_s=400",
)
FIELDS = {
    "reward_before", "reward_after", "produced", "trained", "dropped", "dead_lettered", "in_flight",
    "wall_s", "policy_versions", "max_staleness", "seed",
}  # fmt: skip


class Demo:
    """A demo in a folder of its own, and every process that it starts."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        settings = [a for value in SHORT for a in ("--set", value)]
        if "--resume" in arguments:
            settings = []
        self.folder = folder
        self.out = folder / "out.txt"
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                [str(ROLLSTREAM), "demo", *arguments, *settings],
                cwd=folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.family: set[psutil.Process] = set()

    @property
    def run(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def wait(self, *, seconds: float = 420) -> int:
        until(lambda: self.watch() and self.process.poll() is not None, seconds, self)
        return int(self.process.returncode)

    def watch(self) -> bool:
        """Remember every process of this run that is alive now."""
        try:
            main = psutil.Process(self.process.pid)
            self.family |= {main, *main.children(recursive=True)}
        except psutil.Error:
            pass
        return True

    def survivors(self) -> list[str]:
        alive = []
        for member in self.family:
            try:
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                    alive.append(" ".join(member.cmdline())[:100])
            except psutil.Error:
                continue
        return alive

    def steps(self) -> int:
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return sum('"kind": "step"' in line for line in lines)


def until(condition: Callable[[], object], seconds: float, demo: Demo) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {seconds} s; it said:\n{demo.out.read_text()[-3000:]}"
            )
        time.sleep(0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    # Whatever a failed test left.
    for process in psutil.process_iter():
        try:
            if str(tmp_path) in " ".join(process.cmdline()):
                process.kill()
        except psutil.Error:
            continue


def ask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROLLSTREAM), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.timeout(600)
def test_a_run_with_its_books_files_and_queries(folder: Path) -> None:
    demo = Demo(folder, "--engine", "light", "--run-id", "short", "--seed", "5")
    status = demo.wait()
    text = demo.out.read_text()
    summary = json.loads((demo.run / "summary.json").read_text())
    assert summary.keys() >= FIELDS
    assert summary["seed"] == 5
    assert (summary["balanced"], summary["in_flight"], summary["problems"]) == (True, 0, []), text
    assert summary["trained"] == 3 * 3 * 8
    parts = summary["trained"] + sum(summary["dropped"].values()) + summary["dead_lettered"]
    assert parts == summary["produced"]
    assert summary["policy_versions"] == 4
    assert summary["max_staleness"] <= 2
    # Status 0 exactly when the books balance and the reward rose.
    assert status == (0 if summary["reward_after"] > summary["reward_before"] else 1), text
    assert demo.survivors() == []
    for name in ("config.toml", "metrics.jsonl", "reward.png", "logs/trainer.log", "checkpoints"):
        assert (demo.run / name).exists(), name
    assert (demo.run / "reward.png").read_bytes()[:4] == b"\x89PNG"
    query = "select domain, count(), avg(reward) from trajectories_scored group by domain"
    answer = ask(folder, "sql", query, "--format", "csv")
    assert answer.returncode == 0, answer.stderr
    domain, count, _ = answer.stdout.splitlines()[1].split(",")
    assert domain == "arithmetic"
    assert int(count) == summary["produced"] + 2 * 16
    assert ask(folder, "audit").returncode == 0
    broken = ask(folder, "sql", "select nothing from nowhere")
    assert broken.returncode == 1
    assert "nowhere" in broken.stderr
    assert len(broken.stderr.splitlines()) <= 3
    again = ask(folder, "demo", "--run-id", "short")
    assert again.returncode == 2
    assert "--resume short" in again.stderr


@pytest.mark.timeout(600)
def test_interrupted_and_resumed(folder: Path) -> None:
    demo = Demo(folder, "--engine", "light", "--run-id", "stopped")
    until(lambda: demo.watch() and demo.steps() >= 1, 300, demo)
    os.kill(demo.process.pid, signal.SIGINT)
    assert demo.wait(seconds=90) == 130
    assert "rollstream demo --resume stopped" in demo.out.read_text()
    assert demo.survivors() == []
    resumed = Demo(folder, "--resume", "stopped")
    assert resumed.wait() in (0, 1)
    summary = json.loads((resumed.run / "summary.json").read_text())
    assert (summary["balanced"], summary["in_flight"], summary["problems"]) == (True, 0, []), (
        resumed.out.read_text()
    )
    assert summary["optimiser_steps"] == 3
    assert summary["trained"] == 3 * 3 * 8
    assert resumed.survivors() == []


@pytest.mark.timeout(300)
def test_nothing_outlives_a_killed_supervisor(folder: Path) -> None:
    demo = Demo(folder, "--engine", "light", "--run-id", "killed")
    # Until sandboxes and every service are there.
    until(lambda: demo.watch() and len(demo.family) >= 12, 120, demo)
    demo.process.kill()
    demo.process.wait()
    until(lambda: demo.survivors() == [], 20, demo)


@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises(folder: Path, seed: int) -> None:
    out = subprocess.run(
        [str(ROLLSTREAM), "demo", "--seed", str(seed), "--run-id", f"seed-{seed}"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary = json.loads((folder / "runs" / f"seed-{seed}" / "summary.json").read_text())
    assert out.returncode == 0, out.stdout[-3000:]
    assert summary["reward_after"] - summary["reward_before"] >= 0.25
    assert summary["peak_memory_bytes"] < 6 * 2**30
