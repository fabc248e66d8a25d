"""Every built-in environment through the suite that plug-ins are run through; tools and checks in a real sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.base import Environment, SandboxSession, TaskSpec
from environments.registry import make
from environments.testing import EnvironmentSuite
from rollstream.chat import ChatFormat
from rollstream.codecs import text_of
from rollstream.config.model import DomainConfig
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient
from sandboxes.testing import executor


@pytest.fixture(scope="session")
def target() -> Iterator[str]:
    with executor(["sandboxes.pool={python=4}"]) as started:
        yield started.target


@contextlib.asynccontextmanager
async def opened(target: str) -> AsyncIterator[SandboxSession]:
    spec = events_pb2.SandboxSpec(toolchain="python")
    async with SandboxClient([target]) as client, client.session(spec) as session:
        yield session


class InSandbox(EnvironmentSuite):
    @pytest.fixture(autouse=True)
    def _use(self, target: str) -> None:
        self._target = target

    def session(self) -> Any:
        return opened(self._target)


class TestDemoArithmetic(InSandbox):
    def make(self) -> Environment:
        return make(DomainConfig(name="d", environment="demo-arithmetic"))

    def right_answer(self, spec: TaskSpec) -> str:
        return str(spec.verifier["answer"])

    def test_the_tokenizer_knows_every_character(self, tmp_path: Path) -> None:
        environment = self.make()
        files = environment.tokenizer()
        assert files is not None
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        chat = ChatFormat(tmp_path)
        assert chat.vocab_size <= 64
        unknown = chat.vocab_size - 1
        assert chat.decode(chat._encode("é")) == "<|unk|>"
        for talk in self._demonstrations(seed=0):
            assert unknown not in chat.encode_demonstration(talk, environment.tools)[0]

    async def test_the_calculator_runs_in_the_sandbox(self) -> None:
        call = events_pb2.ToolCall(name="python", arguments_json='{"code": "print(37*8)"}')
        async with self.session() as session:
            outcome = await self.make().call_tool(session, call, timeout_s=10.0)
        assert (outcome.content, outcome.status) == ("296", events_pb2.TOOL_STATUS_OK)


def lines(check: bool) -> list[dict[str, Any]]:
    if check:
        code = "assert open('answer.txt').read() == open('right/{0}').read()"
        return [
            {"prompt": f"say {i}!", "check": code.format(i), "files": {f"right/{i}": f"<{i}>"}}
            for i in range(80)
        ]
    return [{"prompt": f"say {i}!", "answer": i + 1000} for i in range(80)]


class TestJsonlAnswers(EnvironmentSuite):
    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        self._path = tmp_path / "tasks.jsonl"
        self._path.write_text("\n".join(map(json.dumps, lines(check=False))))

    def make(self) -> Environment:
        return make(DomainConfig(name="d", environment="jsonl", options={"path": str(self._path)}))

    def right_answer(self, spec: TaskSpec) -> str:
        return f" {spec.verifier['answer']}.0\n"


class TestJsonlChecks(InSandbox):
    """The check reads a file that came with the task."""

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        self._path = tmp_path / "tasks.jsonl"
        self._path.write_text("\n".join(map(json.dumps, lines(check=True))))

    def make(self) -> Environment:
        options = {"path": str(self._path), "tool": True}
        return make(DomainConfig(name="d", environment="jsonl", options=options))

    def right_answer(self, spec: TaskSpec) -> str:
        return f"<{spec.prompt[0].content[0].text.removeprefix('say ').removesuffix('!')}>"

    @contextlib.asynccontextmanager
    async def _with_files(self) -> AsyncIterator[SandboxSession]:
        async with opened(self._target) as session:
            await session.put_files({f"right/{i}": f"<{i}>".encode() for i in range(80)})
            yield session

    def session(self) -> Any:
        return self._with_files()

    async def test_the_policy_cannot_stand_in_the_way_of_its_check(self) -> None:
        environment = self.make()
        spec = next(environment.tasks(seed=0, split="train"))
        assert isinstance(spec, TaskSpec)
        tricks = (
            "import os; os.mkdir('answer.txt')",
            "open('os.py', 'w').write('raise SystemExit(0)')",
            "import os; os.symlink('/etc/passwd', 'answer.txt')",
        )
        for trick in tricks:
            call = events_pb2.ToolCall(name="python", arguments_json=json.dumps({"code": trick}))
            async with self.session() as session:
                assert (await environment.call_tool(session, call, timeout_s=10.0)).exit_code == 0
                evidence = await environment.verify(session, {**spec.verifier}, [])
            assert evidence.validity == events_pb2.VALIDITY_VALID
            assert evidence.items[0].value == 0.0


DATASETS = ("chain_sum", "leg_counting", "prime_factorization", "game_of_life", "word_sorting")


@pytest.fixture(params=DATASETS)
def dataset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestReasoningGym(EnvironmentSuite):
    """Among them scorers that raise on what is no answer."""

    @pytest.fixture(autouse=True)
    def _choose(self, dataset: str) -> None:
        self._dataset = dataset

    def make(self) -> Environment:
        options = {"dataset": self._dataset, "system_prompt": "Answer in <answer> tags."}
        return make(DomainConfig(name="d", environment="reasoning-gym", options=options))

    def right_answer(self, spec: TaskSpec) -> str:
        import reasoning_gym

        entries = reasoning_gym.create_dataset(
            self._dataset, size=1000, seed=int(spec.verifier["block"])
        )
        entry = entries[int(spec.verifier["item"])]
        assert text_of(spec.prompt[1]) == entry["question"]
        return f"I think it is <answer>{entry['answer']}</answer>, or not."
