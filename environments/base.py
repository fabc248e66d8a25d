"""The environment contract: where tasks come from, what the tools do, and how the result is
verified.

An environment is one file with one class, registered by the entry-point group
``rollstream.environments``. The platform calls it from three places and keeps nothing in it between
calls: producers ask for tasks, rollout workers run tools and verification, the trainer asks for
demonstrations. A task is a function of (seed, split, index), so that any process can make the same
task again.

Failure: what the policy did wrong is an outcome (``ToolOutcome.status``, an evidence value); what
the environment or the sandbox did wrong is ``Evidence.validity = INVALID`` or an exception
(``InfraError`` is retried on a fresh sandbox, any other is recorded as an ``EpisodeError`` on that
trajectory alone).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollstream.codecs import text_of
from rollstream.errors import ConfigError, ContractError
from rollstream.sandbox import ExecResult, SandboxSession
from rollstream.v1 import events_pb2

__all__ = [
    "Environment",
    "ExecResult",
    "RejectedTask",
    "SandboxSession",
    "TaskSpec",
    "ToolOutcome",
    "final_answer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task as the environment knows it; the producer turns it into a ``Task`` event.

    ``verifier`` is private to the environment (expected answer, hidden tests) and is never shown to
    the policy.
    """

    prompt: tuple[events_pb2.Message, ...]
    verifier: Mapping[str, Any]
    sandbox_files: Mapping[str, bytes] = field(default_factory=dict)
    difficulty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTask:
    """What stands where a task should be and is none: kept as a dead letter, the others go on.

    ``where`` names the file, ``position`` the line in it (from 1).
    """

    where: str
    position: int
    raw: bytes
    error: ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What a tool call gave. ``content`` is shown to the policy."""

    content: str
    status: events_pb2.ToolStatus = events_pb2.TOOL_STATUS_OK
    exit_code: int = 0
    dropped_bytes: int = 0
    error: str = ""


class Environment(ABC):
    """A domain: tasks, tools, verifier. Subclasses take their options as keyword arguments of
    ``__init__``.

    Wrong options raise ``ConfigError`` with the option's name and value.
    """

    @property
    @abstractmethod
    def source(self) -> str:
        """Names the data: with index and epoch it identifies a task; changes when the data do."""

    @abstractmethod
    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec | RejectedTask]:
        """Tasks ``start``, ``start + 1``, ... of a split ("train" or "held-out"); ends when the
        data do.

        The splits are disjoint. The same arguments give the same tasks in any process.
        """

    @property
    def tools(self) -> Sequence[events_pb2.ToolSpec]:
        """The tools offered to the policy."""
        return ()

    @property
    def toolchain(self) -> str:
        """The sandbox toolchain that tools and verifier need; empty for none."""
        return ""

    @property
    def verifies_in_sandbox(self) -> bool:
        """Whether ``verify`` needs a session; without it none is opened only to verify."""
        return False

    async def call_tool(
        self, session: SandboxSession | None, call: events_pb2.ToolCall, *, timeout_s: float
    ) -> ToolOutcome:
        """Run one tool call.

        Not called for tools that are not offered or arguments that are not a JSON object.
        """
        return ToolOutcome(
            content=f"error: unknown tool {call.name!r}", status=events_pb2.TOOL_STATUS_INVALID
        )

    @abstractmethod
    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        """Evidence about a finished rollout; ``verifier`` is the task's ``TaskSpec.verifier``.

        Values are finite. Reward components refer to items by name; "correct" (0 to 1) is the
        customary one.
        """

    def demonstrations(self, *, seed: int) -> Iterator[tuple[events_pb2.Message, ...]]:
        """Endless conversations to warm up on; ``ConfigError`` where the environment has none."""
        raise ConfigError(f"environment {type(self).__name__} has no demonstrations to warm up on")

    def tokenizer(self) -> Mapping[str, bytes] | None:
        """Files (tokenizer.json, tokenizer_config.json with a chat template) for a fresh tiny
        model, or None.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def final_answer(turns: Sequence[events_pb2.Turn]) -> str:
    """What the policy said last, without surrounding space; "" where it ended with a tool call."""
    if not turns or turns[-1].assistant.tool_calls:
        return ""
    return text_of(turns[-1].assistant).strip()
