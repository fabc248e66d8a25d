"""From the command line to the configuration of a demo run."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from rollstream.config import Config, load
from rollstream.errors import ConfigError

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """``resume``: None for a new run, else the folder (or id under ``runs``) of the run to
    continue.
    """

    seed: int = 0
    engine: str = "auto"
    run_id: str = ""
    resume: str | None = None
    config_files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()


def demo_config(options: DemoOptions) -> Config:
    """The configuration of the run that ``options`` ask for, ports not yet resolved.

    Raises:
        ConfigError: nothing to resume, the run id is taken, or a bad key or value.
    """
    if options.resume is not None:
        return _resumed(options)
    run_id = options.run_id or f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}-s{options.seed}"
    run_dir = RUNS / run_id
    if (run_dir / "config.toml").exists():
        raise ConfigError(
            f"run {run_id!r} exists already in {run_dir}",
            hint=f"continue it with --resume {run_id}, or choose another --run-id",
        )
    settings = (f'run.id="{run_id}"', f'run.dir="{run_dir}"', f"run.seed={options.seed}")
    engine = (f'rollouts.engine.kind="{options.engine}"',)
    return load(
        [Path(str(files("rollstream.demo") / "demo.toml")), *options.config_files],
        overrides=(*settings, *engine, *options.overrides),
    )


def _resumed(options: DemoOptions) -> Config:
    name = options.resume or "latest"
    folder = Path(name) if Path(name).is_dir() else RUNS / name
    file = folder / "config.toml"
    if not file.exists():
        known = sorted(p.parent.name for p in RUNS.glob("*/config.toml"))
        raise ConfigError(
            f"nothing to resume: {file} does not exist",
            hint=f"runs here: {', '.join(known) or 'none'}",
        )
    try:
        tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"run folder {folder} has no readable config.toml: {error}") from error
    # Fresh ports: those of the earlier life may be taken by now.
    ports = ["bus.port=0", "store.port=0", "sandboxes.port=0", "rollouts.sandbox_targets=[]"]
    return load([file], overrides=(f'run.dir="{folder.resolve()}"', *ports, *options.overrides))
