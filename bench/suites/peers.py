"""Two peers' data planes beside ours, in one run: their own packages, each in an environment of its
own that is made for the run. ``make bench ONLY=peer``; not part of the whole, because it installs.

Ours is durable when it counts (acknowledged by the broker); theirs are in memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Report
from bench.suites import bus

LENGTHS = (256, 1024, 4096)
RUNS = 3
SAMPLES = {256: 4_000, 1024: 2_000, 4096: 800}
PEERS = {
    "atropos": (
        ["aiohttp==3.14.5", "fastapi==0.165.0", "uvicorn[standard]==0.54.0"],
        ["atroposlib==0.4.0"],
    ),
    "transferqueue": (["torch==2.13.0", "TransferQueue==0.1.11", "ray==2.60.0"], []),
}
NAMES = tuple(
    f"peer.{peer}.{kind}{suffix}.L{length}"
    for peer in PEERS
    for kind in ("ingest", "read")
    for suffix in (".samples_per_s", ".ours_over_theirs")
    for length in LENGTHS
)
# Only when it is asked for.
EXTRA = True


def run(report: Report) -> None:
    ours = Report()
    bus.run(ours)
    with tempfile.TemporaryDirectory() as folder:
        for peer, (packages, alone) in PEERS.items():
            python = _environment(Path(folder, peer), packages, alone)
            for length in LENGTHS:
                runs = [_measure(python, peer, length) for _ in range(RUNS)]
                for kind in ("ingest", "read"):
                    rates = [figures[kind] for figures in runs]
                    own = ours.figures[f"bus.{kind}.samples_per_s.L{length}"]["value"]
                    assert isinstance(own, float)
                    name = f"peer.{peer}.{kind}"
                    report.median(f"{name}.samples_per_s.L{length}", rates, unit="samples/s")
                    ratios = [own / rate for rate in rates]
                    report.median(f"{name}.ours_over_theirs.L{length}", ratios, unit="ratio")


def _environment(folder: Path, packages: list[str], alone: list[str]) -> Path:
    """A virtual environment with a peer's packages; ``alone`` come without what they ask for."""
    uv = Path(sys.executable).with_name("uv")
    python = folder / "bin" / "python"
    install = [uv, "pip", "install", "-q", "--python", python]
    subprocess.run([uv, "venv", "-q", folder], check=True, stdout=sys.stderr)
    subprocess.run([*install, *packages], check=True, stdout=sys.stderr, timeout=900)
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True, stdout=sys.stderr)
    return python


def _measure(python: Path, peer: str, length: int) -> dict[str, float]:
    script = Path(__file__).parent.parent / "peers" / f"{peer}.py"
    done = subprocess.run(
        [python, script, str(length), str(SAMPLES[length])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
