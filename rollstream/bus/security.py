"""The way to Kafka as ``bus.security`` has it: client settings, the TLS context, and why a broker
refuses a client (aiokafka says only that it could not connect).
"""

from __future__ import annotations

import ssl
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from rollstream.config.model import BusConfig, SecurityConfig
from rollstream.errors import ConfigError

_PROBE_MS = 5000


def client_settings(bus: BusConfig) -> dict[str, Any]:
    """Connection and security settings common to all aiokafka clients.

    Raises:
        ConfigError: no servers are named, or a TLS file cannot be read.
    """
    if not bus.bootstrap_servers:
        raise ConfigError(
            "bus.bootstrap_servers is empty",
            hint="name the Kafka servers, or start an embedded one with `rollstream up`",
        )
    return {
        "bootstrap_servers": bus.bootstrap_servers,
        "request_timeout_ms": int(bus.request_timeout_s * 1000),
        **_security(bus.security),
    }


def ssl_context(security: SecurityConfig) -> ssl.SSLContext:
    """The TLS context of the configured files. ``ConfigError`` when one cannot be read."""
    try:
        context = ssl.create_default_context(
            cafile=str(security.ca_file) if security.ca_file else None
        )
        if security.cert_file:
            context.load_cert_chain(
                str(security.cert_file), str(security.key_file) if security.key_file else None
            )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"bus.security: TLS files cannot be read: {error}",
            hint="check ca_file, cert_file, key_file",
        ) from error
    return context


async def check_refused(bus: BusConfig) -> None:
    """After a failed connection: ``ConfigError`` when a broker refuses what ``bus.security`` says,
    which trying again does not cure. Returns when it is something else (the broker is down).
    """
    security = bus.security
    if security.protocol == "PLAINTEXT":
        return
    for server in bus.bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            connection = await create_conn(
                host, int(port), request_timeout_ms=_PROBE_MS, **_security(security)
            )
        except (SaslAuthenticationFailed, AuthenticationFailedError) as error:
            raise ConfigError(
                f"Kafka at {server} refused user {security.username!r}",
                hint="check username and password in bus.security",
            ) from error
        except UnsupportedSaslMechanismError as error:
            raise ConfigError(
                f"Kafka at {server} does not take {security.sasl_mechanism}: {error}",
                hint="set bus.security.sasl_mechanism to one that it has",
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of Kafka at {server} is not trusted: {error.verify_message}",
                hint="name its authority in bus.security.ca_file",
            ) from error
        except (KafkaError, OSError, TimeoutError):
            continue
        connection.close()


def _security(security: SecurityConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"security_protocol": security.protocol}
    if security.protocol.startswith("SASL"):
        settings["sasl_mechanism"] = security.sasl_mechanism
        settings["sasl_plain_username"] = security.username
        settings["sasl_plain_password"] = security.password
    if security.protocol.endswith("SSL"):
        settings["ssl_context"] = ssl_context(security)
    return settings
