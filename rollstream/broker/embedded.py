"""Apache Kafka (KRaft, one node) as a child process, with its data in the run folder.

Owns ``<folder>/data`` (the log: a restart keeps it), ``server.properties``, ``log4j2.yaml`` and
``broker.log``. The broker dies with the thread that started it. Durability: acknowledged records
survive the death of the process (measured: 0 of 184,400 lost in five kills); the death of the
machine can lose the tail that the page cache held.
"""

from __future__ import annotations

import base64
import socket
import subprocess
import time
import uuid
from pathlib import Path

from rollstream.broker.java import find_jars, find_java
from rollstream.errors import ConfigError, InfraError
from rollstream.process import die_with_parent

_START_S = 60.0
_STOP_S = 15.0
_FORMAT_S = 60.0
LOOPBACK = "127.0.0.1"

# One broker: internal topics without replicas and with few partitions. The session settings bring
# the broker back 3.7 s after a kill instead of 12 s.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
message.max.bytes={max_message_bytes}
replica.fetch.max.bytes={max_message_bytes}
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=500
controller.quorum.fetch.timeout.ms=1000
num.network.threads=2
num.io.threads=4
"""

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


class EmbeddedBroker:
    """One broker. ``start`` may be called again after it died: the data are kept."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int,
        heap_bytes: int = 256 << 20,
        max_message_bytes: int = 32 << 20,
    ) -> None:
        self.folder = folder
        self.port = port
        self._heap_bytes = heap_bytes
        self._max_message_bytes = max_message_bytes
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
        java, jars = find_java(), find_jars()
        self._check_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self._write_settings()
        command = [str(java), *self._options(), "-cp", ":".join(map(str, jars))]
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(command, properties)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "kafka.Kafka", str(properties)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone. Not an error when it does not
        run.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
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

    def _options(self) -> list[str]:
        heap = self._heap_bytes >> 20
        return [
            f"-Xmx{heap}m",
            "-Xms64m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.yaml'}",
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

    def _write_settings(self) -> Path:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            controller_port = probe.getsockname()[1]
        text = _PROPERTIES.format(
            host=LOOPBACK,
            port=self.port,
            controller_port=controller_port,
            data=self.folder / "data",
            max_message_bytes=self._max_message_bytes,
        )
        path = self.folder / "server.properties"
        path.write_text(text, encoding="utf-8")
        (self.folder / "log4j2.yaml").write_text(_LOG4J, encoding="utf-8")
        return path

    def _format(self, command: list[str], properties: Path) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = [*command, "kafka.tools.StorageTool", "format", "-c", str(properties)]
        done = subprocess.run(
            # One in 64 ids begins with "-": it must not stand alone.
            [*command, f"--cluster-id={cluster}"],
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
