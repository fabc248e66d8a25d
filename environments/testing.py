"""What every environment must do: an abstract suite to run one through, built in or a plug-in.

Derive a class whose name begins with ``Test``, say how the environment is made and what a right
answer is, and let pytest (with pytest-asyncio in auto mode) collect it:

    class TestMine(EnvironmentSuite):
        def make(self) -> Environment:
            return Mine(level=3)

        def right_answer(self, spec: TaskSpec) -> str:
            return spec.verifier["answer"]

An environment with a toolchain also overrides ``session`` with one of a real sandbox.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any

from environments.base import Environment, RejectedTask, SandboxSession, TaskSpec
from rollstream.codecs import text_message, text_of
from rollstream.errors import ConfigError
from rollstream.v1 import events_pb2

_CALL_S = 10.0
# What a policy may say at its worst. None of it may break a verifier: it is a wrong answer.
HOSTILE_ANSWERS = (
    "",
    " \n ",
    "certainly not this",
    "nan",
    "1e999",
    "-0",
    "9" * 5000,
    "\0",
    "null",
    "[[[[",
    '{"answer": []}',
    "1/0",
    "\N{FULLWIDTH DIGIT ONE}\u0301\U0001f389",
    "x" * 50_000,
)
# Arguments that are JSON objects, and not what any tool asks for.
HOSTILE_ARGUMENTS = (
    "{}",
    '{"code": null}',
    '{"code": 7, "path": []}',
    '{"code": "\\ud800"}',
    '{"code": "\\u0000"}',
    '{"code": "' + "(" * 5000 + '"}',
)


@contextlib.asynccontextmanager
async def _no_session() -> AsyncIterator[SandboxSession | None]:
    yield None


class EnvironmentSuite:
    """The contract of ``Environment`` as tests."""

    # How many tasks of each split are looked at.
    sample = 40

    def make(self) -> Environment:
        """A new instance, always with the same options."""
        raise NotImplementedError

    def right_answer(self, spec: TaskSpec) -> str:
        """An answer that the verifier must accept with ``correct`` = 1."""
        raise NotImplementedError

    def session(self) -> AbstractAsyncContextManager[SandboxSession | None]:
        """A sandbox session for tools and verifier; none where ``toolchain`` is empty."""
        return _no_session()

    # ---------------------------------------------------------------- tasks

    def test_the_source_has_one_name(self) -> None:
        first, again = self.make(), self.make()
        assert first.source
        assert first.source == again.source

    def test_a_task_is_a_function_of_seed_split_and_index(self) -> None:
        for split in ("train", "held-out"):
            first = _specs(self.make().tasks(seed=3, split=split), self.sample)
            assert first == _specs(self.make().tasks(seed=3, split=split), self.sample)
            middle = len(first) // 2
            rest = _specs(self.make().tasks(seed=3, split=split, start=middle), self.sample)
            assert first[middle:] == rest[: len(first) - middle]

    def test_splits_share_no_prompt(self) -> None:
        environment = self.make()
        train = _specs(environment.tasks(seed=0, split="train"), self.sample)
        held_out = _specs(environment.tasks(seed=0, split="held-out"), self.sample)
        assert train
        assert not {_prompt(s) for s in train} & {_prompt(s) for s in held_out}

    def test_a_task_can_be_written_down(self) -> None:
        for spec in _specs(self.make().tasks(seed=0, split="train"), self.sample):
            assert spec.prompt
            assert spec.prompt[-1].role == events_pb2.ROLE_USER
            assert json.loads(json.dumps(dict(spec.verifier))) == dict(spec.verifier)
            assert math.isfinite(spec.difficulty)

    # ---------------------------------------------------------------- verifier

    async def test_right_answers_are_right(self) -> None:
        environment = self.make()
        for spec in _specs(environment.tasks(seed=0, split="train"), 5):
            values = await self._verify(environment, spec, self.right_answer(spec))
            assert values["correct"] == 1.0, spec

    async def test_wrong_answers_are_measured_and_wrong(self) -> None:
        environment = self.make()
        (spec,) = _specs(environment.tasks(seed=0, split="train"), 1)
        for answer in HOSTILE_ANSWERS:
            values = await self._verify(environment, spec, answer)
            assert values == await self._verify(environment, spec, answer)
            assert 0.0 <= values["correct"] < 1.0, answer

    async def test_silence_is_wrong(self) -> None:
        environment = self.make()
        (spec,) = _specs(environment.tasks(seed=0, split="train"), 1)
        only_a_call = events_pb2.Turn(
            assistant=events_pb2.Message(
                role=events_pb2.ROLE_ASSISTANT,
                content=[events_pb2.ContentPart(text=self.right_answer(spec))],
                tool_calls=[events_pb2.ToolCall(id="call-0-0", name="nothing")],
            )
        )
        for turns in ([], [only_a_call]):
            assert (await self._evidence(environment, spec, turns))["correct"] < 1.0

    async def _verify(
        self, environment: Environment, spec: TaskSpec, answer: str
    ) -> dict[str, float]:
        said = text_message(events_pb2.ROLE_ASSISTANT, answer)
        return await self._evidence(environment, spec, [events_pb2.Turn(assistant=said)])

    async def _evidence(
        self, environment: Environment, spec: TaskSpec, turns: Sequence[events_pb2.Turn]
    ) -> dict[str, float]:
        written = json.loads(json.dumps(dict(spec.verifier)))
        async with self.session() as session:
            offered = session if environment.verifies_in_sandbox else None
            evidence = await environment.verify(offered, written, turns)
        assert evidence.validity == events_pb2.VALIDITY_VALID, evidence
        values = {item.name: item.value for item in evidence.items}
        assert len(values) == len(evidence.items), "two items have one name"
        assert all(math.isfinite(value) for value in values.values()), values
        return values

    # ---------------------------------------------------------------- tools

    def test_tools_are_described(self) -> None:
        tools = self.make().tools
        assert len({tool.name for tool in tools}) == len(tools)
        for tool in tools:
            assert tool.name
            assert tool.description
            assert json.loads(tool.parameters_json)["type"] == "object"

    async def test_calls_that_make_no_sense_are_answered(self) -> None:
        environment = self.make()
        async with self.session() as session:
            for name in [tool.name for tool in environment.tools]:
                for arguments in HOSTILE_ARGUMENTS:
                    call = events_pb2.ToolCall(id="call-0-0", name=name, arguments_json=arguments)
                    outcome = await environment.call_tool(session, call, timeout_s=_CALL_S)
                    assert outcome.status not in (
                        events_pb2.TOOL_STATUS_OK,
                        events_pb2.TOOL_STATUS_INFRA,
                    ), arguments
                    assert outcome.content, arguments

    # ---------------------------------------------------------------- warming up

    def test_demonstrations_are_of_training_tasks(self) -> None:
        demonstrations = self._demonstrations(seed=0)
        assert demonstrations == self._demonstrations(seed=0)
        tasks = self.make().tasks(seed=0, split="held-out")
        held_out = {_prompt(spec) for spec in _specs(tasks, self.sample)}
        for talk in demonstrations:
            assert talk[-1].role == events_pb2.ROLE_ASSISTANT
            assert not talk[-1].tool_calls
            first = next(i for i, m in enumerate(talk) if m.role == events_pb2.ROLE_ASSISTANT)
            assert _texts(talk[:first]) not in held_out

    def _demonstrations(self, *, seed: int) -> list[tuple[events_pb2.Message, ...]]:
        try:
            return list(islice(self.make().demonstrations(seed=seed), self.sample))
        except ConfigError:
            # Has none, and says so.
            return []


def _specs(items: Iterable[TaskSpec | RejectedTask], count: int) -> list[TaskSpec]:
    return [item for item in islice(items, count) if isinstance(item, TaskSpec)]


def _prompt(spec: TaskSpec) -> str:
    return _texts(spec.prompt)


def _texts(messages: Sequence[Any]) -> str:
    return "\n".join(text_of(message) for message in messages)
