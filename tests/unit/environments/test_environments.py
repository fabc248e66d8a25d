"""Environments: deterministic, disjoint splits, right and wrong told apart, bad lines kept."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from environments.base import Environment, ExecResult, RejectedTask, TaskSpec
from environments.demo_arithmetic import DemoArithmetic, Problem
from environments.registry import make, names
from environments.tasks import TaskOrigin, evaluation_task, training_task
from rollstream.codecs import text_message, text_of
from rollstream.config.model import DomainConfig
from rollstream.errors import ConfigError
from rollstream.v1 import events_pb2


class HostSession:
    """A session without a sandbox: what the code prints is computed here."""

    session_id = "host"

    def __init__(self, *, exit_code: int = 0, stdout: bytes = b"", reason: str = "exited") -> None:
        self.files: dict[str, bytes] = {}
        self.code = ""
        self.result = ExecResult(
            exit_code=exit_code,
            reason=reason,
            stdout=stdout,
            stderr=b"",
            dropped_bytes=0,
            wall_s=0.0,
        )

    async def exec(self, argv: Any, **_: Any) -> ExecResult:
        return self.result

    async def run_python(self, code: str, *, timeout_s: float = 10.0) -> ExecResult:
        self.code = code
        return self.result

    async def put_files(self, files: Any) -> None:
        self.files.update(files)

    async def get_files(self, paths: Any) -> dict[str, bytes]:
        return {p: self.files[p] for p in paths if p in self.files}


def turns(*texts: str) -> list[events_pb2.Turn]:
    return [
        events_pb2.Turn(index=i, assistant=text_message(events_pb2.ROLE_ASSISTANT, t))
        for i, t in enumerate(texts)
    ]


async def correct(
    environment: Environment, verifier: Any, answer: str, session: Any = None
) -> float:
    evidence = await environment.verify(session, verifier, turns(answer))
    assert evidence.validity == events_pb2.VALIDITY_VALID
    return next(item.value for item in evidence.items if item.name == "correct")


def jsonl(tmp_path: Path, *lines: object, **options: Any) -> Environment:
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    domain = DomainConfig(name="j", environment="jsonl", options={"path": str(file), **options})
    return make(domain)


@pytest.fixture(params=["demo", "jsonl", "reasoning-gym"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    if request.param == "jsonl":
        return jsonl(tmp_path, *({"prompt": f"say {i}", "answer": i} for i in range(200)))
    kinds = {
        "demo": ("demo-arithmetic", {}),
        "reasoning-gym": ("reasoning-gym", {"dataset": "chain_sum"}),
    }
    name, options = kinds[request.param]
    return make(DomainConfig(name="d", environment=name, options=options))


def prompts(environment: Environment, split: str, *, seed: int = 0, start: int = 0) -> list[str]:
    tasks = islice(environment.tasks(seed=seed, split=split, start=start), 20)
    return ["|".join(text_of(m) for m in t.prompt) for t in tasks if isinstance(t, TaskSpec)]


def test_tasks_are_a_function_of_seed_split_and_index(environment: Environment) -> None:
    first = prompts(environment, "train")
    assert first == prompts(environment, "train")
    assert first[7:] == prompts(environment, "train", start=7)[: len(first) - 7]


def test_splits_share_nothing(environment: Environment) -> None:
    assert not set(prompts(environment, "train")) & set(prompts(environment, "held-out"))


async def test_wrong_answers_are_wrong(environment: Environment) -> None:
    task = next(environment.tasks(seed=0, split="train"))
    assert isinstance(task, TaskSpec)
    assert await correct(environment, task.verifier, "certainly not this") < 1.0


def test_the_verifier_is_no_part_of_what_the_policy_sees() -> None:
    environment = DemoArithmetic()
    domain = DomainConfig(name="d", environment="demo-arithmetic", group_size=5, temperature=0.7)
    spec = next(environment.tasks(seed=0, split="train"))
    assert isinstance(spec, TaskSpec)
    origin = TaskOrigin(run_id="r", source="s", index=1)
    task = training_task(environment, domain, spec, origin)
    assert json.loads(task.verifier.params_json)["answer"] not in text_of(task.prompt[0])
    assert (task.group_size, task.sampling.temperature) == (5, 0.7)
    held_out = evaluation_task(environment, domain, spec, origin, suite="x", min_policy_version=3)
    assert (held_out.group_size, held_out.sampling.temperature, held_out.min_policy_version) == (
        1,
        0.0,
        3,
    )


def test_arithmetic_is_left_to_right() -> None:
    assert Problem(37, "*", 8, "-", 15).answer == 281
    assert Problem(2, "-", 9, "+", 4).answer == -3


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("print(37*8)", True),
        ("print(-7+2)", True),
        (" print(1+2) ", True),
        ("print(1+2+3)", False),
        ("print(2**9)", False),
        ("print(x+1)", False),
        ("import os", False),
        ("print(1.5+2)", False),
        ("print(" + "9" * 80 + "+1)", False),
        ("print(1+2", False),
    ],
)
async def test_only_one_operation_reaches_the_sandbox(code: str, runs: bool) -> None:
    session = HostSession(stdout=b"3\n")
    call = events_pb2.ToolCall(name="python", arguments_json=json.dumps({"code": code}))
    outcome = await DemoArithmetic().call_tool(session, call, timeout_s=1.0)
    assert (session.code == code) == runs
    assert outcome.content == ("3" if runs else "error")


def test_demonstrations_are_right_about_two_times_in_five() -> None:
    demos = islice(DemoArithmetic().demonstrations(seed=0), 2000)
    right = sum(
        text_of(talk[-1]) == str(eval(text_of(talk[0]))) and len(talk) == 6 for talk in demos
    )
    assert 0.35 < right / 2000 < 0.5


async def test_jsonl_answers_and_checks(tmp_path: Path) -> None:
    environment = jsonl(
        tmp_path,
        {"prompt": "a", "answer": 0.5},
        {"messages": [{"role": "user", "content": "b"}], "check": "assert True"},
        held_out="",
    )
    assert await correct(environment, {"answer": 0.5}, " 0.5000000001 ") == 1.0
    assert await correct(environment, {"answer": 0.5}, "0.6") == 0.0
    passed, failed = HostSession(), HostSession(exit_code=1)
    assert await correct(environment, {"check": "assert True"}, "said", passed) == 1.0
    assert passed.files == {"answer.txt": b"said"}
    assert await correct(environment, {"check": "assert False"}, "said", failed) == 0.0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "EOF|JSON"),
        ({"prompt": "a"}, "give either answer or check"),
        ({"answer": 1}, "give either prompt or messages"),
        ({"prompt": "a", "answer": 1, "colour": "red"}, "colour: Extra inputs"),
        ({"messages": [{"role": "robot", "content": "x"}], "answer": 1}, "role"),
    ],
)
def test_a_malformed_line_is_rejected_by_name_and_the_rest_goes_on(
    tmp_path: Path, line: object, problem: str
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "h", "answer": 1}\n')
    environment = jsonl(
        tmp_path,
        {"prompt": "a", "answer": 1},
        line,
        {"prompt": "c", "answer": 3},
        held_out=str(held),
    )
    first, bad, last = environment.tasks(seed=0, split="train")
    assert isinstance(first, TaskSpec)
    assert isinstance(last, TaskSpec)
    assert isinstance(bad, RejectedTask)
    assert bad.position == 2
    assert "tasks.jsonl, line 2" in str(bad.error)
    import re

    assert re.search(problem, str(bad.error))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "demo-arithmetik",
            {},
            "unknown environment 'demo-arithmetik' -- did you mean 'demo-arithmetic'",
        ),
        ("jsonl", {"pahh": "x"}, "no option 'pahh' -- did you mean 'path'"),
        ("jsonl", {"path": "/nowhere.jsonl"}, "'/nowhere.jsonl' does not exist"),
        (
            "reasoning-gym",
            {"dataset": "chain_sums"},
            "no dataset 'chain_sums' -- did you mean 'chain_sum'",
        ),
        ("reasoning-gym", {"dataset": "chain_sum", "params": {"x": 1}}, "refuses"),
        ("jsonl", {}, "missing 1 required"),
    ],
)
def test_wrong_configuration_names_the_remedy(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(DomainConfig(name="d", environment=name, options=options))


def test_the_built_in_environments_are_registered() -> None:
    assert {"demo-arithmetic", "jsonl", "reasoning-gym"} <= set(names())
