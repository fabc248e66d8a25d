"""A broker that demands SASL/SCRAM over TLS: the configuration's ``bus.security`` opens it to every
client of ours, and nothing less does.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from processors.main import Processors
from rollstream.broker import EmbeddedBroker
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.errors import ConfigError, InfraError, RollstreamError
from rollstream.net import free_port
from rollstream.topics import ALL, DEAD_LETTERS, TASKS_SHORT, TRAJECTORIES
from tests.conftest import MakeConfig
from tests.integration.bus.test_kafka import task
from tests.services import read, running, send

USER, PASSWORD = "rollstream", 'a "secret" = of ours'


def authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    return certificate(name, key.public_key(), issuer=name, signer=key, ca=True), key


def certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    *,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .sign(signer, hashes.SHA256())
    )


def pem(found: x509.Certificate) -> bytes:
    return found.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, ``server.pem`` (key and certificate) and ``stranger.pem``, another authority."""
    folder = tmp_path_factory.mktemp("tls")
    ca, ca_key = authority("ours")
    key = ec.generate_private_key(ec.SECP256R1())
    server = certificate("broker", key.public_key(), issuer="ours", signer=ca_key, ca=False)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "ca.pem").write_bytes(pem(ca))
    (folder / "server.pem").write_bytes(private + pem(server) + pem(ca))
    (folder / "stranger.pem").write_bytes(pem(authority("theirs")[0]))
    return folder


@pytest.fixture(scope="module")
def secured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap servers of a broker with one listener, which demands SCRAM over TLS."""
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    broker = EmbeddedBroker(
        tmp_path_factory.mktemp("kafka"),
        port=free_port(),
        protocol="SASL_SSL",
        properties={
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "server.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                f'{module} required username="admin" password="admin-secret";'
            ),
        },
        format_options=[
            *("--add-scram", "SCRAM-SHA-512=[name=admin,password=admin-secret]"),
            *("--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"),
        ],
    )
    broker.start()
    yield broker.bootstrap_servers
    broker.stop()


def config_with(make_config: MakeConfig, servers: str, folder: Path, **changes: str) -> Config:
    """The right security settings, but for ``changes``."""
    right = {
        "protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "username": USER,
        "password": PASSWORD,
        "ca_file": str(folder / "ca.pem"),
    }
    settings = {**right, **changes}
    return make_config(
        servers,
        "bus.retry_budget_s=3.0",
        *(f"bus.security.{key}='''{value}'''" for key, value in settings.items() if value),
    )


async def test_with_the_right_settings_everything_works(
    secured: str, folder: Path, make_config: MakeConfig
) -> None:
    config = config_with(make_config, secured, folder)
    assert await KafkaBus(config).ensure_topics(ALL) == []
    await send(config, TASKS_SHORT, [("t1", task(1))])
    ((_, event),) = await read(config, TASKS_SHORT, 1)
    assert event.task_id == "t1"
    # Faust has a client of its own, for the same settings.
    async with running(Processors, config):
        await send(config, TRAJECTORIES, [("t2", task(2))])
        ((_, letter),) = await read(config, DEAD_LETTERS, 1)
    assert (letter.topic, letter.service) == ("trajectories", "processors")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"password": "wrong"}, ConfigError, "refused user 'rollstream'.*bus.security"),
        ({"username": "nobody"}, ConfigError, "refused user 'nobody'.*bus.security"),
        ({"sasl_mechanism": "SCRAM-SHA-256"}, ConfigError, "SCRAM-SHA-256.*bus.security"),
        ({"sasl_mechanism": "PLAIN"}, ConfigError, "PLAIN.*bus.security"),
        ({"ca_file": "stranger.pem"}, ConfigError, "certificate.*bus.security.ca_file"),
        ({"ca_file": ""}, ConfigError, "certificate.*bus.security.ca_file"),
        ({"protocol": "SSL"}, InfraError, "bus.security.protocol"),
        ({"protocol": "PLAINTEXT"}, InfraError, "bus.security.protocol"),
        ({"protocol": "SASL_PLAINTEXT"}, InfraError, "bus.security.protocol"),
    ],
)
async def test_nothing_less_is_let_in(
    secured: str,
    folder: Path,
    make_config: MakeConfig,
    changes: dict[str, str],
    error: type[RollstreamError],
    said: str,
) -> None:
    if changes.get("ca_file"):
        changes = {"ca_file": str(folder / changes["ca_file"])}
    bus = KafkaBus(config_with(make_config, secured, folder, **changes))
    producer = bus.producer(client_id="test")
    with pytest.raises(error, match=said) as refused:
        await producer.start()
    assert PASSWORD not in str(refused.value)
    assert "wrong" not in str(refused.value)
    with pytest.raises(error, match=said):
        await bus.ensure_topics(ALL)
