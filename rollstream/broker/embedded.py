"""Apache Kafka (KRaft) as child processes, with their data in the run folder: one broker, or a
cluster of three.

Owns ``<folder>/data`` (the log: a restart keeps it), ``server.properties``, ``log4j2.yaml`` and
``broker.log``; of a cluster each broker has a folder of its own below. A broker dies with the
thread that started it. Durability: acknowledged records survive the death of the process (measured:
0 of 184,400 lost in five kills); the death of the machine can lose the tail that the page cache
held, also of three brokers when they share that machine.
"""

from __future__ import annotations

import base64
import functools
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rollstream.broker.java import find_jars, find_java
from rollstream.errors import ConfigError, InfraError
from rollstream.net import LOOPBACK, free_port
from rollstream.process import die_with_parent

_START_S = 60.0
_STOP_S = 15.0
_FORMAT_S = 60.0

# Internal topics have few partitions. The session settings bring a broker back 3.7 s after a kill
# instead of 12 s.
_PROPERTIES = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "num.network.threads": "2",
    "num.io.threads": "4",
}

_LOG4J = """\
Configuration:
  Appenders:
    Console:
      name: C
      PatternLayout:
        pattern: "[%d] %p %m (%c)%n"
  Loggers:
    Root:
      level: WARN
      AppenderRef:
        - ref: C
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A broker's place in its cluster: its number from 1, the controllers' ports in that order, and
    the id of the cluster (22 characters of base64).
    """

    node_id: int
    controller_ports: tuple[int, ...]
    cluster_id: str


class EmbeddedBroker:
    """One broker. ``start`` may be called again after it died: the data are kept.

    ``membership``: None for a broker of its own. ``protocol``: what clients must speak
    (``SASL_SSL``, ...); what that needs is in ``properties``, which go over the launcher's own, and
    in ``format_options``, which go to the storage tool, once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int,
        heap_bytes: int = 256 << 20,
        max_message_bytes: int = 32 << 20,
        membership: Membership | None = None,
        protocol: str = "PLAINTEXT",
        properties: Mapping[str, str] | None = None,
        format_options: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.port = port
        self._heap_bytes = heap_bytes
        self._max_message_bytes = max_message_bytes
        self._membership = membership
        self._protocol = protocol
        self._properties = dict(properties or {})
        self._format_options = tuple(format_options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        return self.folder / "broker.log"

    def start(self) -> None:
        """``launch`` and ``wait_ready``."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Format the storage if it is new, and start the process, which dies with this thread.

        Raises:
            ConfigError: no Java or no jars on this machine, or the port is taken.
            InfraError: the storage cannot be formatted.
        """
        self.format()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._settings_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def format(self) -> None:
        """Write the settings and, where there are no data yet, format the storage.

        Raises: as ``launch``.
        """
        self._check_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        membership = self._membership or Membership(
            node_id=1, controller_ports=(free_port(),), cluster_id=new_cluster_id()
        )
        self._write_settings(membership)
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(membership.cluster_id)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll() if self._process else None

    def terminate(self) -> None:
        """SIGTERM, if it runs; ``stop`` waits for the end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone. Not an error when it does not
        run.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """SIGKILL: for fault tests."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _settings_path(self) -> Path:
        return self.folder / "server.properties"

    def _java(self) -> list[str]:
        """The command line up to the class to run."""
        heap = self._heap_bytes >> 20
        return [
            str(find_java()),
            f"-Xmx{heap}m",
            "-Xms64m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.yaml'}",
            "-cp",
            ":".join(map(str, find_jars())),
        ]

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, self.port))
            except OSError as error:
                raise ConfigError(
                    f"the broker's port {self.port} is in use: {error.strerror}",
                    hint="stop what holds it, or set bus.port=0 for a free one",
                ) from error

    def _write_settings(self, membership: Membership) -> None:
        ports, node = membership.controller_ports, membership.node_id
        replicas = str(min(3, len(ports)))
        in_sync = str(max(1, min(3, len(ports)) - 1))
        listener = f"{self._protocol}://{LOOPBACK}:{self.port}"
        properties = {
            **_PROPERTIES,
            "node.id": str(node),
            "controller.quorum.voters": ",".join(
                f"{i}@{LOOPBACK}:{port}" for i, port in enumerate(ports, start=1)
            ),
            "listeners": f"{listener},CONTROLLER://{LOOPBACK}:{ports[node - 1]}",
            "advertised.listeners": listener,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT"
            f",{self._protocol}:{self._protocol}",
            "security.inter.broker.protocol": self._protocol,
            "log.dirs": str(self.folder / "data"),
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "message.max.bytes": str(self._max_message_bytes),
            "replica.fetch.max.bytes": str(self._max_message_bytes),
            **self._properties,
        }
        lines = "".join(f"{key}={value}\n" for key, value in properties.items())
        self._settings_path.write_text(lines, encoding="utf-8")
        # It may hold passwords.
        self._settings_path.chmod(0o600)
        (self.folder / "log4j2.yaml").write_text(_LOG4J, encoding="utf-8")

    def _format(self, cluster_id: str) -> None:
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-c"]
        done = subprocess.run(
            # One in 64 ids begins with "-": it must not stand alone.
            [
                *command,
                str(self._settings_path),
                f"--cluster-id={cluster_id}",
                *self._format_options,
            ],
            capture_output=True,
            text=True,
            timeout=_FORMAT_S,
            check=False,
        )
        if done.returncode:
            raise InfraError(
                f"the broker's storage {self.folder / 'data'} cannot be formatted: "
                f"{(done.stderr or done.stdout).strip()[-500:]}",
                hint="is the folder writable, and is there space?",
            )

    def wait_ready(self) -> None:
        """Return when the port answers.

        Raises:
            InfraError: the broker ended or did not answer in time; the message ends with its
                last log line.
        """
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise InfraError(
                    f"the broker ended with status {self._process.returncode}: {self._last_line()}",
                    hint=f"see {self.log_path}",
                )
            try:
                socket.create_connection((LOOPBACK, self.port), timeout=0.2).close()
                return
            except OSError:
                time.sleep(0.05)
        self.kill()
        raise InfraError(
            f"the broker did not answer on port {self.port} within {_START_S:.0f} s",
            hint=f"see {self.log_path}",
        )

    def _last_line(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"


class EmbeddedCluster:
    """Brokers that replicate each other; one of them is a cluster too.

    Raises:
        ValueError: neither one nor three ports.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ports: Sequence[int],
        heap_bytes: int = 256 << 20,
        max_message_bytes: int = 32 << 20,
    ) -> None:
        self._folder = folder
        make = functools.partial(
            EmbeddedBroker, heap_bytes=heap_bytes, max_message_bytes=max_message_bytes
        )
        if len(ports) == 1:
            self.brokers = [make(folder, port=ports[0])]
            return
        if len(ports) != 3:
            raise ValueError(f"a cluster has one broker or three, not {len(ports)}")
        controllers: list[int] = []
        while len(controllers) < len(ports):
            if (port := free_port()) not in (*ports, *controllers):
                controllers.append(port)
        cluster_id = _cluster_id_of(folder) or new_cluster_id()
        self.brokers = [
            make(
                folder / str(number),
                port=port,
                membership=Membership(
                    node_id=number, controller_ports=tuple(controllers), cluster_id=cluster_id
                ),
            )
            for number, port in enumerate(ports, start=1)
        ]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.bootstrap_servers for broker in self.brokers)

    def start(self) -> None:
        """Start all and wait until all answer.

        Raises:
            ConfigError: as ``EmbeddedBroker.launch``; the folder holds another number of brokers.
            InfraError: as ``EmbeddedBroker.launch`` and ``wait_ready``.
        """
        self._check_folder()
        # A broker dies with the thread that launched it; formatting is a process that ends.
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(EmbeddedBroker.format, self.brokers))
        for broker in self.brokers:
            broker.launch()
        for broker in self.brokers:
            broker.wait_ready()

    def _check_folder(self) -> None:
        one = len(self.brokers) == 1
        other = "*/data/meta.properties" if one else "data/meta.properties"
        if any(self._folder.glob(other)):
            held, wanted = ("three brokers", 1) if one else ("one broker", 3)
            raise ConfigError(
                f"{self._folder} holds the log of {held}, and bus.brokers={wanted}",
                hint=f"set bus.brokers={3 if one else 1}, or use another folder",
            )

    def stop(self) -> None:
        """Stop all. Asked together: the last one has no quorum to take leave of."""
        for broker in self.brokers:
            broker.terminate()
        for broker in self.brokers:
            broker.stop()


def new_cluster_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _cluster_id_of(folder: Path) -> str:
    """The id under which the cluster in ``folder`` was formatted; empty when it was not."""
    for meta in sorted(folder.glob("*/data/meta.properties")):
        for line in meta.read_text(encoding="utf-8").splitlines():
            if line.startswith("cluster.id="):
                return line.removeprefix("cluster.id=")
    return ""
