"""The demo as a command: run, finish, exit status."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from rollstream import logs
from rollstream.config import Config
from rollstream.demo.orchestrate import finish, link_latest, run
from rollstream.supervisor.ports import resolve

_INTERRUPTED = 130


def run_demo(config: Config, console: Console) -> int:
    """Run the demo.

    Exit status 0: the books balance and the reward rose; 1: not so; 130: interrupted.
    """
    run_dir = config.run.dir
    run_dir.mkdir(parents=True, exist_ok=True)
    link_latest(run_dir)
    console.print(f"run folder: {run_dir}  (logs in {run_dir / 'logs'})", highlight=False)
    resolved = resolve(config)
    _own_log(resolved.run.dir / "logs" / "supervisor.log", resolved)
    summary, state = asyncio.run(run(resolved, console))
    if summary is None:
        console.print(f"\nstopped. Continue with: rollstream demo --resume {config.run.id}")
        return _INTERRUPTED
    finish(summary, state, resolved, console)
    return 0 if summary.balanced and summary.rose else 1


def _own_log(path: Path, config: Config) -> None:
    """The supervisor's own log goes to a file: the terminal belongs to the view."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logs.configure(config.log, service="supervisor", stream=path.open("a", encoding="utf-8"))
