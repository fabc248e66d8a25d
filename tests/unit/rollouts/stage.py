"""A rollout without engine, sandbox or clock: what the policy says and what the environment does is given by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from environments.base import Environment, SandboxSession, TaskSpec, ToolOutcome
from environments.demo_arithmetic import DemoArithmetic
from rollouts.agent import Rollout, RolloutSpec
from rollouts.engines.base import GenerateRequest, Generation, InferenceEngine, token_limit
from rollstream.chat import ChatFormat
from rollstream.codecs import text_message
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient

WINDOW = 120
USER = text_message(events_pb2.ROLE_USER, "2+3*4")
PYTHON = events_pb2.ToolSpec(name="python")


def chat_format(folder: Path) -> ChatFormat:
    for name, data in DemoArithmetic().tokenizer().items():
        (folder / name).write_bytes(data)
    return ChatFormat(folder)


def answer(text: str) -> events_pb2.Message:
    return text_message(events_pb2.ROLE_ASSISTANT, text)


def call(*codes: str) -> events_pb2.Message:
    calls = [
        events_pb2.ToolCall(name="python", arguments_json=f'{{"code": "{code}"}}') for code in codes
    ]
    return events_pb2.Message(role=events_pb2.ROLE_ASSISTANT, tool_calls=calls)


class Says(InferenceEngine):
    """An engine that says these messages, one per request; ``None`` never answers."""

    def __init__(self, chat: ChatFormat, messages: Sequence[events_pb2.Message | None]) -> None:
        self.requests: list[GenerateRequest] = []
        self._left = [None if m is None else self._ids(chat, m) for m in messages]
        self._version = 4

    @staticmethod
    def _ids(chat: ChatFormat, message: events_pb2.Message) -> np.ndarray[Any, np.dtype[np.int32]]:
        ids, mask = chat.encode_demonstration([USER, message])
        return ids[mask]

    async def start(self, model_dir: Path, *, version: int) -> None: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        said = self._left.pop(0)
        if said is None:
            await asyncio.Event().wait()
            raise AssertionError
        ids = said[: token_limit(request, window=WINDOW)]
        stopped = bool(len(ids)) and int(ids[-1]) in request.stop_ids
        # Every answer spans an update: the first token is of the old version.
        self._version += 1
        return Generation(
            token_ids=ids,
            logprobs=np.arange(len(ids), dtype=np.float32) * -0.25,
            versions=((self._version - 1, 0, 1), (self._version, 1, len(ids) - 1)),
            finish_reason=events_pb2.FINISH_REASON_STOP
            if stopped
            else events_pb2.FINISH_REASON_LENGTH,
        )

    async def update_weights(self, model_dir: Path, *, version: int) -> None: ...

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> Mapping[str, float]:
        return {}

    async def stop(self) -> None: ...


Tool = Callable[[events_pb2.ToolCall], ToolOutcome]


def _fine(call: events_pb2.ToolCall) -> ToolOutcome:
    return ToolOutcome(content="14")


def _correct(turns: Sequence[events_pb2.Turn]) -> events_pb2.Evidence:
    return events_pb2.Evidence(
        validity=events_pb2.VALIDITY_VALID, items=[events_pb2.EvidenceItem(name="correct", value=1)]
    )


class Acts(Environment):
    """An environment of the test's making. An error given in place of a function is raised."""

    def __init__(
        self,
        tool: Tool | Exception = _fine,
        verifier: Callable[[Sequence[events_pb2.Turn]], events_pb2.Evidence] | Exception = _correct,
        *,
        in_sandbox: bool = False,
    ) -> None:
        self._tool, self._verifier, self._in_sandbox = tool, verifier, in_sandbox
        self.seen: list[tuple[SandboxSession | None, events_pb2.ToolCall, float]] = []
        self.verified_in: list[SandboxSession | None] = []

    source = "test"

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Any:
        return iter(tuple[TaskSpec]())

    @property
    def verifies_in_sandbox(self) -> bool:
        return self._in_sandbox

    async def call_tool(
        self, session: SandboxSession | None, call: events_pb2.ToolCall, *, timeout_s: float
    ) -> ToolOutcome:
        self.seen.append((session, call, timeout_s))
        if isinstance(self._tool, Exception):
            raise self._tool
        return self._tool(call)

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        self.verified_in.append(session)
        if isinstance(self._verifier, Exception):
            raise self._verifier
        return self._verifier(turns)


@dataclass
class Sessions:
    """Stands for the sandbox client: hands out numbered sessions and knows which are open."""

    error: Exception | None = None
    opened: int = 0
    open: set[str] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def session(self, spec: events_pb2.SandboxSpec) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        self.opened += 1
        session = type("Session", (), {"session_id": f"s{self.opened}"})()
        self.open.add(session.session_id)
        try:
            yield session
        finally:
            self.open.discard(session.session_id)


def task(**budget: float) -> events_pb2.Task:
    return events_pb2.Task(
        header=events_pb2.Header(event_id="e", run_id="run"),
        task_id="t",
        group_id="g",
        domain="d",
        prompt=[USER],
        tools=[PYTHON],
        sandbox=events_pb2.SandboxSpec(toolchain="python"),
        verifier=events_pb2.VerifierSpec(name="v", params_json="{}"),
        budget=events_pb2.Budget(**budget),  # type: ignore[arg-type]
        group_size=2,
        purpose=events_pb2.PURPOSE_TRAIN,
        seed=10,
        sampling=events_pb2.SamplingParams(temperature=1.0),
    )


def spec_of(wanted: events_pb2.Task, *, attempt: int = 0) -> RolloutSpec:
    return RolloutSpec(task=wanted, sample_index=1, attempt=attempt, worker_id="w", queued_at=0.0)


def rollout(
    wanted: events_pb2.Task,
    chat: ChatFormat,
    engine: Says,
    environment: Environment | None = None,
    sessions: Sessions | None = None,
    *,
    max_tool_chars: int = 100,
) -> Rollout:
    return Rollout(
        spec_of(wanted),
        engine=engine,
        chat=chat,
        environment=environment or Acts(),
        sandboxes=cast(SandboxClient, sessions or Sessions()),
        max_length=WINDOW,
        max_tool_chars=max_tool_chars,
    )
