"""The ordinary ClickHouse client, for embedded and external stores alike."""

from __future__ import annotations

import logging
import time
from typing import Any

from rollstream.config import Config
from rollstream.errors import InfraError

_RETRY_S = 0.2


def store_client(config: Config, *, budget_s: float = 60.0, database: str | None = None) -> Any:
    """A clickhouse-connect client of the run's database.

    Raises:
        InfraError: the store did not answer within ``budget_s``, or answered with an error.
    """
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError

    # It logs every refused connection, which while the store starts are many and mean nothing.
    logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
    store = config.store
    deadline = time.monotonic() + budget_s
    while True:
        try:
            return clickhouse_connect.get_client(
                host=store.host,
                port=store.port,
                username=store.username,
                password=store.password,
                secure=store.secure,
                database=store.database if database is None else database,
                send_receive_timeout=int(store.request_timeout_s),
                autogenerate_session_id=False,
            )
        except Exception as error:
            if isinstance(error, DatabaseError) and not isinstance(error, OperationalError):
                raise InfraError(
                    f"the store at {store.host}:{store.port} refuses: {error}",
                    hint="check store.username, store.password and store.database",
                ) from error
            if time.monotonic() > deadline:
                raise InfraError(
                    f"the store at {store.host}:{store.port} does not answer: {error}",
                    hint="is the service store up (or ClickHouse, for store.mode=external)?",
                ) from error
            time.sleep(_RETRY_S)
