"""The shell around services: two signals, exit statuses, health; and the background broker and store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVICE = '''
import asyncio, sys
from rollstream import lifecycle
from rollstream.errors import ConfigError, InfraError
from rollstream.lifecycle import Service
from rollstream.liveness import Progress

class Toy(Service):
    """A service that does what its argument says."""
    name = "toy"
    async def run(self):
        print("up", flush=True)
        if MODE == "config": raise ConfigError("no key", hint="buy one")
        if MODE == "infra": raise InfraError("gone")
        if MODE == "done": return
        while MODE == "deaf":
            try: await asyncio.sleep(3600)
            except asyncio.CancelledError: print("no", flush=True)
        await self.context.stopping.wait()
        print("draining", flush=True)
        if MODE == "slow": await asyncio.sleep(3600)
        print("drained", flush=True)
    def stats(self):
        return {"widgets_total": 3}
    async def progress(self):
        return Progress(waiting=1, done=1) if MODE in ("stuck", "deaf") else None

MODE = sys.argv.pop(1)
sys.exit(lifecycle.main(Toy))
'''


class Toy:
    def __init__(self, folder: Path, mode: str, *arguments: str) -> None:
        file = folder / "toy.py"
        file.write_text(SERVICE)
        command = [sys.executable, str(file), mode, "--set", f'run.dir="{folder}"', *arguments]
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def health(self, path: str) -> str:
        port = json.loads((self.folder / "services" / "toy.json").read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Callable[..., Toy]]:
    made: list[Toy] = []

    def make(mode: str, *arguments: str) -> Toy:
        made.append(Toy(tmp_path, mode, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def test_the_first_signal_drains(toy: Callable[..., Toy]) -> None:
    service = toy("good")
    assert service.line() == "up"
    service.process.send_signal(signal.SIGTERM)
    assert [service.line(), service.line()] == ["draining", "drained"]
    assert service.process.wait(10) == 0
    assert not (service.folder / "services" / "toy.json").exists()


def test_the_second_signal_aborts(toy: Callable[..., Toy]) -> None:
    service = toy("slow")
    assert service.line() == "up"
    service.process.send_signal(signal.SIGINT)
    assert service.line() == "draining"
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(10) == 1


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [("done", 0, ""), ("config", 2, "error: no key -- buy one"), ("infra", 1, "gone")],
)
def test_exit_statuses(toy: Callable[..., Toy], mode: str, status: int, said: str) -> None:
    service = toy(mode)
    _, errors = service.process.communicate(timeout=20)
    assert service.process.returncode == status
    assert said in errors


def test_health_and_numbers(toy: Callable[..., Toy]) -> None:
    service = toy("good")
    assert service.line() == "up"
    assert (service.health("/livez"), service.health("/readyz")) == ("ok\n", "ready\n")
    assert json.loads(service.health("/stats"))["widgets_total"] == 3
    assert "rollstream_toy_widgets_total 3.0" in service.health("/metrics")


def test_a_taken_health_port_is_named(toy: Callable[..., Toy], tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code = SERVICE.replace('name = "toy"', 'name = "sink"')
        file = tmp_path / "taken.py"
        file.write_text(code)
        done = subprocess.run(
            [sys.executable, str(file), "good", "--set", f"sink.health_port={port}", "--set", f'run.dir="{tmp_path}"'],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"health port {port}" in done.stderr
    assert "sink.health_port=0" in done.stderr


@pytest.mark.parametrize(
    ("mode", "said"),
    [("stuck", "sink had work and did none for 0 s"), ("deaf", "cannot be cancelled")],
)
def test_a_service_that_has_work_and_does_none_ends(tmp_path: Path, mode: str, said: str) -> None:
    file = tmp_path / "stalled.py"
    file.write_text(SERVICE.replace('name = "toy"', 'name = "sink"'))
    done = subprocess.run(
        [sys.executable, str(file), mode, "--set", "sink.stall_s=0.3", "--set", "sink.drain_s=0.5",
         "--set", f'run.dir="{tmp_path}"'],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_up_and_down(tmp_path: Path) -> None:
    rollstream = Path(sys.executable).parent / "rollstream"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(rollstream), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    free = ("--set", "bus.port=0", "--set", "store.port=0")
    try:
        up = run("up", *free)
        assert up.returncode == 0, up.stderr
        twice = run("up", *free)
        assert (twice.returncode, "already up" in twice.stderr) == (2, True)
        topics = run("topics", "--config", ".rollstream/config.toml")
        assert "11 topics" in topics.stdout, topics.stderr
        pid = int((tmp_path / ".rollstream" / "supervisor.lock").read_text())
    finally:
        down = run("down")
    assert "stopped" in down.stdout
    assert "nothing is up" in run("down").stdout
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_taken_port_stops_the_start_with_a_clear_word(tmp_path: Path) -> None:
    rollstream = Path(sys.executable).parent / "rollstream"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = subprocess.run(
            [str(rollstream), "demo", "--run-id", "taken", "--set", f"bus.port={port}"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"port {port} (bus.port)" in done.stderr.replace("\n", " ")
    assert "bus.port=0" in done.stderr
