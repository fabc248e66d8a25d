"""One supervised process: started, watched, restarted, stopped.

What it waits for: the process to exit, its health endpoint, or the wish to stop. A process whose
``/livez`` does not answer for ``_DEAF_S`` is killed and restarted: its loop no longer turns. Logs
of all lives go to one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import aiohttp
import structlog

from rollstream.config.model import SupervisorConfig
from rollstream.process import die_with_parent
from rollstream.supervisor.restarts import Verdict, decide
from rollstream.supervisor.services import ServiceSpec, command, environment

log = structlog.get_logger(__name__)

# A stop of the garbage collector or a long compile may take seconds; half a minute is a hang.
_DEAF_S = 30.0
_POLL_S = 0.25
_TAIL_BYTES = 65536
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class State(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BUSY = "not ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


class Child:
    """A service as a process of this supervisor."""

    def __init__(
        self, spec: ServiceSpec, *, config_path: Path, run_dir: Path, policy: SupervisorConfig
    ) -> None:
        self.spec = spec
        self.state = State.WAITING
        self.restarts = 0
        self.error = ""
        self._config_path = config_path
        self._run_dir = run_dir
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()

    @property
    def log_path(self) -> Path:
        return self._run_dir / "logs" / f"{self.spec.name}.log"

    @property
    def pid(self) -> int | None:
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else None

    async def ready(self) -> None:
        """Wait until the service has been ready once."""
        await self._ready.wait()

    async def run(self) -> None:
        """Keep the process alive until it is done, given up, or told to stop."""
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._live_once()
            if self._stopping.is_set():
                break
            decision = decide(
                exit_status=status,
                uptime_s=time.monotonic() - started,
                failures=failures,
                max_restarts=self._policy.max_restarts,
                backoff_s=self._policy.backoff_s,
            )
            failures = decision.failures
            if decision.verdict is Verdict.DONE:
                break
            self.error = f"exited with status {status}: {self.last_line()}"
            log.warning("service exited", name=self.spec.name, status=status, next=decision.verdict)
            if decision.verdict is Verdict.GIVE_UP:
                self.state = State.FAILED
                return
            self.state = State.RESTARTING
            self.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.delay_s)
        self.state = State.STOPPED

    async def stop(self, *, deadline_s: float) -> None:
        """SIGTERM, wait, SIGKILL. Returns when the process is gone."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), deadline_s)
        except TimeoutError:
            log.warning("killed after the drain deadline", name=self.spec.name, drain_s=deadline_s)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def last_line(self) -> str:
        """The last line of the log that says something, cut to 300 characters."""
        try:
            lines = (
                self.log_path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").splitlines()
            )
        except OSError:
            return ""
        said = [text for line in lines if (text := _complaint(line))]
        return (said or [line for line in lines if line.strip()] or [""])[-1].strip()[:300]

    async def stats(self, http: aiohttp.ClientSession) -> Mapping[str, float]:
        """What ``/stats`` answers, or nothing while the service cannot be reached."""
        port = self._health_port()
        if port is None:
            return {}
        try:
            async with http.get(
                f"http://127.0.0.1:{port}/stats", timeout=_REQUEST_TIMEOUT
            ) as response:
                body = await response.json()
                return {str(k): float(v) for k, v in body.items()}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}

    async def _live_once(self) -> int:
        self.state = State.STARTING
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *command(self.spec, self._config_path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment(),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        watch = asyncio.create_task(self._watch(), name=f"watch-{self.spec.name}")
        try:
            return await self._process.wait()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        heard = time.monotonic()
        async with aiohttp.ClientSession(timeout=_REQUEST_TIMEOUT) as http:
            while True:
                status = await self._probe(http)
                if status is None:
                    silent = time.monotonic() - heard
                    limit = _DEAF_S if self._ready.is_set() else self._policy.ready_timeout_s
                    if silent > limit:
                        log.error("no answer, killing", name=self.spec.name, silent_s=round(silent))
                        self.kill()
                        return
                else:
                    heard = time.monotonic()
                    self.state = State.READY if status else State.BUSY
                    if status:
                        self._ready.set()
                await asyncio.sleep(_POLL_S)

    async def _probe(self, http: aiohttp.ClientSession) -> bool | None:
        """True ready, False alive and not ready, None no answer."""
        port = self._health_port()
        if port is None:
            return None
        try:
            async with http.get(f"http://127.0.0.1:{port}/readyz") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _health_port(self) -> int | None:
        try:
            said = json.loads((self._run_dir / "services" / f"{self.spec.name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        # A file of a previous life names another process.
        return int(said["port"]) if said.get("pid") == self.pid else None


def _complaint(line: str) -> str:
    """What a log line says went wrong with the service; empty for any other line."""
    if line.startswith("error:"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(entry, dict) or entry.get("logger") != "rollstream.lifecycle":
        return ""
    if entry.get("level") != "error":
        return ""
    raised = [f"{e.get('exc_type')}: {e.get('exc_value')}" for e in entry.get("exception", [])]
    return " <- ".join(raised) or str(entry.get("error") or entry.get("event"))
