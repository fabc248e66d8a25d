"""The executor: sandbox sessions of this machine over gRPC.

Drain: on the wish to stop, health says NOT_SERVING, calls in progress get their time, then every
session is ended. A killed executor leaves nothing: its sessions die with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollstream import lifecycle
from rollstream.blobs import BlobStore
from rollstream.config.model import SandboxesConfig
from rollstream.errors import ConfigError
from rollstream.lifecycle import Service, ServiceContext
from rollstream.v1 import sandbox_pb2, sandbox_pb2_grpc
from sandboxes.backends.base import Backend
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.native import NativeBackend
from sandboxes.backends.process import ProcessBackend
from sandboxes.service import SandboxServicer
from sandboxes.sessions import SessionTable

log = structlog.get_logger(__name__)

_MAX_MESSAGE_BYTES = 256 << 20
_DRAIN_S = 5.0
_SERVICE = sandbox_pb2.DESCRIPTOR.services_by_name["SandboxService"].full_name


def make_backend(config: SandboxesConfig) -> Backend:
    """The backend that the configuration names."""
    if config.backend == "process":
        return ProcessBackend(unsafe=config.unsafe)
    return BubblewrapBackend() if config.backend == "bubblewrap" else NativeBackend()


class Sandboxes(Service):
    """Serves sandbox sessions."""

    name = "sandboxes"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._backend = make_backend(self.config.sandboxes)
        self._table: SessionTable | None = None
        self._serving = False

    def ready(self) -> bool:
        return self._serving

    def stats(self) -> Mapping[str, float]:
        table = self._table
        if table is None:
            return {}
        return {
            "sessions_live": len(table.live),
            "sessions_max": self.config.sandboxes.max_sessions,
            "pool_ready": sum(table.ready.values()),
            "creates_total": table.creates_total,
            "execs_total": table.execs_total,
            "lost_total": table.lost_total,
            "expired_total": table.expired_total,
            "acquire_ms_p50": table.acquire_ms_p50,
        }

    async def run(self) -> None:
        settings = self.config.sandboxes
        isolation = await self._backend.start()
        log.info(
            "isolation", backend=self._backend.name, tier=isolation.tier, missing=isolation.missing
        )
        table = self._table = SessionTable(settings, self._backend)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
                # Two executors on one port would share its calls: the second one must fail.
                ("grpc.so_reuseport", 0),
            ]
        )
        servicer = SandboxServicer(
            table,
            isolation,
            max_sessions=settings.max_sessions,
            blobs=BlobStore(self.config.blob_uri),
        )
        sandbox_pb2_grpc.add_SandboxServiceServicer_to_server(servicer, server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection((_SERVICE, reflection.SERVICE_NAME), server)
        self._bind(server)
        table.start()
        await server.start()
        await checks.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._serving = True
        try:
            await self.context.stopping.wait()
        finally:
            self._serving = servicer.serving = False
            await checks.enter_graceful_shutdown()
            await server.stop(_DRAIN_S)
            await table.stop()
            await self._backend.stop()

    def _bind(self, server: grpc.aio.Server) -> None:
        settings = self.config.sandboxes
        address = f"{settings.host}:{settings.port}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"sandboxes.port {settings.port} on {settings.host} cannot be taken: {error}",
                hint="stop what holds it, or choose another port",
            ) from error
        log.info("serving", host=settings.host, port=port)


if __name__ == "__main__":
    sys.exit(lifecycle.main(Sandboxes))
