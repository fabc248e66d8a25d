"""What the agent loop decides, without a clock, an engine or a sandbox: pure functions of what is
known.

A limit that is reached is truncation, not an error. A tool call that makes no sense is answered, so
that the policy may do better; only what the environment did wrong fails a rollout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.config.model import BudgetConfig
from rollstream.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why the loop ended."""

    status: events_pb2.OutcomeStatus
    reason: str
    error: str = ""


COMPLETED = Stop(status=events_pb2.OUTCOME_STATUS_COMPLETED, reason="stop")


def truncated(reason: str) -> Stop:
    return Stop(status=events_pb2.OUTCOME_STATUS_TRUNCATED, reason=reason)


def failed(reason: str, error: Exception) -> Stop:
    return Stop(status=events_pb2.OUTCOME_STATUS_FAILED, reason=reason, error=repr(error)[:4000])


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is left of the budgets before a turn. ``window``: tokens that still fit the policy."""

    turns: int
    tokens: int
    window: int
    wall_s: float

    def limit(self) -> Stop | None:
        """The budget that has run out, if any."""
        if self.turns <= 0:
            return truncated("max_turns")
        if self.tokens <= 0:
            return truncated("max_tokens")
        if self.window <= 0:
            return truncated("context")
        if self.wall_s <= 0:
            return truncated("wall")
        return None


def cut_reason(room: Room) -> Stop:
    """Generation ended without a stop token: which limit it was. ``room`` is what is left now."""
    return room.limit() or truncated("max_tokens_per_turn")


def budget_of(task: events_pb2.Task) -> events_pb2.Budget:
    """The task's budget; what it leaves open is the default of the configuration."""
    default = BudgetConfig()
    asked = task.budget
    return events_pb2.Budget(
        max_turns=asked.max_turns or default.max_turns,
        max_tokens=asked.max_tokens or default.max_tokens,
        max_tokens_per_turn=asked.max_tokens_per_turn or default.max_tokens_per_turn,
        wall_s=asked.wall_s or default.wall_s,
        tool_s=asked.tool_s or default.tool_s,
    )


def problem_with(call: events_pb2.ToolCall, tools: Sequence[events_pb2.ToolSpec]) -> str:
    """What is wrong with a call before anything runs, for the policy to read; empty: nothing."""
    known = [tool.name for tool in tools]
    if call.name not in known:
        return f"error: no tool {call.name!r}; there is {', '.join(known) or 'none'}"
    try:
        arguments = json.loads(call.arguments_json)
        # Half of a surrogate pair is JSON and no text: it can neither be sent nor run.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are not JSON: {error}"
    return "" if isinstance(arguments, dict) else "error: the arguments are not a JSON object"


def invalid(verifier: str, reason: str) -> events_pb2.Evidence:
    """Evidence that there is none: never a reward, never in a loss or a baseline."""
    return events_pb2.Evidence(
        verifier=verifier, validity=events_pb2.VALIDITY_INVALID, invalid_reason=reason[:2000]
    )
