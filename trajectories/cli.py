"""``rollstream sql`` and ``rollstream audit``: questions to the store of a run.

When the run's embedded store is not running, it is started for the question and stopped after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollstream.config import Config, load
from rollstream.errors import ConfigError, InfraError, RollstreamError
from rollstream.process import die_with_parent
from rollstream.supervisor.ports import resolve

RunOption = Annotated[
    str, typer.Option("--run", help="Run folder, or its name under runs/; default: the latest.")
]
_FORMATS = ("table", "json", "csv", "tsv")
_START_S = 60.0
_STOP_S = 30.0
_ANSWER_S = 10.0
_PROBE_S = 0.5
_POLL_S = 0.05
# Where the output is not a terminal no row is folded.
_WIDE = 100_000


def sql(
    query: Annotated[str, typer.Argument(help="SQL, in ClickHouse's dialect.")],
    *,
    run: RunOption = "latest",
    output: Annotated[
        str, typer.Option("--format", "-f", help="table, json (lines), csv, tsv.")
    ] = "table",
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
    *,
    run: RunOption = "latest",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    settled: Annotated[
        bool, typer.Option("--settled", help="What is not yet stored is a problem.")
    ] = False,
) -> None:
    """Balance the books of a run. Exit status 0 only when they do."""
    from clickhouse_connect.driver.exceptions import ClickHouseError

    from trajectories.accounting import balance, read_ledger
    from trajectories.findings import read_findings
    from trajectories.lengths import read_lengths

    config = run_config(run)
    with opened_store(config) as client:
        try:
            books = balance(read_ledger(client, config.run.id))
            lengths = read_lengths(client, config.run.id)
            findings = read_findings(client, config)
            topics = _topics(client, config, settled=settled)
        except ClickHouseError as error:
            raise SqlError(
                f"the store of run {config.run.id!r} has no books: {_short(str(error))}",
                hint="has the sink been running?",
            ) from None
    said = [finding.words for finding in findings if finding.problem]
    said += topics.problems if topics else []
    # Asked to find the log settled, an audit that could not look at it cannot say yes.
    said += ["topics were not compared: no broker"] if settled and not topics else []
    books = replace(books, problems=(*books.problems, *said))
    if as_json:
        found = {**asdict(books), "balanced": books.balanced, "lengths": asdict(lengths)}
        found["findings"] = [asdict(finding) for finding in findings]
        found["topics"] = asdict(topics) if topics else None
        typer.echo(json.dumps(found))
    else:
        lag = f"{sum(topics.lag.values())} offsets not yet stored" if topics else "not compared"
        typer.echo(f"topics: {lag}")
        _show_books(books, lengths)
    raise typer.Exit(0 if books.balanced else 1)


def _topics(client: Any, config: Config, *, settled: bool) -> Any:
    """The topics against the store; None where no broker of this run answers."""
    from trajectories.logs import compare, read_logs, read_stored

    bus = config.bus.model_copy(update={"retry_budget_s": _ANSWER_S})
    if not bus.bootstrap_servers:
        return None
    if bus.mode == "embedded" and not _listens(bus.bootstrap_servers):
        return None
    log, logs = asyncio.run(read_logs(config.model_copy(update={"bus": bus})))
    stored = read_stored(client, log)
    if bus.mode == "embedded" and not stored:
        # The port may by now be another run's broker.
        return None
    return compare(log, logs, stored, settled=settled)


def _listens(servers: str) -> bool:
    host, _, port = servers.split(",", maxsplit=1)[0].rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), _PROBE_S).close()
        return True
    return False


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
    from trajectories.client import store_client

    if config.store.mode != "embedded":
        yield store_client(config)
    elif _runs(config):
        yield store_client(config, budget_s=_ANSWER_S)
    else:
        with _temporary_store(config) as started:
            yield store_client(started, budget_s=_START_S)


def _runs(config: Config) -> bool:
    """Whether the run's own store is up: what answers on its port may by now be another run's."""
    try:
        said = json.loads((config.run.dir / "services" / "store.json").read_bytes())
        return "trajectories.store_main" in psutil.Process(int(said["pid"])).cmdline()
    except (OSError, ValueError, KeyError, psutil.Error):
        return False


@contextlib.contextmanager
def _temporary_store(config: Config) -> Iterator[Config]:
    if not (config.run.dir / "store").exists() and not config.store.path:
        raise ConfigError(f"run {config.run.id!r} has no store in {config.run.dir}")
    free = config.model_copy(update={"store": config.store.model_copy(update={"port": 0})})
    store = resolve(
        free.model_copy(update={"bus": config.bus.model_copy(update={"port": 0})})
    ).store
    started = config.model_copy(update={"store": store})
    log = config.run.dir / "logs" / "store-query.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "trajectories.store_main"]
    command += ["--config", str(config.run.dir / "config.toml")]
    command += ["--set", f"store.port={store.port}", "--set", f'run.dir="{config.run.dir}"']
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, preexec_fn=die_with_parent())
    try:
        _wait_serving(started, process, log)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_serving(config: Config, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the store that was started listens; ``InfraError`` with its last word when it does
    not.
    """
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((config.store.host, config.store.port), _PROBE_S).close()
            return
        time.sleep(_POLL_S)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise InfraError(f"the run's store did not start: {said[-1] if said else 'no output'}")


def _print(result: Any, output: str) -> None:
    names, rows = result.column_names, result.result_rows
    if output == "json":
        for row in rows:
            typer.echo(json.dumps({n: _plain(v) for n, v in zip(names, row, strict=True)}))
    elif output in ("csv", "tsv"):
        delimiter = "," if output == "csv" else "\t"
        writer = csv.writer(sys.stdout, delimiter=delimiter, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def _plain(value: Any) -> Any:
    """A value as JSON has it: what is not a number is null there, and times are text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def _cell(value: Any) -> Text:
    """A value for a person. What a model wrote is neither markup nor a terminal's control codes."""
    if value is None:
        return Text("null", style="dim")
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return Text(text.replace("\x1b", "\\x1b"))


def _show_books(books: Any, lengths: Any) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("produced", str(books.produced))
    table.add_row("trained", str(books.trained))
    for reason, count in sorted(books.dropped.items()):
        table.add_row(f"dropped: {reason}", str(count))
    table.add_row("dead-lettered", str(books.dead_lettered))
    table.add_row("in flight", str(books.in_flight))
    if lengths.statistic is not None:
        table.add_row(
            "sampled tokens, mean",
            f"{lengths.mean_issued:.1f} finished, {lengths.mean_trained:.1f} trained"
            f" (KS {lengths.statistic:.3f}, p {lengths.p_value:.2g})",
        )
    console = Console()
    console.print(table)
    for problem in books.problems:
        console.print(Text(problem, style="red"), highlight=False)
    console.print("[green]balanced[/]" if books.balanced else "[bold red]NOT balanced[/]")


def _short(text: str) -> str:
    """ClickHouse's message without its preamble and without the address."""
    text = text.split("server response:", 1)[-1].split("(for url", 1)[0]
    return text.replace("DB::Exception:", "").strip()[:500]
