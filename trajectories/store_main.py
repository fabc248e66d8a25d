"""The store service: owns chDB, speaks ClickHouse's HTTP protocol on loopback.

Failure: acknowledged inserts survive a killed process (measured); the folder is opened again in
about a second. Requests in progress at the end get the drain time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import structlog
from aiohttp import web

from rollstream import lifecycle
from rollstream.errors import ConfigError
from rollstream.lifecycle import Service, ServiceContext
from trajectories.store_engine import ChdbEngine
from trajectories.store_service import make_app

log = structlog.get_logger(__name__)


class Store(Service):
    """Serves the run's store."""

    name = "store"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        store = self.config.store
        if store.mode != "embedded":
            raise ConfigError(
                "the store service is for store.mode=embedded",
                hint="an external ClickHouse needs no store service",
            )
        self._engine = ChdbEngine(
            Path(store.path or self.config.run.dir / "store"), timeout_s=store.request_timeout_s
        )
        self._serving = False

    def ready(self) -> bool:
        return self._serving

    def stats(self) -> Mapping[str, float]:
        return {
            "queries_total": self._engine.queries_total,
            "inserts_total": self._engine.inserts_total,
        }

    async def run(self) -> None:
        store = self.config.store
        await self._engine.open()
        runner = web.AppRunner(make_app(self._engine), access_log=None, auto_decompress=False)
        await runner.setup()
        site = web.TCPSite(runner, store.host, store.port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"store.port {store.port} on {store.host} cannot be taken: {error}",
                hint="stop what holds it, or set store.port=0 for a free one",
            ) from error
        self._serving = True
        log.info("serving", host=store.host, port=runner.addresses[0][1])
        try:
            await self.context.stopping.wait()
        finally:
            self._serving = False
            await runner.cleanup()
            self._engine.close()


if __name__ == "__main__":
    sys.exit(lifecycle.main(Store))
