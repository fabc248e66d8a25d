"""Follows ``policy.versions`` and keeps the engine at the newest one.

Weights are fetched to a local folder, checked against their digests, and handed to the engine while
rollouts go on. A version that cannot be fetched (damaged, or already removed by the trainer) is
passed over: the old weights stay until a newer one comes.

| task | waits for | unblocked by |
|---|---|---|
| ``policy`` | records of ``policy.versions`` | the trainer |
| ``at_least`` | a version | ``policy`` |
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from pathlib import Path

import fsspec
import structlog

from rollouts.engines.base import InferenceEngine
from rollstream.bus import Bus, Record
from rollstream.chat import ChatFormat
from rollstream.errors import ContractError, InfraError, RollstreamError
from rollstream.telemetry import tracer
from rollstream.topics import POLICY_VERSIONS
from rollstream.v1 import policy_pb2

log = structlog.get_logger(__name__)

_POLL_S = 0.2


class PolicyFollower:
    """Owns the engine's version. ``chat`` is known once the engine has started."""

    def __init__(self, bus: Bus, engine: InferenceEngine, *, policy: str, cache: Path) -> None:
        self._bus = bus
        self._engine = engine
        self._policy = policy
        self._cache = cache
        self._changed = asyncio.Condition()
        self.chat: ChatFormat | None = None
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
                records = await consumer.poll(timeout_s=_POLL_S)
                newest = self._newest(records)
                if newest is not None and newest.version > self._engine.version:
                    await self._take(newest)
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

    async def _take(self, event: policy_pb2.PolicyVersion) -> None:
        started = time.monotonic()
        try:
            with tracer.start_as_current_span("policy update"):
                folder = await asyncio.to_thread(fetch, event, self._cache)
                if self.chat is None:
                    await self._engine.start(folder, version=event.version)
                    self.chat = ChatFormat(folder)
                else:
                    await self._engine.update_weights(folder, version=event.version)
        except RollstreamError as error:
            self.failures_total += 1
            log.error("version not taken", version=event.version, error=str(error))
            if self.chat is None and not isinstance(error, (ContractError, InfraError)):
                raise
            return
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
    """Copy the files of a version into ``cache`` and check them.

    Raises:
        InfraError: they cannot be read.
        ContractError: a file is not what was announced.
    """
    folder = cache / f"{event.version:08d}"
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        filesystem, root = fsspec.core.url_to_fs(event.uri)
        for file in event.files:
            data = filesystem.cat_file(f"{root}/{file.path}")
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise ContractError(
                    f"version {event.version}: {file.path} is not what was announced (digest)"
                )
            (temporary / file.path).write_bytes(data)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InfraError(
            f"version {event.version} cannot be fetched from {event.uri}: {error}",
            hint="can this worker reach the trainer's checkpoints?",
        ) from error
    except ContractError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    temporary.replace(folder)
    return folder
