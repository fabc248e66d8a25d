"""``rollstream sandboxes``: look at an executor's sessions, and reach into them."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from rollstream.config import load
from rollstream.errors import ConfigError, ContractError, InfraError, SandboxLostError
from rollstream.v1 import sandbox_pb2 as pb
from rollstream.v1 import sandbox_pb2_grpc

app = typer.Typer(
    help="Sandbox sessions of an executor: ls, exec, logs, kill.", no_args_is_help=True
)
TargetOption = Annotated[
    str, typer.Option("--target", help="host:port of the executor; default: that of the run.")
]
RunOption = Annotated[str, typer.Option("--run", help="Run folder, or its name under runs/.")]
SessionArgument = Annotated[str, typer.Argument(help="Session id, or the beginning of one.")]
_CALL_S = 10.0
_SHOWN = 12


@app.command("ls")
def ls(*, target: TargetOption = "", run: RunOption = "latest") -> None:
    """Sessions that live now, and what the executor can still take."""
    with _stub(target, run) as stub:
        sessions = stub.List(pb.ListRequest(), timeout=_CALL_S).sessions
        capacity = stub.Capacity(pb.CapacityRequest(), timeout=_CALL_S)
    table = Table(box=None)
    for name in ("session", "toolchain", "age", "lease", "commands", "gen.", "memory", "runs"):
        table.add_column(name)
    for s in sessions:
        table.add_row(
            s.session_id[:_SHOWN], s.toolchain, f"{s.age_s:.0f} s", f"{s.lease_left_s:.0f} s",
            str(s.commands), str(s.generation), f"{s.memory_bytes >> 20} MiB",
            s.process_id[:_SHOWN],
        )  # fmt: skip
    console = Console()
    console.print(table)
    ready = ", ".join(f"{t.toolchain} {t.ready}/{t.target}" for t in capacity.toolchains)
    console.print(f"{len(sessions)} live, {capacity.free_sessions} free; ready: {ready}")
    console.print(f"tier {capacity.tier}; missing: {', '.join(capacity.missing) or 'nothing'}")


@app.command("exec")
def exec_(
    session: SessionArgument,
    argv: Annotated[list[str], typer.Argument(help="Command and arguments, after --.")],
    *,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds.")] = 30.0,
    target: TargetOption = "",
    run: RunOption = "latest",
) -> None:
    """Run a command in a session; its exit status is this one's."""
    with _stub(target, run) as stub:
        request = pb.ExecRequest(
            session_id=_whole(stub, session), argv=pb.Argv(values=argv), timeout_s=timeout_s
        )
        frames = stub.Exec(request, timeout=timeout_s + _CALL_S)
        code = _show(frames)
    raise typer.Exit(code)


@app.command("logs")
def logs(session: SessionArgument, *, target: TargetOption = "", run: RunOption = "latest") -> None:
    """What the running command has written so far, and what it writes until it ends."""
    with _stub(target, run) as stub:
        session_id = _whole(stub, session)
        info = stub.Get(pb.GetRequest(session_id=session_id), timeout=_CALL_S).session
        if not info.process_id:
            raise ContractError(f"nothing runs in session {session_id}")
        request = pb.AttachRequest(session_id=session_id, process_id=info.process_id)
        _show(answer.frame for answer in stub.Attach(request))


@app.command("kill")
def kill(
    sessions: Annotated[list[str], typer.Argument(help="Session ids, or beginnings of them.")],
    *,
    target: TargetOption = "",
    run: RunOption = "latest",
) -> None:
    """End sessions, with all that runs in them."""
    with _stub(target, run) as stub:
        for session in sessions:
            session_id = _whole(stub, session)
            stub.Destroy(pb.DestroyRequest(session_id=session_id), timeout=_CALL_S)
            typer.echo(f"ended {session_id}")


@contextlib.contextmanager
def _stub(target: str, run: str) -> Iterator[sandbox_pb2_grpc.SandboxServiceStub]:
    """The executor; its statuses as our errors."""
    target = target or _target_of(run)
    with grpc.insecure_channel(target) as channel:
        try:
            yield sandbox_pb2_grpc.SandboxServiceStub(channel)
        except grpc.RpcError as error:
            raise _error(target, error) from None


def _error(target: str, error: Any) -> Exception:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return SandboxLostError(error.details())
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return ContractError(error.details())
    return InfraError(
        f"the executor at {target} does not answer: {error.details()}",
        hint="is the service sandboxes up? --target names another",
    )


def _target_of(run: str) -> str:
    folder = Path(run) if Path(run, "config.toml").exists() else Path("runs", run)
    file = folder / "config.toml"
    if not file.exists():
        raise ConfigError(
            f"no run {run!r}: {file} does not exist", hint="or name --target host:port"
        )
    settings = load([file], overrides=[], environ={}).sandboxes
    if not settings.port:
        raise ConfigError(
            f"{file} leaves sandboxes.port to the machine", hint="name it by --target host:port"
        )
    return f"{settings.host}:{settings.port}"


def _whole(stub: sandbox_pb2_grpc.SandboxServiceStub, beginning: str) -> str:
    """The one session whose id begins like this."""
    listed = stub.List(pb.ListRequest(), timeout=_CALL_S).sessions
    found = [s.session_id for s in listed if s.session_id.startswith(beginning)]
    if len(found) != 1:
        raise ContractError(
            f"{len(found)} sessions begin with {beginning!r}", hint="see `rollstream sandboxes ls`"
        )
    return str(found[0])


def _show(frames: Any) -> int:
    """Write frames to our own streams. Returns the exit status of the command."""
    for frame in frames:
        match frame.WhichOneof("frame"):
            case "stdout":
                sys.stdout.buffer.write(frame.stdout)
                sys.stdout.buffer.flush()
            case "stderr":
                sys.stderr.buffer.write(frame.stderr)
                sys.stderr.buffer.flush()
            case "truncated":
                dropped = frame.truncated
                typer.echo(
                    f"[{dropped.dropped_bytes} bytes of {dropped.stream} left out]", err=True
                )
            case "exited":
                end = frame.exited
                if end.reason != "exited":
                    typer.echo(f"[{end.reason}, {shlex.quote(str(end.code))}]", err=True)
                return int(end.code if end.code >= 0 else 128 + end.signal)
    return 1
