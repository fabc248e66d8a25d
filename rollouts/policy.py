"""Follows ``policy.versions`` and keeps the engine at the newest one.

Weights are fetched to a local folder, checked against their digests, and handed to the engine while
rollouts go on. A version that cannot be taken (damaged, or already removed by the trainer) leaves
the old weights where they are and is tried again, ever more slowly, until a newer one comes: tasks
may be waiting for just this one.

| task | waits for | unblocked by |
|---|---|---|
| ``policy`` | records of ``policy.versions`` | the trainer |
| ``at_least`` | a version | ``policy`` |
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from pathlib import Path, PurePosixPath

import fsspec
import structlog

from rollouts.engines.base import EngineBrokenError, InferenceEngine
from rollstream.bus import Bus, Record
from rollstream.chat import ChatFormat
from rollstream.errors import ConfigError, ContractError, InfraError, RollstreamError
from rollstream.telemetry import tracer
from rollstream.topics import POLICY_VERSIONS
from rollstream.v1 import policy_pb2

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_RETRY_S, _RETRY_MAX_S = 1.0, 30.0
_CHUNK_BYTES = 8 << 20


class PolicyFollower:
    """Owns the engine's version. ``chat`` is known once the engine has started."""

    def __init__(self, bus: Bus, engine: InferenceEngine, *, policy: str, cache: Path) -> None:
        self._bus = bus
        self._engine = engine
        self._policy = policy
        self._cache = cache
        self._changed = asyncio.Condition()
        self.chat: ChatFormat | None = None
        # The newest version known and not yet taken; how often it failed, and when it is due.
        self._pending: policy_pb2.PolicyVersion | None = None
        self._failures = 0
        self._due = 0.0
        self.updates_total = 0
        self.failures_total = 0
        self.pull_s = 0.0

    async def run(self) -> None:
        """Follow versions until cancelled."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir(parents=True)
        consumer = self._bus.consumer([POLICY_VERSIONS], client_id="rollouts-policy")
        await consumer.start()
        try:
            while True:
                self._note(self._newest(await consumer.poll(timeout_s=_POLL_S)))
                if self._pending is not None and time.monotonic() >= self._due:
                    await self._try(self._pending)
        finally:
            await consumer.stop()

    async def at_least(self, version: int) -> None:
        """Wait until the engine serves ``version`` or a later one."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.chat is not None and self._engine.version >= version
            )

    def _newest(self, records: list[Record]) -> policy_pb2.PolicyVersion | None:
        newest: policy_pb2.PolicyVersion | None = None
        for record in records:
            try:
                event = self._bus.decode(record)
            except ContractError as error:
                log.error("policy version ignored", error=str(error))
                continue
            assert isinstance(event, policy_pb2.PolicyVersion)
            if event.policy == self._policy and (newest is None or event.version > newest.version):
                newest = event
        return newest

    def _note(self, event: policy_pb2.PolicyVersion | None) -> None:
        known = self._pending.version if self._pending else self._engine.version
        if event is not None and event.version > known:
            self._pending, self._failures, self._due = event, 0, 0.0

    async def _try(self, event: policy_pb2.PolicyVersion) -> None:
        """Take a version, or say when to try again. Raises what no second try can cure."""
        try:
            with tracer.start_as_current_span("policy update"):
                await self._take(event)
        except (EngineBrokenError, ConfigError):
            raise
        except RollstreamError as error:
            delay_s = min(_RETRY_MAX_S, _RETRY_S * 2**self._failures)
            self._failures += 1
            self._due = time.monotonic() + delay_s
            self.failures_total += 1
            log.error(
                "version not taken", version=event.version, error=str(error), again_in_s=delay_s
            )
        else:
            self._pending = None

    async def _take(self, event: policy_pb2.PolicyVersion) -> None:
        started = time.monotonic()
        folder = await asyncio.to_thread(fetch, event, self._cache)
        if self.chat is None:
            chat = ChatFormat(folder)
            await self._engine.start(folder, version=event.version)
            self.chat = chat
        else:
            await self._engine.update_weights(folder, version=event.version)
        self.updates_total += 1
        self.pull_s = time.monotonic() - started
        log.info("policy", version=event.version, pull_s=round(self.pull_s, 3))
        self._forget_old(folder)
        async with self._changed:
            self._changed.notify_all()

    def _forget_old(self, current: Path) -> None:
        for folder in self._cache.iterdir():
            if folder != current:
                shutil.rmtree(folder, ignore_errors=True)


def fetch(event: policy_pb2.PolicyVersion, cache: Path) -> Path:
    """Copy the files of a version into ``cache`` and check them; the folder is whole or absent.

    Raises:
        InfraError: they cannot be read.
        ContractError: a file is not what was announced.
    """
    folder = cache / f"{event.version:08d}"
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for file in event.files:
            _copy(f"{event.uri.rstrip('/')}/{file.path}", _inside(temporary, file), file)
    except (OSError, ValueError, ImportError) as error:
        raise InfraError(
            f"version {event.version} cannot be fetched from {event.uri}: {error}",
            hint="can this worker reach the trainer's checkpoints?",
        ) from error
    except ContractError as error:
        raise ContractError(f"version {event.version}: {error}") from error
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return folder


def _inside(folder: Path, file: policy_pb2.WeightFile) -> Path:
    """Where a file goes: below ``folder``, whatever its name says."""
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ContractError(f"{file.path!r} is no path inside the version's folder")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _copy(uri: str, target: Path, file: policy_pb2.WeightFile) -> None:
    digest = hashlib.sha256()
    with fsspec.open(uri, "rb") as source, target.open("wb") as copy:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise ContractError(f"{file.path} is not what was announced (digest)")
