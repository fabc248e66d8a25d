"""Brings a store to the schema of this program: numbered SQL files, each applied once, in order.

What was applied is recorded with a checksum; a file that was changed after it had been applied is
an error, because nobody could tell what the tables look like.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import structlog

from rollstream.errors import ConfigError

log = structlog.get_logger(__name__)

_LEDGER = """
CREATE TABLE IF NOT EXISTS schema_migrations
(name String, checksum String, applied_at DateTime64(6, 'UTC') DEFAULT now64(6))
ENGINE = MergeTree ORDER BY name
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    @property
    def statements(self) -> list[str]:
        """The statements of the file, comments removed."""
        lines = [line.split("--", 1)[0] for line in self.sql.splitlines()]
        return [s.strip() for s in "\n".join(lines).split(";") if s.strip()]


def available() -> list[Migration]:
    """The migrations of this program, in order."""
    folder = files("trajectories") / "schema"
    found = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [Migration(name=f.name, sql=f.read_text("utf-8")) for f in found]


def migrate(client: Any, database: str) -> list[str]:
    """Apply what is missing; returns the names. ``client`` is connected to ``database``.

    Raises:
        ConfigError: an applied migration is not the one that this program has.
    """
    client.command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    client.command(_LEDGER)
    applied = dict(client.query("SELECT name, checksum FROM schema_migrations").result_rows)
    done = []
    for migration in available():
        if migration.name in applied:
            if applied[migration.name] != migration.checksum:
                raise ConfigError(
                    f"migration {migration.name} was applied in another form to {database!r}",
                    hint="use the program version that made this store, or a fresh database",
                )
            continue
        for statement in migration.statements:
            client.command(statement)
        client.insert(
            "schema_migrations",
            [[migration.name, migration.checksum]],
            column_names=["name", "checksum"],
        )
        log.info("migrated", name=migration.name)
        done.append(migration.name)
    return done
