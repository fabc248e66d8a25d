"""Every backend, each as a real executor behind gRPC, as root and as an ordinary user."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest

from rollstream.v1 import events_pb2, sandbox_pb2, sandbox_pb2_grpc
from sandboxes.client import SandboxClient, Session
from sandboxes.testing import Executor, executor

HOST_SECRET = "rollstream-test-secret"
LIMITS = (
    "sandboxes.limits.memory_bytes=268435456",
    "sandboxes.limits.pids=48",
    "sandboxes.limits.disk_bytes=8388608",
    "sandboxes.limits.output_bytes=65536",
    "sandboxes.limits.wall_s=20",
    "sandboxes.pool={python=2}",
)
ISOLATING = ("native", "native-user", "bubblewrap", "bubblewrap-user")
ALL = ("native", "bubblewrap", "process")
BACKENDS = {
    "isolation": ISOLATING,
    "adversarial": ISOLATING,
    "layers": ("native", "native-user"),
}


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """The executor of the backend that the test is parametrised with."""
    backend, _, user = request.param.partition("-")
    settings = [*LIMITS, f"sandboxes.backend={backend}"]
    if backend == "process":
        settings.append("sandboxes.unsafe=true")
    with executor(settings, env={"HOST_SECRET": HOST_SECRET}, ordinary_user=bool(user)) as started:
        yield started


@pytest.fixture
def missing(running: Executor) -> tuple[str, ...]:
    """What the executor says that it does not enforce here."""
    with grpc.insecure_channel(running.target) as channel:
        stub = sandbox_pb2_grpc.SandboxServiceStub(channel)
        return tuple(stub.Capacity(sandbox_pb2.CapacityRequest(), timeout=10).missing)


@pytest.fixture
async def stub(running: Executor) -> AsyncIterator[sandbox_pb2_grpc.SandboxServiceStub]:
    async with grpc.aio.insecure_channel(running.target) as channel:
        yield sandbox_pb2_grpc.SandboxServiceStub(channel)


@pytest.fixture
async def client(running: Executor) -> AsyncIterator[SandboxClient]:
    async with SandboxClient([running.target]) as client:
        yield client


@pytest.fixture
async def session(client: SandboxClient) -> AsyncIterator[Session]:
    async with client.session(events_pb2.SandboxSpec(toolchain="python")) as session:
        yield session


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "running" in metafunc.fixturenames:
        kind = metafunc.module.__name__.rpartition("_")[2]
        backends = BACKENDS.get(kind, ALL)
        metafunc.parametrize("running", backends, indirect=True, scope="session")
