"""The ``rollstream`` command.

Stages add their own commands by the entry-point group ``rollstream.commands``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollstream.config import dump, load
from rollstream.errors import ConfigError, RollstreamError

app = typer.Typer(
    name="rollstream",
    help="Post-training as a data platform: every sample accounted for, everything derived again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--config", "-c", help="TOML file; later files win.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Dotted override.")
]
Brokers = Annotated[
    int | None, typer.Option(help="Embedded Kafka: 1 broker, or 3 with every record on all three.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and exit.")
]


@app.command()
def demo(
    *,
    seed: Annotated[int, typer.Option(help="Seed of tasks, weights and sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="auto, vllm or light.")] = "auto",
    run_id: Annotated[str, typer.Option(help="Name of the run; default: time and seed.")] = "",
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help='Continue a run: its id, or "latest".')
    ] = None,
    brokers: Brokers = None,
    config: ConfigFiles = None,
    override: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train a tiny model by RL on this machine: real Kafka, vLLM, sandbox, Faust, ClickHouse."""
    from rollstream.demo.main import run_demo
    from rollstream.demo.options import DemoOptions, demo_config

    options = DemoOptions(
        seed=seed,
        engine=engine,
        run_id=run_id,
        resume=resume,
        config_files=tuple(config or ()),
        overrides=(*_broker_settings(brokers), *(override or ())),
    )
    resolved = demo_config(options)
    if dry_run:
        typer.echo(dump(resolved))
        return
    raise typer.Exit(run_demo(resolved, console))


@app.command()
def run(
    service: Annotated[str, typer.Argument(help="producers, rollouts, sandboxes, trainer, ...")],
    *,
    config: ConfigFiles = None,
    override: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Run one service in the foreground, against any Kafka and ClickHouse."""
    from rollstream.supervisor.services import environment, spec_of

    spec = spec_of(service)
    resolved = load(config or [], overrides=override or [])
    if dry_run:
        typer.echo(dump(resolved))
        return
    arguments = [sys.executable, "-m", spec.module]
    arguments += [a for file in config or [] for a in ("--config", str(file))]
    arguments += [a for item in override or [] for a in ("--set", item)]
    os.execve(sys.executable, arguments, environment())


@app.command()
def topics(*, config: ConfigFiles = None, override: Overrides = None) -> None:
    """Make the topics of a run on its Kafka; verify and repair those that exist."""
    from rollstream.bus import connect
    from rollstream.topics import ALL

    resolved = load(config or [], overrides=override or [])
    for line in asyncio.run(connect(resolved).ensure_topics(ALL)):
        console.print(line, style="yellow", highlight=False)
    console.print(f"{len(ALL)} topics on {resolved.bus.bootstrap_servers}", highlight=False)


@app.command("config")
def show_config(*, config: ConfigFiles = None, override: Overrides = None) -> None:
    """Print the resolved configuration: defaults < files < environment < overrides."""
    typer.echo(dump(load(config or [], overrides=override or [])))


@app.command()
def up(
    *,
    folder: Annotated[Path, typer.Option(help="Where broker and store keep their data.")] = Path(
        ".rollstream"
    ),
    brokers: Brokers = None,
    config: ConfigFiles = None,
    override: Overrides = None,
) -> None:
    """Start the embedded broker and store for development, in the background."""
    from rollstream.supervisor.background import start

    overrides = (*_broker_settings(brokers), *(override or ()))
    start(folder, files=tuple(config or ()), overrides=overrides, console=console)


@app.command()
def down(
    *, folder: Annotated[Path, typer.Option(help="As given to `up`.")] = Path(".rollstream")
) -> None:
    """Stop what `rollstream up` started; the data stay."""
    from rollstream.supervisor.background import stop

    stop(folder, console=console)


@app.command()
def doctor() -> None:
    """Check what this machine can do, and say how to get more."""
    from rollstream.doctor import examine, report

    raise typer.Exit(report(examine(), console))


@app.command("version")
def show_version() -> None:
    """Print the version."""
    typer.echo(version("rollstream"))


def main() -> int:
    """Run the command line; errors are one line on standard error, with the remedy."""
    _add_commands()
    try:
        # Ends with SystemExit, usage errors included; our own errors come through.
        app()
    except ConfigError as error:
        return _fail(error, status=ConfigError.exit_status)
    except RollstreamError as error:
        return _fail(error, status=1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


def _broker_settings(brokers: int | None) -> tuple[str, ...]:
    return () if brokers is None else (f"bus.brokers={brokers}", f"bus.replication={brokers}")


def _add_commands() -> None:
    for point in entry_points(group="rollstream.commands"):
        try:
            loaded = point.load()
        except ImportError as error:
            # A stage whose extra is not installed has no command; the others work.
            app.command(point.name, hidden=True)(_unavailable(point.name, str(error)))
            continue
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=point.name)
        else:
            app.command(point.name)(loaded)


def _unavailable(name: str, reason: str) -> Callable[[], None]:
    def command() -> None:
        raise ConfigError(f"command {name!r} is not available: {reason}", hint="install its extra")

    return command


def _fail(error: RollstreamError, *, status: int) -> int:
    Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
    return status
