"""A run on one machine: the brokers, then every service, watched until they are told to stop.

Owns the run folder: ``config.toml`` (the resolved configuration that every service reads),
``logs/``, ``services/`` (who listens where). Nothing it starts outlives it: services and broker die
with their parent, and a second supervisor on the same folder is refused while the first is alive.

| task | waits for | unblocked by |
|---|---|---|
| ``child-<name>`` | the process to exit | the process, ``stop`` |
| ``start-<name>`` | the services named in ``after`` to be ready | their health endpoint |
| ``broker-<number>`` | the broker to exit | the broker, ``stop`` |
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import structlog

from rollstream.broker import EmbeddedBroker, EmbeddedCluster
from rollstream.bus import connect
from rollstream.config import Config, dump
from rollstream.errors import ConfigError, InfraError, RollstreamError
from rollstream.supervisor.child import Child, State
from rollstream.supervisor.ports import broker_ports
from rollstream.supervisor.restarts import Verdict, decide
from rollstream.supervisor.services import STOP_ORDER, spec_of
from rollstream.topics import ALL

log = structlog.get_logger(__name__)

_BROKER_POLL_S = 0.5


class Supervisor:
    """Starts, watches and stops the services ``names`` of one run.

    ``config`` has its ports resolved.
    """

    def __init__(self, config: Config, names: Iterable[str]) -> None:
        self.config = config
        self.children = {
            name: Child(
                spec_of(name),
                config_path=self.config_path,
                run_dir=config.run.dir,
                policy=config.supervisor,
            )
            for name in names
        }
        self.broker_restarts = 0
        self.broker_error = ""
        self._cluster: EmbeddedCluster | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lock: IO[str] | None = None
        self._stopping = asyncio.Event()

    @property
    def config_path(self) -> Path:
        return self.config.run.dir / "config.toml"

    @property
    def broker_alive(self) -> bool:
        """Whether every broker runs."""
        return bool(self._brokers) and all(b.poll() is None for b in self._brokers)

    @property
    def broker_state(self) -> str:
        """In a word or three: ready, 2 of 3, down."""
        alive = sum(broker.poll() is None for broker in self._brokers)
        if alive in (0, len(self._brokers)):
            return "ready" if alive else "down"
        return f"{alive} of {len(self._brokers)}"

    @property
    def broker_pids(self) -> list[int]:
        return [broker.pid for broker in self._brokers if broker.pid]

    @property
    def _brokers(self) -> list[EmbeddedBroker]:
        return self._cluster.brokers if self._cluster is not None else []

    async def start(self) -> None:
        """Start the brokers, make the topics, then start every service once what it needs is ready.

        Raises:
            ConfigError: another supervisor runs on this folder, or the broker cannot be had on
                this machine.
        """
        self._take_folder()
        self._start_brokers()
        await connect(self.config).ensure_topics(ALL)
        for name, child in self.children.items():
            self._tasks[name] = asyncio.create_task(self._run_child(child), name=f"child-{name}")

    async def ready(self) -> None:
        """Wait until every service has been ready once.

        Raises:
            InfraError: a service failed for good, or was not ready in time.
        """
        waits = [
            asyncio.create_task(c.ready(), name=f"start-{n}") for n, c in self.children.items()
        ]
        try:
            async with asyncio.timeout(self.config.supervisor.ready_timeout_s):
                while not all(task.done() for task in waits):
                    self.check()
                    await asyncio.wait(waits, timeout=0.2)
        except TimeoutError as error:
            late = [n for n, c in self.children.items() if c.state is not State.READY]
            raise InfraError(
                f"not ready after {self.config.supervisor.ready_timeout_s:.0f} s:"
                f" {', '.join(late)}",
                hint=f"see {self.config.run.dir / 'logs'}",
            ) from error
        finally:
            for task in waits:
                task.cancel()

    def check(self) -> None:
        """Raise ``InfraError`` when the broker or a service has been given up."""
        if self.broker_error:
            raise InfraError(self.broker_error, hint=f"see {self.config.run.dir / 'kafka'}")
        for name, child in self.children.items():
            if child.state is State.FAILED:
                raise InfraError(
                    f"service {name} failed: {child.error}", hint=f"see {child.log_path}"
                )

    async def stop(self, names: Iterable[str] = STOP_ORDER) -> None:
        """Stop services in the order given, each with its drain time; with all of them gone, the
        broker too.
        """
        for name in names:
            if (child := self.children.get(name)) is None:
                continue
            section = getattr(self.config, name, None)
            await child.stop(deadline_s=getattr(section, "drain_s", 20.0) + 2.0)
            if (task := self._tasks.get(name)) is not None:
                await task

    async def close(self) -> None:
        """Stop everything that still runs, broker last, and give the folder free."""
        self._stopping.set()
        try:
            await self.stop()
        finally:
            for child in self.children.values():
                child.kill()
            for task in [t for n, t in self._tasks.items() if n.startswith("broker-")]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if self._cluster is not None:
                self._cluster.stop()
            if self._lock is not None:
                self._lock.close()

    def _take_folder(self) -> None:
        folder = self.config.run.dir
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "supervisor.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run folder {folder} is in use by another supervisor",
                hint="stop it first, or choose another run id",
            ) from error
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self.config_path.write_text(dump(self.config), encoding="utf-8")
        # The file may hold credentials of an external bus or store.
        self.config_path.chmod(0o600)

    def _start_brokers(self) -> None:
        if self.config.bus.mode != "embedded":
            return
        bus = self.config.bus
        self._cluster = EmbeddedCluster(
            self.config.run.dir / "kafka",
            ports=broker_ports(bus),
            heap_bytes=bus.heap_bytes,
            max_message_bytes=bus.max_message_bytes,
        )
        self._cluster.start()
        for number, broker in enumerate(self._cluster.brokers, start=1):
            name = f"broker-{number}"
            self._tasks[name] = asyncio.create_task(self._watch_broker(name, broker), name=name)

    async def _watch_broker(self, name: str, broker: EmbeddedBroker) -> None:
        """Start the broker again as a service would be: a disk may be full for a while."""
        started, failures = time.monotonic(), 0
        while not self._stopping.is_set():
            if (status := broker.poll()) is not None:
                decision = decide(
                    # It was not asked to stop, whatever it says.
                    exit_status=status or 1,
                    uptime_s=time.monotonic() - started,
                    failures=failures,
                    max_restarts=self.config.supervisor.max_restarts,
                    backoff_s=self.config.supervisor.backoff_s,
                )
                log.error("broker exited", name=name, status=status, next=decision.verdict)
                if decision.verdict is Verdict.GIVE_UP:
                    self.broker_error = f"{name} ended {decision.failures} times in a row"
                    return
                failures = decision.failures
                await asyncio.sleep(decision.delay_s)
                self.broker_restarts += 1
                started = time.monotonic()
                await self._restart_broker(broker)
            await asyncio.sleep(_BROKER_POLL_S)

    async def _restart_broker(self, broker: EmbeddedBroker) -> None:
        try:
            # In this thread: it dies with the thread that made it.
            broker.launch()
            await asyncio.to_thread(broker.wait_ready)
        except (RollstreamError, OSError) as error:
            log.error("broker did not start", error=str(error))
            broker.stop()

    async def _run_child(self, child: Child) -> None:
        for name in child.spec.after:
            if name in self.children:
                await self.children[name].ready()
        await child.run()
