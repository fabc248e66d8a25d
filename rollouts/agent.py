"""One rollout: the policy talks, the environment answers, the verifier looks.

Token-in, token-out: the prompt is tokenised once, what is sampled is kept id for id, and only new
environment text is tokenised and appended. The loss mask is the sampled tokens.

What goes wrong: a tool call that makes no sense is answered, the policy may do better; a tool or
verifier that crashes is recorded on this trajectory (FAILED, evidence INVALID) and its siblings go
on; ``InfraError`` (sandbox lost, engine broken) leaves the rollout to be done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from environments.base import Environment, SandboxSession, ToolOutcome
from rollouts.engines.base import GenerateRequest, Generation, InferenceEngine
from rollstream import codecs, ids
from rollstream.chat import ChatFormat, IntArray
from rollstream.errors import InfraError
from rollstream.telemetry import tracer
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient, Session

log = structlog.get_logger(__name__)

_VERIFY_S = 60.0
_MAX_CALLS_PER_TURN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Which rollout to do. ``seed`` differs between the samples of a group."""

    task: events_pb2.Task
    sample_index: int
    attempt: int
    worker_id: str
    queued_at: float


@dataclass(slots=True, kw_only=True)
class _Tokens:
    """The growing token sequence."""

    parts: list[IntArray] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    sampled: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    length: int = 0

    def show(self, token_ids: IntArray) -> None:
        self.parts.append(token_ids)
        self.length += len(token_ids)

    def sample(self, generation: Generation) -> events_pb2.Span:
        start, count = self.length, len(generation.token_ids)
        self.show(generation.token_ids)
        if count:
            self.logprobs.append(generation.logprobs)
            self.sampled.append((start, count))
            self.versions += [(v, start + at, n) for v, at, n in generation.versions]
        return events_pb2.Span(start=start, length=count)

    @property
    def ids(self) -> IntArray:
        return np.concatenate(self.parts)

    @property
    def sampled_count(self) -> int:
        return sum(count for _, count in self.sampled)

    def sequence(self) -> events_pb2.TokenSequence:
        logprobs = np.concatenate(self.logprobs) if self.logprobs else np.zeros(0, np.float32)
        return codecs.make_sequence(
            self.ids, logprobs, sampled=self.sampled, versions=self.versions
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """Why the loop ended."""

    status: events_pb2.OutcomeStatus
    reason: str
    error: str = ""


_COMPLETED = _Stop(status=events_pb2.OUTCOME_STATUS_COMPLETED, reason="stop")


def _truncated(reason: str) -> _Stop:
    return _Stop(status=events_pb2.OUTCOME_STATUS_TRUNCATED, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is left of the budgets before a turn."""

    turns: int
    tokens: int
    window: int
    wall_s: float

    def limit(self) -> _Stop | None:
        """The budget that has run out, if any: truncation, not an error."""
        if self.turns <= 0:
            return _truncated("max_turns")
        if self.tokens <= 0:
            return _truncated("max_tokens")
        if self.window <= 0:
            return _truncated("context")
        if self.wall_s <= 0:
            return _truncated("wall")
        return None


class Rollout:
    """One attempt at one sample of a task."""

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        engine: InferenceEngine,
        chat: ChatFormat,
        environment: Environment,
        sandboxes: SandboxClient | None,
        max_length: int,
        max_tool_chars: int,
    ) -> None:
        self._spec = spec
        self._task = spec.task
        self._engine = engine
        self._chat = chat
        self._environment = environment
        self._sandboxes = sandboxes
        self._max_length = max_length
        self._max_tool_chars = max_tool_chars
        self._rollout_id = ids.rollout_id(spec.task.task_id, spec.sample_index)
        self._tokens = _Tokens()
        self._turns: list[events_pb2.Turn] = []
        self._stack = contextlib.AsyncExitStack()
        self._session: Session | None = None
        self._timings = events_pb2.Timings()
        self._began = time.monotonic()

    async def run(self) -> events_pb2.Trajectory:
        """The finished trajectory.

        Raises:
            InfraError: engine or sandbox failed; do it again with a higher attempt.
        """
        self._timings.started_at.GetCurrentTime()
        self._timings.queue_s = self._began - self._spec.queued_at
        attributes = {
            "rollstream.rollout_id": self._rollout_id,
            "rollstream.domain": self._task.domain,
            "gen_ai.operation.name": "invoke_agent",
        }
        async with self._stack:
            with tracer.start_as_current_span("rollout", attributes=attributes):
                self._tokens.show(self._chat.render_prompt(self._task.prompt, self._task.tools))
                stop = await self._loop()
                evidence = await self._verify(stop)
        self._timings.finished_at.GetCurrentTime()
        return self._trajectory(stop, evidence)

    async def _loop(self) -> _Stop:
        while True:
            if (limit := self._room().limit()) is not None:
                return limit
            turn = await self._speak()
            if turn.finish_reason != events_pb2.FINISH_REASON_STOP:
                return self._cut_reason()
            if not turn.assistant.tool_calls:
                return _COMPLETED
            stop = await self._answer(turn)
            if stop is not None:
                return stop

    def _room(self) -> Room:
        budget = self._task.budget
        return Room(
            turns=budget.max_turns - len(self._turns),
            tokens=budget.max_tokens - self._tokens.sampled_count,
            window=self._max_length - self._tokens.length,
            wall_s=budget.wall_s - (time.monotonic() - self._began),
        )

    def _cut_reason(self) -> _Stop:
        """Generation ended without a stop token: which limit it was."""
        limit = self._room().limit()
        return limit if limit is not None else _truncated("max_tokens_per_turn")

    async def _speak(self) -> events_pb2.Turn:
        """One assistant message."""
        room, sampling = self._room(), self._task.sampling
        turn = events_pb2.Turn(index=len(self._turns))
        turn.started_at.GetCurrentTime()
        started = time.monotonic()
        generation = await self._engine.generate(
            GenerateRequest(
                prompt_ids=self._tokens.ids,
                max_tokens=min(room.tokens, room.window, self._task.budget.max_tokens_per_turn),
                temperature=sampling.temperature,
                top_p=sampling.top_p or 1.0,
                top_k=sampling.top_k,
                stop_ids=self._chat.stop_ids,
                session=self._rollout_id,
                seed=self._task.seed + self._spec.sample_index,
            )
        )
        turn.generate_s = time.monotonic() - started
        self._timings.generate_s += turn.generate_s
        turn.sampled.CopyFrom(self._tokens.sample(generation))
        turn.finish_reason = generation.finish_reason
        turn.assistant.CopyFrom(self._chat.parse_assistant(generation.token_ids, turn=turn.index))
        self._turns.append(turn)
        return turn

    async def _answer(self, turn: events_pb2.Turn) -> _Stop | None:
        """Run the turn's tool calls and show the results; a reason to stop when one is beyond
        repair.
        """
        started = time.monotonic()
        shown = []
        stop: _Stop | None = None
        for call in turn.assistant.tool_calls[:_MAX_CALLS_PER_TURN]:
            result, stop = await self._call(call)
            turn.tool_results.add().CopyFrom(result)
            shown.append(
                events_pb2.Message(
                    role=events_pb2.ROLE_TOOL,
                    content=[events_pb2.ContentPart(text=result.content)],
                    tool_call_id=call.id,
                    name=call.name,
                )
            )
            if stop is not None:
                break
        turn.tool_s = time.monotonic() - started
        self._timings.tool_s += turn.tool_s
        if stop is None:
            self._tokens.show(self._chat.render_continuation(shown, closed=True))
        return stop

    async def _call(self, call: events_pb2.ToolCall) -> tuple[events_pb2.ToolResult, _Stop | None]:
        left = self._task.budget.tool_s - self._timings.tool_s
        started = time.monotonic()
        if left <= 0:
            outcome = _refusal("the tool time is used up")
            stop: _Stop | None = _truncated("tool_time")
        else:
            outcome, stop = await self._guarded_call(call, left)
        text = self._chat.neutralise(outcome.content)
        dropped = outcome.dropped_bytes + max(0, len(text) - self._max_tool_chars)
        result = events_pb2.ToolResult(
            tool_call_id=call.id,
            name=call.name,
            status=outcome.status,
            content=text[: self._max_tool_chars],
            exit_code=outcome.exit_code,
            dropped_bytes=dropped,
            wall_s=time.monotonic() - started,
            error=outcome.error,
        )
        return result, stop

    async def _guarded_call(
        self, call: events_pb2.ToolCall, left_s: float
    ) -> tuple[ToolOutcome, _Stop | None]:
        problem = _problem(call, self._task.tools)
        if problem:
            return _refusal(problem), None
        session = await self._sandbox()
        try:
            outcome = await self._environment.call_tool(session, call, timeout_s=left_s)
        except InfraError:
            raise
        except Exception as error:
            log.exception("tool crashed", domain=self._task.domain, tool=call.name)
            failed = ToolOutcome(
                content="", status=events_pb2.TOOL_STATUS_INFRA, error=repr(error)[:2000]
            )
            return failed, _failed("tool_crashed", error)
        return outcome, None

    async def _sandbox(self) -> SandboxSession | None:
        """The session of this rollout, opened at the first need."""
        if not self._task.sandbox.toolchain:
            return None
        if self._session is None:
            if self._sandboxes is None:
                raise InfraError("this worker has no sandbox executor")
            started = time.monotonic()
            self._session = await self._stack.enter_async_context(
                self._sandboxes.session(self._task.sandbox)
            )
            self._timings.sandbox_wait_s += time.monotonic() - started
        return self._session

    async def _verify(self, stop: _Stop) -> events_pb2.Evidence:
        """Evidence on the finished rollout; INVALID with the reason where there can be none."""
        name = self._task.verifier.name
        if stop.status == events_pb2.OUTCOME_STATUS_FAILED:
            return _invalid(name, stop.reason)
        started = time.monotonic()
        try:
            # A verifier that needs the sandbox gets the one of the rollout, or a fresh one.
            session = await self._sandbox() if self._environment.verifies_in_sandbox else None
            params = json.loads(self._task.verifier.params_json or "{}")
            async with asyncio.timeout(_VERIFY_S):
                evidence = await self._environment.verify(session, params, self._turns)
        except InfraError:
            raise
        except TimeoutError:
            return _invalid(name, f"the verifier took longer than {_VERIFY_S:.0f} s")
        except Exception as error:
            log.exception("verifier crashed", domain=self._task.domain)
            return _invalid(name, f"the verifier crashed: {error!r}"[:2000])
        finally:
            self._timings.verify_s += time.monotonic() - started
        broken = [item.name for item in evidence.items if not np.isfinite(item.value)]
        if broken:
            return _invalid(name, f"evidence is not a finite number: {', '.join(broken)}")
        evidence.verifier = name
        evidence.wall_s = self._timings.verify_s
        return evidence

    def _trajectory(self, stop: _Stop, evidence: events_pb2.Evidence) -> events_pb2.Trajectory:
        task, spec = self._task, self._spec
        versions = [version for version, _, _ in self._tokens.versions]
        event_id = ids.event_id("Trajectory", self._rollout_id, spec.attempt)
        finished = Timestamp()
        finished.CopyFrom(self._timings.finished_at)
        return events_pb2.Trajectory(
            header=codecs.header(task.header.run_id, event_id, occurred_at=finished),
            rollout_id=self._rollout_id,
            task_id=task.task_id,
            group_id=task.group_id,
            sample_index=spec.sample_index,
            attempt=spec.attempt,
            domain=task.domain,
            purpose=task.purpose,
            group_size=task.group_size,
            prompt=task.prompt,
            sequences=[self._tokens.sequence()],
            turns=self._turns,
            evidence=evidence,
            outcome=events_pb2.Outcome(status=stop.status, reason=stop.reason, error=stop.error),
            timings=self._timings,
            policy_version_min=min(versions, default=self._engine.version),
            policy_version_max=max(versions, default=self._engine.version),
            worker_id=spec.worker_id,
            sandbox_id=self._session.session_id if self._session else "",
            sampling=task.sampling,
            suite=task.suite,
            seed=task.seed + spec.sample_index,
            difficulty=task.difficulty,
            sampled_tokens=self._tokens.sampled_count,
        )


def failed_trajectory(spec: RolloutSpec, error: Exception) -> events_pb2.Trajectory:
    """What stands for a rollout that could not be done: recorded, masked, never a reward of 0."""
    task = spec.task
    rollout_id = ids.rollout_id(task.task_id, spec.sample_index)
    now = Timestamp()
    now.GetCurrentTime()
    return events_pb2.Trajectory(
        header=codecs.header(
            task.header.run_id,
            ids.event_id("Trajectory", rollout_id, spec.attempt),
            occurred_at=now,
        ),
        rollout_id=rollout_id,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=spec.sample_index,
        attempt=spec.attempt,
        domain=task.domain,
        purpose=task.purpose,
        group_size=task.group_size,
        prompt=task.prompt,
        evidence=_invalid(task.verifier.name, f"not done: {error}"[:2000]),
        outcome=events_pb2.Outcome(
            status=events_pb2.OUTCOME_STATUS_FAILED,
            reason=getattr(error, "code", "internal"),
            error=str(error)[:4000],
        ),
        timings=events_pb2.Timings(started_at=now, finished_at=now),
        worker_id=spec.worker_id,
        suite=task.suite,
        seed=task.seed + spec.sample_index,
        difficulty=task.difficulty,
    )


def _problem(call: events_pb2.ToolCall, tools: Sequence[events_pb2.ToolSpec]) -> str:
    """What is wrong with a call before anything runs; empty when nothing is."""
    known = [tool.name for tool in tools]
    if call.name not in known:
        return f"error: no tool {call.name!r}; there is {', '.join(known) or 'none'}"
    try:
        arguments = json.loads(call.arguments_json)
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    return "" if isinstance(arguments, dict) else "error: the arguments are not a JSON object"


def _refusal(text: str) -> ToolOutcome:
    return ToolOutcome(content=text, status=events_pb2.TOOL_STATUS_INVALID, error=text)


def _failed(reason: str, error: Exception) -> _Stop:
    return _Stop(status=events_pb2.OUTCOME_STATUS_FAILED, reason=reason, error=repr(error)[:4000])


def _invalid(verifier: str, reason: str) -> events_pb2.Evidence:
    return events_pb2.Evidence(
        verifier=verifier, validity=events_pb2.VALIDITY_INVALID, invalid_reason=reason
    )
