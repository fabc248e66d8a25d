"""The services by name: which module runs each, and in which order a run starts and stops.

The core imports no stage; it only knows what to execute. Start order follows need (the store before
the sink), stop order follows the flow (what makes events stops before what records them).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """``after``: services that must be ready before this one starts, if the run has them."""

    name: str
    module: str
    purpose: str
    after: tuple[str, ...] = ()


_TABLE = (
    ServiceSpec(
        name="store", module="trajectories.store_main", purpose="ClickHouse for one machine"
    ),
    ServiceSpec(name="sandboxes", module="sandboxes.main", purpose="isolated sessions over gRPC"),
    ServiceSpec(name="trainer", module="trainer.main", purpose="warm start, RL, checkpoints"),
    ServiceSpec(name="processors", module="processors.main", purpose="score, normalise, group"),
    ServiceSpec(
        name="sink",
        module="trajectories.sink_main",
        purpose="topics to ClickHouse",
        after=("store",),
    ),
    ServiceSpec(name="rollouts", module="rollouts.main", purpose="agent loop and engine"),
    ServiceSpec(name="evaluation", module="evaluation.main", purpose="held-out suites"),
    ServiceSpec(name="producers", module="producers.main", purpose="tasks, paced"),
)

SERVICES: dict[str, ServiceSpec] = {spec.name: spec for spec in _TABLE}

STOP_ORDER = (
    "producers",
    "evaluation",
    "rollouts",
    "sandboxes",
    "processors",
    "trainer",
    "sink",
    "store",
)


def spec_of(name: str) -> ServiceSpec:
    """The service called ``name``; ``ConfigError`` that lists the known ones."""
    if name not in SERVICES:
        raise ConfigError(f"unknown service {name!r}", hint=f"known: {', '.join(SERVICES)}")
    return SERVICES[name]


def command(spec: ServiceSpec, config_path: Path, overrides: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs one service against a configuration file."""
    extra = [argument for override in overrides for argument in ("--set", override)]
    return [sys.executable, "-m", spec.module, "--config", str(config_path), *extra]


def environment() -> dict[str, str]:
    """The environment of a service: one compute thread (two collapse 10-30x when cores are shared:
    measured).
    """
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
    )
    # Two malloc arenas keep the resident size of threaded processes down; tokenizers must not fork
    # a thread pool.
    fixed = {"MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **one_thread, **fixed}
