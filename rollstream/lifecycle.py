"""The shell around every service: signals, health, logs, telemetry, exit status.

A service is a class with ``run()``; this module turns it into a process. What it waits for:
``run()`` to return, or a signal. The first SIGTERM or SIGINT sets ``context.stopping`` and gives
the service ``drain_s`` to finish what it holds; the second, or the end of that time, cancels it.
Exit status: 0 drained or done, 2 ``ConfigError``, 1 anything else.

Health is HTTP on ``health_port``: ``/livez`` (the loop turns), ``/readyz`` (the service says so),
``/stats`` (its numbers as JSON, for the live view) and ``/metrics`` (the same for Prometheus). A
service that has work and does none for ``stall_s`` is ended with status 1 (``liveness``). The port
that was taken is written to ``<run.dir>/services/<name>.json`` together with the pid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import structlog
import uvloop
from aiohttp import web

from rollstream import liveness, logs, telemetry
from rollstream.bus import Bus, connect
from rollstream.config import Config, dump, load
from rollstream.config.model import ServiceConfig
from rollstream.errors import ConfigError, InfraError, RollstreamError
from rollstream.liveness import Progress

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """What a service is given: the configuration, a bus to be had, and the wish to stop."""

    config: Config
    connect: Callable[[Config], Bus] = connect
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def stopped_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the wish to stop; True when it came. A sleep that a drain can
        end.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return self.stopping.is_set()


class Service(ABC):
    """One stage of the pipeline as a process.

    ``name`` is also the package and the section of the configuration. ``run`` returns when the
    service has drained after ``context.stopping``, or when its work is over (``trainer`` after its
    last stage).
    """

    name: ClassVar[str]

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.config = context.config

    @abstractmethod
    async def run(self) -> None:
        """Do the work until it is over or ``context.stopping`` is set; then drain and return."""

    def ready(self) -> bool:
        """Whether the service takes work now."""
        return True

    def stats(self) -> Mapping[str, float]:
        """Numbers for the live view and Prometheus; names end in their unit (``lag_records``)."""
        return {}

    async def progress(self) -> Progress | None:
        """What waits and what is done; None when that is not known, or waiting is right.

        ``InfraError`` counts as not known.
        """
        return None


def main(service: type[Service], argv: list[str] | None = None) -> int:
    """Entry point of ``python -m <service>.main``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {service.name}.main", description=service.__doc__
    )
    parser.add_argument("--config", "-c", action="append", default=[], metavar="FILE.toml")
    parser.add_argument("--set", "-s", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration")
    arguments = parser.parse_args(argv)
    try:
        config = load(arguments.config, overrides=arguments.set)
        if arguments.dry_run:
            sys.stdout.write(dump(config))
            return 0
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(service, config))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return ConfigError.exit_status
    except KeyboardInterrupt:
        return 130


async def serve(service_class: type[Service], config: Config) -> int:
    """Run one service in this process until it ends or is told to stop. Returns the exit status."""
    logs.configure(config.log, service=service_class.name)
    telemetry.configure(config, service=service_class.name)
    context = ServiceContext(config=config)
    service = service_class(context)
    section = getattr(config, service_class.name, None)
    settings = section if isinstance(section, ServiceConfig) else ServiceConfig()
    async with _health(service, settings):
        task = asyncio.create_task(service.run(), name=service_class.name)
        _install_signals(context, task)
        try:
            await _finish(task, service, settings)
        except asyncio.CancelledError:
            log.warning("aborted", service=service_class.name)
            return 1
        except ConfigError as error:
            log.error("configuration", error=str(error))
            sys.stderr.write(f"error: {error}\n")
            return ConfigError.exit_status
        except RollstreamError as error:
            log.error("failed", error=str(error), code=error.code)
            return 1
        except Exception:
            log.exception("crashed", service=service_class.name)
            return 1
        finally:
            telemetry.shutdown()
    log.info("stopped", service=service_class.name)
    return 0


async def _finish(task: asyncio.Task[None], service: Service, settings: ServiceConfig) -> None:
    """Wait for the task; once stopping, for at most ``drain_s`` more, then cancel it.

    Raises:
        InfraError: the service had work and did none.
    """
    stopping = asyncio.create_task(service.context.stopping.wait(), name="stopping")
    stalled = asyncio.create_task(
        liveness.watch(service.progress, limit_s=settings.stall_s), name="liveness"
    )
    try:
        await asyncio.wait({task, stopping, stalled}, return_when=asyncio.FIRST_COMPLETED)
        if stalled.done() and not task.done():
            stalled.result()
            await _abandon(task, drain_s=settings.drain_s)
            raise InfraError(
                f"{service.name} had work and did none for {settings.stall_s:.0f} s",
                hint=f"it begins again at its last commit; {service.name}.stall_s is the limit",
            )
        if not task.done():
            await asyncio.wait({task}, timeout=settings.drain_s)
        if not task.done():
            log.warning("drain deadline passed, aborting", drain_s=settings.drain_s)
            task.cancel()
        await task
    finally:
        stopping.cancel()
        stalled.cancel()


async def _abandon(task: asyncio.Task[None], *, drain_s: float) -> None:
    """Cancel what hangs; if that hangs as well, end the process."""
    log.error("stalled")
    task.cancel()
    await asyncio.wait({task}, timeout=drain_s)
    if not task.done():
        log.error("cannot be cancelled")
        os._exit(1)


def _install_signals(context: ServiceContext, task: asyncio.Task[None]) -> None:
    def on_signal() -> None:
        if context.stopping.is_set():
            task.cancel()
        context.stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


@contextlib.asynccontextmanager
async def _health(service: Service, settings: ServiceConfig):  # type: ignore[no-untyped-def]
    app = web.Application()
    app.add_routes(
        [
            web.get("/livez", lambda _: _text("ok\n")),
            web.get("/readyz", lambda _: _ready(service)),
            web.get("/stats", lambda _: _json(_stats(service))),
            web.get("/metrics", lambda _: _text(_prometheus(service))),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.health_port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"{service.name}: health port {settings.health_port} on {settings.host}"
            f" cannot be taken: {error}",
            hint=f"set {service.name}.health_port=0 for a free one",
        ) from error
    port = runner.addresses[0][1]
    path = announce(service.config.run.dir, service.name, port=port)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        await runner.cleanup()


def announce(run_dir: Path, name: str, *, port: int) -> Path:
    """Write where ``name`` is to be found; the supervisor and the live view read it. Returns the
    file.
    """
    folder = run_dir / "services"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(
        json.dumps({"name": name, "pid": os.getpid(), "port": port, "at": time.time()})
    )
    temporary.replace(path)
    return path


async def _text(body: str) -> web.Response:
    return web.Response(text=body)


async def _json(body: object) -> web.Response:
    return web.json_response(body)


async def _ready(service: Service) -> web.Response:
    ready = service.ready()
    return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)


def _stats(service: Service) -> dict[str, float]:
    return {"ready": float(service.ready()), **{k: float(v) for k, v in service.stats().items()}}


def _prometheus(service: Service) -> str:
    lines = []
    for name, value in sorted(_stats(service).items()):
        metric = f"rollstream_{service.name}_{name}"
        lines += [f"# TYPE {metric} gauge", f"{metric} {value}"]
    return "\n".join(lines) + "\n"
