"""``rollstream up`` and ``down``: broker and store in the background, for development.

The folder holds everything: configuration, data, logs, and the pid of the supervisor that owns
them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console

from rollstream.config import dump, load
from rollstream.errors import ConfigError, InfraError
from rollstream.supervisor.ports import resolve

# Kafka's conventional port, and ClickHouse's HTTP port, as defaults of a development set-up.
_DEFAULTS = ("bus.port=9092", "store.port=8123", 'supervisor.services=["store"]')
_UP_S = 180.0
_DOWN_S = 60.0


def start(
    folder: Path, *, files: tuple[Path, ...], overrides: tuple[str, ...], console: Console
) -> None:
    """Start broker and store and wait until both answer.

    Raises:
        ConfigError: they run already, or a port is in use.
        InfraError: they did not come up; the message ends with the last log line.
    """
    if (pid := _owner(folder)) is not None:
        raise ConfigError(f"already up (pid {pid}) in {folder}", hint="rollstream down")
    fixed = (*_DEFAULTS, 'run.id="dev"', f'run.dir="{folder}"')
    config = resolve(load(files, overrides=(*fixed, *overrides)))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "up.toml"
    wanted.write_text(dump(config), encoding="utf-8")
    log = folder / "supervisor.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollstream.supervisor", "--config", str(wanted)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    with console.status("starting broker and store"):
        up = _wait(lambda: _ready(folder, process.pid) or process.poll() is not None, _UP_S)
    if not up or process.poll() is not None:
        _terminate(process.pid)
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise InfraError(f"broker and store did not come up: {last}", hint=f"see {log}")
    console.print(f"Kafka       {config.bus.bootstrap_servers}", highlight=False)
    console.print(f"ClickHouse  http://{config.store.host}:{config.store.port}", highlight=False)
    console.print(f"use         --config {folder / 'config.toml'}", highlight=False)


def stop(folder: Path, *, console: Console) -> None:
    """Stop what ``start`` started in ``folder``; not an error when nothing runs."""
    pid = _owner(folder)
    if pid is None:
        console.print(f"nothing is up in {folder}", highlight=False)
        return
    os.kill(pid, signal.SIGTERM)
    if not _wait(lambda: not psutil.pid_exists(pid), _DOWN_S):
        _terminate(pid)
        raise InfraError(f"supervisor {pid} did not stop within {_DOWN_S:.0f} s and was killed")
    console.print("stopped", highlight=False)


def _owner(folder: Path) -> int | None:
    """Pid of the live supervisor of ``folder``. A recycled pid is told by its command line."""
    try:
        pid = int((folder / "supervisor.lock").read_text())
        return pid if "rollstream.supervisor" in psutil.Process(pid).cmdline() else None
    except (OSError, ValueError, psutil.Error):
        return None


def _ready(folder: Path, pid: int) -> bool:
    try:
        said = json.loads((folder / "services" / "supervisor.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(said.get("pid") == pid)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
