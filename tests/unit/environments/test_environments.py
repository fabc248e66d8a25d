"""Environments: deterministic, disjoint splits, right and wrong told apart, bad lines kept."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from environments import registry
from environments.base import Environment, ExecResult, RejectedTask, TaskSpec
from environments.demo_arithmetic import DemoArithmetic, Problem
from environments.python_tool import call_python
from environments.reasoning_gym import _evaluates
from environments.registry import make, names
from environments.tasks import TaskOrigin, evaluation_task, training_task
from rollstream.codecs import text_message, text_of
from rollstream.config import load
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


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        (0.5, " 0.5000000001 ", True),
        (0.5, "0.6", False),
        (42, "42.0", True),
        (42, "042", True),
        # Whole numbers are exact however large.
        (12345678901, "12345678902", False),
        ("1" + "0" * 400, "2" + "0" * 400, False),
        (0.5, "inf", False),
        ("nan", "NaN", False),
        ("Paris", "Paris", True),
        ("Paris", "paris", False),
        ("", "", True),
    ],
)
async def test_answers_are_compared_as_what_they_are(
    tmp_path: Path, answer: Any, said: str, right: bool
) -> None:
    environment = jsonl(tmp_path, {"prompt": "a", "answer": answer})
    assert await correct(environment, {"answer": answer}, said) == float(right)


async def test_a_check_sees_the_answer(tmp_path: Path) -> None:
    environment = jsonl(tmp_path, {"prompt": "a", "check": "assert True"})
    passed, failed = HostSession(), HostSession(exit_code=1)
    late = HostSession(reason="timeout")
    assert await correct(environment, {"check": "assert True"}, "said", passed) == 1.0
    assert passed.files == {"answer.txt": b"said"}
    assert await correct(environment, {"check": "assert False"}, "said", failed) == 0.0
    assert await correct(environment, {"check": "while True: pass"}, "said", late) == 0.0


def test_a_file_without_checks_and_tool_needs_no_sandbox(tmp_path: Path) -> None:
    plain = jsonl(tmp_path, {"prompt": "a", "answer": 1})
    assert (plain.toolchain, plain.verifies_in_sandbox) == ("", False)
    tool = jsonl(tmp_path, {"prompt": "a", "answer": 1}, tool=True)
    assert (tool.toolchain, tool.verifies_in_sandbox) == ("python", False)
    checked = jsonl(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "check": "1"})
    assert (checked.toolchain, checked.verifies_in_sandbox) == ("python", True)


def test_the_source_changes_with_the_data(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "h", "answer": 1}')
    sources = {
        jsonl(tmp_path, {"prompt": "a", "answer": 1}).source,
        jsonl(tmp_path, {"prompt": "a", "answer": 2}).source,
        jsonl(tmp_path, {"prompt": "a", "answer": 2}, held_out=str(held)).source,
    }
    assert len(sources) == 3


def test_the_splits_lose_no_line(tmp_path: Path) -> None:
    wrong = [f"not json {i}" for i in range(40)]
    environment = jsonl(tmp_path, *({"prompt": f"{i}", "answer": i} for i in range(80)), *wrong)
    train = list(environment.tasks(seed=0, split="train"))
    held_out = list(environment.tasks(seed=0, split="held-out"))
    # Whatever is no task comes to the producers, which alone write dead letters.
    assert sum(isinstance(item, RejectedTask) for item in train) == 40
    assert all(isinstance(item, TaskSpec) for item in held_out)
    assert len(train) + len(held_out) == 120
    assert len(held_out) > 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "EOF|JSON"),
        ({"prompt": "a"}, "give either answer or check"),
        ({"answer": 1}, "give either prompt or messages"),
        ({"prompt": "a", "answer": 1, "colour": "red"}, "colour: Extra inputs"),
        ({"messages": [{"role": "robot", "content": "x"}], "answer": 1}, "role"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": 1}, "must be the user's"),
        ({"prompt": "a", "answer": True}, "True is neither text nor number"),
        ('{"prompt": "a", "answer": NaN}', "finite number"),
        ({"prompt": "a", "answer": 1, "files": {"../x": ""}}, "'../x' is no path inside"),
        ("[1, 2]", "object"),
        ('{"prompt": "a", "answer": "' + "x" * (17 << 20) + '"}', "bytes are more than"),
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
    assert re.search(problem, str(bad.error))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "demo-arithmetik",
            {},
            "domain 'd': unknown environment 'demo-arithmetik' -- did you mean 'demo-arithmetic'",
        ),
        ("zzz", {}, "unknown environment 'zzz' -- known: .*jsonl"),
        ("jsonl", {"pahh": "x"}, "no option 'pahh' -- did you mean 'path'"),
        ("jsonl", {"path": "/nowhere.jsonl"}, "'/nowhere.jsonl' cannot be read: No such file"),
        ("jsonl", {"path": "/"}, "'/' cannot be read: Is a directory"),
        ("jsonl", {"path": 5}, "option path = 5: Input should be a valid string"),
        ("jsonl", {"path": "x", "tolerance": "much"}, "option tolerance = 'much': .* number"),
        ("jsonl", {"path": "x", "tolerance": -1.0}, "option tolerance = -1.0"),
        ("jsonl", {"path": "x", "tool": "maybe"}, "option tool = 'maybe': .* boolean"),
        ("jsonl", {}, "needs option 'path' -- set options.path"),
        (
            "reasoning-gym",
            {"dataset": "chain_sums"},
            "no dataset 'chain_sums' -- did you mean 'chain_sum'",
        ),
        ("reasoning-gym", {"dataset": "qqqq"}, "no dataset 'qqqq' -- there are 1.*: ab, acre"),
        ("reasoning-gym", {"dataset": "chain_sum", "params": {"x": 1}}, "refuses"),
        ("reasoning-gym", {"dataset": "n_queens"}, "'n_queens' runs answers as Python"),
    ],
)
def test_wrong_configuration_names_the_remedy(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(DomainConfig(name="d", environment=name, options=options))


def test_scorers_that_evaluate_answers_are_known() -> None:
    from reasoning_gym.factory import DATASETS

    found = {name for name, (kind, _) in DATASETS.items() if _evaluates(kind)}
    # These hand the answer to eval or to sympy's parser, which evaluates.
    assert found >= {
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24",
        "polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion",
    }  # fmt: skip
    assert len(found) < 15
    allowed = {"dataset": "n_queens", "evaluates_answers": True}
    make(DomainConfig(name="d", environment="reasoning-gym", options=allowed))


def test_a_dataset_that_asks_too_little_says_so() -> None:
    options = {
        "dataset": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    environment = make(DomainConfig(name="d", environment="reasoning-gym", options=options))
    environment._block = lambda _: [{"question": "always the same"}] * 1000  # type: ignore[attr-defined]
    splits = {"train", "held-out"}
    with pytest.raises(ConfigError, match="has no (train|held-out) question among 256"):
        for split in splits:
            next(environment.tasks(seed=0, split=split))


class Strange(Environment):
    def __init__(self, *, level: int) -> None:
        raise OSError(f"level {level}: no such floor")

    source = "strange"

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Any: ...

    async def verify(self, session: Any, verifier: Any, turns: Any) -> Any: ...


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (
            "tests.unit.environments.test_environments:Strange",
            {"level": 3},
            "level 3: no such floor",
        ),
        ("tests.unit.environments.test_environments:HostSession", {}, "is no Environment"),
        ("tests.unit.environments.test_environments:Nothing", {}, "cannot be imported"),
        ("nowhere.at_all:Nothing", {}, "cannot be imported.* -- pip install"),
    ],
)
def test_a_plug_in_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str, options: dict[str, Any], message: str
) -> None:
    point = EntryPoint(name="mine", value=value, group=registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=f"domain 'd': .*{message}"):
        make(DomainConfig(name="d", environment="mine", options=options))


@pytest.mark.parametrize("arguments", ['{"code": "\\ud800"}', "{}", '{"code": [1]}'])
async def test_code_that_is_no_text_is_an_invalid_call(arguments: str) -> None:
    call = events_pb2.ToolCall(name="python", arguments_json=arguments)
    outcome = await call_python(HostSession(), call, timeout_s=1.0)
    assert outcome.status == events_pb2.TOOL_STATUS_INVALID
    assert "missing or not text" in outcome.content


def test_the_built_in_environments_are_registered() -> None:
    assert {"demo-arithmetic", "jsonl", "reasoning-gym"} <= set(names())


def test_the_examples_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    config = load(["examples/jsonl.toml"], environ={})
    environment = make(config.domains[0])
    for split in ("train", "held-out"):
        items = list(environment.tasks(seed=0, split=split))
        assert len(items) >= config.evaluation.tasks
        assert all(isinstance(item, TaskSpec) for item in items)
