"""Services as processes for benchmarks: started on a configuration, waited for, stopped."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rollstream.config import Config, dump
from rollstream.process import die_with_parent
from rollstream.supervisor.services import command, environment, spec_of

_READY_S = 120.0


@contextlib.contextmanager
def service(name: str, config: Config) -> Iterator[None]:
    """A running service; ready when the block begins, gone when it ends."""
    folder = config.run.dir
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.toml"
    file.write_text(dump(config), encoding="utf-8")
    log = (folder / f"{name}.log").open("ab")
    process = subprocess.Popen(
        command(spec_of(name), file),
        stdout=log,
        stderr=log,
        env=environment(),
        preexec_fn=die_with_parent(),
    )
    try:
        _wait_ready(folder, name, process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _wait_ready(folder: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended: {(folder / f'{name}.log').read_text()[-2000:]}")
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads((folder / "services" / f"{name}.json").read_bytes())
            if said["pid"] == process.pid:
                url = f"http://127.0.0.1:{said['port']}/readyz"
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if answer.status == 200:
                        return
        time.sleep(0.05)
    raise RuntimeError(f"{name} was not ready within {_READY_S:.0f} s")
