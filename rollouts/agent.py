"""One rollout: the policy talks, the environment answers, the verifier looks.

Token-in, token-out: the prompt is tokenised once, what is sampled is kept id for id, and only new
environment text is tokenised and appended. The loss mask is the sampled tokens. What to do next is
decided in ``rollouts.decisions``; this module does it.

Every wait is bounded: generation by the wall time, a tool by the tool time, a sandbox by its
client's budget, the verifier by ``_VERIFY_S``.

What goes wrong: a tool call that makes no sense is answered, the policy may do better; a tool or
verifier that crashes is recorded on this trajectory (FAILED, evidence INVALID) and its siblings go
on; ``InfraError`` (sandbox lost, engine broken) leaves the rollout to be done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

import numpy as np
import structlog

from environments.base import Environment, SandboxSession, ToolOutcome
from rollouts.decisions import (
    COMPLETED,
    Room,
    Stop,
    budget_of,
    cut_reason,
    failed,
    invalid,
    problem_with,
    truncated,
)
from rollouts.engines.base import GenerateRequest, InferenceEngine
from rollouts.tokens import Tokens
from rollstream import codecs, ids
from rollstream.chat import ChatFormat
from rollstream.errors import ContractError, InfraError
from rollstream.telemetry import tracer
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient, Session

log = structlog.get_logger(__name__)
Attributes = dict[str, str | int | float]

# A verifier may run a test suite in the sandbox, whose own limit per command is half of this.
_VERIFY_S = 60.0
# A tool is told its time and ends by itself; the sandbox client's margin is 10 s, so that whoever
# is not back by then never will be.
_TOOL_GRACE_S = 15.0
# More calls in one message than any task asks for: the rest is not run.
_MAX_CALLS_PER_TURN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Which rollout to do. ``seed`` differs between the samples of a group."""

    task: events_pb2.Task
    sample_index: int
    attempt: int
    worker_id: str
    queued_at: float

    @property
    def rollout_id(self) -> str:
        return ids.rollout_id(self.task.task_id, self.sample_index)

    @property
    def seed(self) -> int:
        return self.task.seed + self.sample_index


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
        self._budget = budget_of(spec.task)
        self._engine = engine
        self._chat = chat
        self._environment = environment
        self._sandboxes = sandboxes
        self._max_length = max_length
        self._max_tool_chars = max_tool_chars
        self._tokens = Tokens()
        self._turns: list[events_pb2.Turn] = []
        self._stack = contextlib.AsyncExitStack()
        self._session: Session | None = None
        self._timings = events_pb2.Timings()
        self._began = time.monotonic()

    async def run(self) -> events_pb2.Trajectory:
        """The finished trajectory.

        Raises:
            InfraError: engine or sandbox failed; do it again with a higher attempt.
            ContractError: the task cannot be done by this policy or on these executors.
        """
        self._began = time.monotonic()
        self._timings.started_at.CopyFrom(codecs.now())
        self._timings.queue_s = self._began - self._spec.queued_at
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": self._spec.rollout_id,
            "rollstream.domain": self._task.domain,
            "rollstream.attempt": self._spec.attempt,
        }
        name = f"invoke_agent {self._task.domain}"
        with tracer.start_as_current_span(name, attributes=attributes) as span:
            async with self._stack:
                self._open()
                stop = await self._loop()
                evidence = await self._verify(stop)
            span.set_attribute("rollstream.outcome", stop.reason)
        self._timings.finished_at.CopyFrom(codecs.now())
        return self._trajectory(stop, evidence)

    def _open(self) -> None:
        self._tokens.show(self._chat.render_prompt(self._task.prompt, self._task.tools))
        if self._tokens.length >= self._max_length:
            raise ContractError(
                f"task {self._task.task_id}: its prompt of {self._tokens.length} tokens fills the"
                f" window of {self._max_length}",
                hint="raise policy.max_length or shorten the task",
            )

    async def _loop(self) -> Stop:
        while True:
            if (limit := self._room().limit()) is not None:
                return limit
            turn = await self._speak()
            if turn is None:
                return truncated("wall")
            if turn.finish_reason != events_pb2.FINISH_REASON_STOP:
                return cut_reason(self._room())
            if not turn.assistant.tool_calls:
                return COMPLETED
            stop = await self._answer(turn)
            if stop is not None:
                return stop

    def _room(self) -> Room:
        return Room(
            turns=self._budget.max_turns - len(self._turns),
            tokens=self._budget.max_tokens - self._tokens.sampled_count,
            window=self._max_length - self._tokens.length,
            wall_s=self._budget.wall_s - (time.monotonic() - self._began),
        )

    async def _speak(self) -> events_pb2.Turn | None:
        """One assistant message; None when the wall time ended before it did."""
        room = self._room()
        request = self._request(room)
        turn = events_pb2.Turn(index=len(self._turns))
        turn.started_at.CopyFrom(codecs.now())
        started = time.monotonic()
        attributes: Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
        }
        with tracer.start_as_current_span("chat", attributes=attributes) as span:
            try:
                async with asyncio.timeout(room.wall_s):
                    generation = await self._engine.generate(request)
            except TimeoutError:
                return None
            finally:
                turn.generate_s = time.monotonic() - started
                self._timings.generate_s += turn.generate_s
            span.set_attribute("gen_ai.usage.output_tokens", len(generation.token_ids))
        if generation.finish_reason == events_pb2.FINISH_REASON_ABORT:
            raise InfraError("the engine gave the request up")
        turn.sampled.CopyFrom(self._tokens.sample(generation))
        turn.finish_reason = generation.finish_reason
        turn.assistant.CopyFrom(self._chat.parse_assistant(generation.token_ids, turn=turn.index))
        self._turns.append(turn)
        return turn

    def _request(self, room: Room) -> GenerateRequest:
        sampling = self._task.sampling
        return GenerateRequest(
            prompt_ids=self._tokens.ids,
            max_tokens=min(room.tokens, room.window, self._budget.max_tokens_per_turn),
            temperature=sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k,
            stop_ids=self._chat.stop_ids,
            session=self._spec.rollout_id,
            seed=self._spec.seed,
        )

    async def _answer(self, turn: events_pb2.Turn) -> Stop | None:
        """Run the turn's tool calls and show the results; a reason to stop when one is beyond
        repair.
        """
        shown = []
        stop: Stop | None = None
        for call in turn.assistant.tool_calls[:_MAX_CALLS_PER_TURN]:
            result, stop = await self._call(call)
            turn.tool_results.add().CopyFrom(result)
            turn.tool_s += result.wall_s
            shown.append(
                events_pb2.Message(
                    role=events_pb2.ROLE_TOOL,
                    content=[events_pb2.ContentPart(text=result.content)],
                    tool_call_id=call.id,
                    name=call.name,
                )
            )
            if stop is not None:
                return stop
        self._tokens.show(self._chat.render_continuation(shown, closed=True))
        return None

    async def _call(self, call: events_pb2.ToolCall) -> tuple[events_pb2.ToolResult, Stop | None]:
        """One tool call; its wall time counts against the tool time, waiting for a sandbox does
        not.
        """
        left_s = self._budget.tool_s - self._timings.tool_s
        stop: Stop | None = None
        wall_s = 0.0
        if problem := problem_with(call, self._task.tools):
            outcome = _refusal(problem)
        elif left_s <= 0:
            outcome, stop = _refusal("the tool time is used up"), truncated("tool_time")
        else:
            session = await self._sandbox()
            started = time.monotonic()
            outcome, stop = await self._run_tool(session, call, left_s)
            wall_s = time.monotonic() - started
            self._timings.tool_s += wall_s
        text = self._chat.neutralise(outcome.content)
        result = events_pb2.ToolResult(
            tool_call_id=call.id,
            name=call.name,
            status=outcome.status,
            content=text[: self._max_tool_chars],
            exit_code=outcome.exit_code,
            dropped_bytes=outcome.dropped_bytes + max(0, len(text) - self._max_tool_chars),
            wall_s=wall_s,
            error=outcome.error,
        )
        return result, stop

    async def _run_tool(
        self, session: SandboxSession | None, call: events_pb2.ToolCall, left_s: float
    ) -> tuple[ToolOutcome, Stop | None]:
        """The boundary to the environment's code: whatever it raises is recorded."""
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
        limit = asyncio.timeout(left_s + _TOOL_GRACE_S)
        try:
            with tracer.start_as_current_span(f"execute_tool {call.name}", attributes=attributes):
                async with limit:
                    return await self._environment.call_tool(session, call, timeout_s=left_s), None
        except InfraError:
            raise
        except Exception as error:
            log.exception("tool crashed", domain=self._task.domain, tool=call.name)
            outcome = ToolOutcome(
                content="", status=events_pb2.TOOL_STATUS_INFRA, error=repr(error)[:2000]
            )
            return outcome, failed("tool_hung" if limit.expired() else "tool_crashed", error)

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

    async def _verify(self, stop: Stop) -> events_pb2.Evidence:
        """Evidence on the finished rollout; INVALID with the reason where there can be none."""
        name = self._task.verifier.name
        if stop.status == events_pb2.OUTCOME_STATUS_FAILED:
            return invalid(name, stop.reason)
        # A verifier that needs the sandbox gets the one of the rollout, or a fresh one.
        session = await self._sandbox() if self._environment.verifies_in_sandbox else None
        started = time.monotonic()
        limit = asyncio.timeout(_VERIFY_S)
        try:
            params = json.loads(self._task.verifier.params_json or "{}")
            async with limit:
                evidence = await self._environment.verify(session, params, self._turns)
        except InfraError:
            raise
        except Exception as error:
            if limit.expired():
                return invalid(name, f"the verifier took longer than {_VERIFY_S:.0f} s")
            log.exception("verifier crashed", domain=self._task.domain)
            return invalid(name, f"the verifier crashed: {error!r}")
        finally:
            self._timings.verify_s = time.monotonic() - started
        broken = [item.name for item in evidence.items if not np.isfinite(item.value)]
        if broken:
            return invalid(name, f"evidence is not a finite number: {', '.join(broken)}")
        evidence.verifier = name
        evidence.wall_s = self._timings.verify_s
        return evidence

    def _trajectory(self, stop: Stop, evidence: events_pb2.Evidence) -> events_pb2.Trajectory:
        trajectory = _blank(self._spec, self._timings)
        versions = [version for version, _, _ in self._tokens.versions]
        trajectory.MergeFrom(
            events_pb2.Trajectory(
                sequences=[self._tokens.sequence()],
                turns=self._turns,
                evidence=evidence,
                outcome=events_pb2.Outcome(
                    status=stop.status, reason=stop.reason, error=stop.error
                ),
                policy_version_min=min(versions, default=self._engine.version),
                policy_version_max=max(versions, default=self._engine.version),
                sandbox_id=self._session.session_id if self._session else "",
                sampling=self._task.sampling,
                sampled_tokens=self._tokens.sampled_count,
            )
        )
        return trajectory


def failed_trajectory(spec: RolloutSpec, error: Exception) -> events_pb2.Trajectory:
    """What stands for a rollout that could not be done: recorded, masked, never a reward of 0."""
    now = codecs.now()
    trajectory = _blank(spec, events_pb2.Timings(started_at=now, finished_at=now))
    trajectory.evidence.CopyFrom(invalid(spec.task.verifier.name, f"not done: {error}"))
    trajectory.outcome.CopyFrom(
        events_pb2.Outcome(
            status=events_pb2.OUTCOME_STATUS_FAILED,
            reason=getattr(error, "code", "internal"),
            error=(str(error) or repr(error))[:4000],
        )
    )
    return trajectory


def _blank(spec: RolloutSpec, timings: events_pb2.Timings) -> events_pb2.Trajectory:
    """Whose trajectory it is and when: all that does not depend on how it went."""
    task = spec.task
    event_id = ids.event_id("Trajectory", spec.rollout_id, spec.attempt)
    return events_pb2.Trajectory(
        header=codecs.header(task.header.run_id, event_id, occurred_at=timings.finished_at),
        rollout_id=spec.rollout_id,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=spec.sample_index,
        attempt=spec.attempt,
        domain=task.domain,
        purpose=task.purpose,
        group_size=task.group_size,
        prompt=task.prompt,
        timings=timings,
        worker_id=spec.worker_id,
        suite=task.suite,
        seed=spec.seed,
        difficulty=task.difficulty,
    )


def _refusal(text: str) -> ToolOutcome:
    return ToolOutcome(content=text, status=events_pb2.TOOL_STATUS_INVALID, error=text)
