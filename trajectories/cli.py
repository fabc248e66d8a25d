"""``rollstream sql`` and ``rollstream audit``: questions to the store of a run.

When the run's embedded store is not running, it is started for the question and stopped after it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rollstream.config import Config, load
from rollstream.errors import ConfigError, RollstreamError
from rollstream.process import die_with_parent
from rollstream.supervisor.ports import resolve

RunOption = Annotated[
    str, typer.Option("--run", help="Run folder, or its name under runs/; default: the latest.")
]
_FORMATS = ("table", "json", "csv", "tsv")
_START_S = 60.0
_PROBE_S = 0.5


def sql(
    query: Annotated[str, typer.Argument(help="SQL, in ClickHouse's dialect.")],
    *,
    run: RunOption = "latest",
    output: Annotated[str, typer.Option("--format", "-f", help="table, json, csv, tsv.")] = "table",
) -> None:
    """Ask a run's store."""
    if output not in _FORMATS:
        raise ConfigError(f"unknown format {output!r}", hint=f"known: {', '.join(_FORMATS)}")
    from clickhouse_connect.driver.exceptions import ClickHouseError

    with opened_store(run_config(run)) as client:
        try:
            result = client.query(query)
        except ClickHouseError as error:
            raise SqlError(_short(str(error)), hint="see the tables: show tables") from None
    _print(result, output)


def audit(
    *, run: RunOption = "latest", as_json: Annotated[bool, typer.Option("--json")] = False
) -> None:
    """Balance the books of a run. Exit status 0 only when they do."""
    from trajectories.accounting import balance, read_ledger

    config = run_config(run)
    with opened_store(config) as client:
        books = balance(read_ledger(client, config.run.id))
    if as_json:
        typer.echo(json.dumps({**asdict(books), "balanced": books.balanced}))
    else:
        _show_books(books)
    raise typer.Exit(0 if books.balanced else 1)


class SqlError(RollstreamError):
    """The store refused a query."""

    code = "sql"


def run_config(run: str) -> Config:
    """The configuration of a run. ``ConfigError`` that lists the runs when there is none."""
    folder = Path(run) if Path(run, "config.toml").exists() else Path("runs", run)
    file = folder / "config.toml"
    if not file.exists():
        known = sorted(p.parent.name for p in Path("runs").glob("*/config.toml"))
        raise ConfigError(
            f"no run {run!r}: {file} does not exist",
            hint=f"runs here: {', '.join(known) or 'none; start one with `rollstream demo`'}",
        )
    return load([file], overrides=[f'run.dir="{folder.resolve()}"'], environ={})


@contextlib.contextmanager
def opened_store(config: Config) -> Iterator[Any]:
    """A client of the run's store, which is started for the time of the block if need be."""
    from rollstream.errors import InfraError
    from trajectories.client import store_client

    try:
        yield store_client(config, budget_s=_PROBE_S)
        return
    except InfraError:
        if config.store.mode != "embedded":
            raise
    with _temporary_store(config) as started:
        yield store_client(started, budget_s=_START_S)


@contextlib.contextmanager
def _temporary_store(config: Config) -> Iterator[Config]:
    if not (config.run.dir / "store").exists() and not config.store.path:
        raise ConfigError(f"run {config.run.id!r} has no store in {config.run.dir}")
    free = config.model_copy(update={"store": config.store.model_copy(update={"port": 0})})
    store = resolve(
        free.model_copy(update={"bus": config.bus.model_copy(update={"port": 0})})
    ).store
    command = [sys.executable, "-m", "trajectories.store_main"]
    command += ["--config", str(config.run.dir / "config.toml")]
    command += ["--set", f"store.port={store.port}", "--set", f'run.dir="{config.run.dir}"']
    with (config.run.dir / "logs" / "store-query.log").open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, preexec_fn=die_with_parent())
    try:
        yield config.model_copy(update={"store": store})
    finally:
        process.terminate()
        process.wait(30)


def _print(result: Any, output: str) -> None:
    names, rows = result.column_names, result.result_rows
    if output == "json":
        for row in rows:
            typer.echo(json.dumps(dict(zip(names, row, strict=True)), default=str))
    elif output in ("csv", "tsv"):
        writer = csv.writer(sys.stdout, delimiter="," if output == "csv" else "\t")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show_books(books: Any) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("produced", str(books.produced))
    table.add_row("trained", str(books.trained))
    for reason, count in sorted(books.dropped.items()):
        table.add_row(f"dropped: {reason}", str(count))
    table.add_row("dead-lettered", str(books.dead_lettered))
    table.add_row("in flight", str(books.in_flight))
    console = Console()
    console.print(table)
    for problem in books.problems:
        console.print(f"[red]{problem}[/]", highlight=False)
    console.print("[green]balanced[/]" if books.balanced else "[bold red]NOT balanced[/]")


def _short(text: str) -> str:
    """ClickHouse's message without its preamble and without the address."""
    text = text.split("server response:", 1)[-1].split("(for url", 1)[0]
    return text.replace("DB::Exception:", "").strip()[:500]
