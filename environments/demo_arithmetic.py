"""The demo's domain: two-operation arithmetic with a calculator that does one operation per call.

A prompt is ``37*8-15``. The policy must call the tool twice (``print(37*8)``, then
``print(296-15)``) and answer with the second result: at least three turns, and no way to the answer
for a model this small but through the sandbox. Each call really runs in the sandbox.

The tokenizer has one token per character and 7 special ones; warm-up demonstrations have bad habits
on purpose (about 40 % are right), so that RL has something to do.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from environments.base import (
    Environment,
    SandboxSession,
    TaskSpec,
    ToolOutcome,
    final_answer,
)
from rollstream.codecs import text_message
from rollstream.v1 import events_pb2

_SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool>", "</tool>")
_UNKNOWN = "<|unk|>"
_CHARACTERS = "0123456789+-*()abcdefghijklmnopqrstuvwxyz =.?!:,\n"
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool>{{ c.function.arguments.code }}</tool>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_OPERATORS = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult}
_MAX_CODE_CHARACTERS = 64
# Shares of the habits of the demonstrations.
_GUESS, _WRONG_OPERATOR, _STOPS_EARLY, _SLIP = 0.1, 0.7, 0.7, 0.05
# One task in so many is held out, by a hash of the problem.
_HELD_OUT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """``a first b second c``, evaluated from left to right."""

    a: int
    first: str
    b: int
    second: str
    c: int

    @property
    def text(self) -> str:
        return f"{self.a}{self.first}{self.b}{self.second}{self.c}"

    @property
    def middle(self) -> int:
        return _apply(self.a, self.first, self.b)

    @property
    def answer(self) -> int:
        return _apply(self.middle, self.second, self.c)

    @property
    def held_out(self) -> bool:
        return hashlib.blake2b(self.text.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _draw(rng: random.Random) -> Problem:
    numbers = [rng.randint(2, 99) for _ in range(3)]
    # The second operator binds no tighter than the first, so that left to right is the usual order.
    return Problem(numbers[0], rng.choice("+-*"), numbers[1], rng.choice("+-"), numbers[2])


class DemoArithmetic(Environment):
    """Two-step arithmetic with a one-operation calculator in the sandbox."""

    @property
    def source(self) -> str:
        return "demo-arithmetic/1"

    @property
    def toolchain(self) -> str:
        return "python"

    @property
    def tools(self) -> Sequence[events_pb2.ToolSpec]:
        schema = {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        }
        return (
            events_pb2.ToolSpec(
                name="python",
                description="Runs print(<int> <op> <int>): one operation per call.",
                parameters_json=json.dumps(schema),
            ),
        )

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec]:
        index = start
        while True:
            problem = _problem(seed, split, index)
            yield TaskSpec(
                prompt=(text_message(events_pb2.ROLE_USER, problem.text),),
                verifier={"answer": str(problem.answer)},
                difficulty=abs(problem.middle) / 10_000,
            )
            index += 1

    async def call_tool(
        self, session: SandboxSession | None, call: events_pb2.ToolCall, *, timeout_s: float
    ) -> ToolOutcome:
        code = json.loads(call.arguments_json).get("code", "")
        if not isinstance(code, str) or not _is_one_operation(code):
            return ToolOutcome(
                content="error", status=events_pb2.TOOL_STATUS_FAILED, error="not one operation"
            )
        assert session is not None, "a task of this domain has a sandbox"
        result = await session.run_python(code, timeout_s=timeout_s)
        if result.reason == "timeout":
            return ToolOutcome(content="timeout", status=events_pb2.TOOL_STATUS_TIMEOUT)
        if result.exit_code:
            return ToolOutcome(
                content="error",
                status=events_pb2.TOOL_STATUS_FAILED,
                exit_code=result.exit_code,
                error=result.stderr.decode("utf-8", "replace")[-500:],
            )
        return ToolOutcome(content=result.stdout.decode("utf-8", "replace").strip())

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        said = final_answer(turns)
        calls = [r for turn in turns for r in turn.tool_results]
        good = sum(r.status == events_pb2.TOOL_STATUS_OK for r in calls)
        items = {
            "correct": float(said == verifier["answer"]),
            "format": float(said.removeprefix("-").isdigit()),
            "tool_calls": float(len(calls)),
            "tool_successes": float(good),
        }
        return events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID,
            items=[events_pb2.EvidenceItem(name=k, value=v) for k, v in items.items()],
        )

    def demonstrations(self, *, seed: int) -> Iterator[tuple[events_pb2.Message, ...]]:
        rng = random.Random(f"demonstrations-{seed}")
        while True:
            problem = _draw(rng)
            if not problem.held_out:
                yield tuple(_demonstration(problem, rng))

    def tokenizer(self) -> Mapping[str, bytes]:
        return _tokenizer_files()


def _problem(seed: int, split: str, index: int) -> Problem:
    """The ``index``-th problem: drawn again until it falls into the split."""
    rng = random.Random(f"{seed}-{split}-{index}")
    while True:
        problem = _draw(rng)
        if problem.held_out == (split != "train"):
            return problem


def _is_one_operation(code: str) -> bool:
    """Whether ``code`` is exactly ``print(<int> <op> <int>)``."""
    if len(code) > _MAX_CODE_CHARACTERS:
        return False
    try:
        body = ast.parse(code.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    match body:
        case ast.Call(func=ast.Name(id="print"), args=[ast.BinOp() as operation], keywords=[]):
            known = isinstance(operation.op, tuple(_OPERATORS.values()))
            return known and _is_integer(operation.left) and _is_integer(operation.right)
    return False


def _is_integer(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def _demonstration(problem: Problem, rng: random.Random) -> list[events_pb2.Message]:
    """One conversation, with habits that RL has to undo.

    The wrong choice is the usual one where the problem has a product (another operator) or ends
    with a minus (no second call), so that a greedy policy fails there, while the right choice is
    common enough to be sampled. Right altogether: about 40 %.
    """
    p = problem
    ask = text_message(events_pb2.ROLE_USER, p.text)
    if rng.random() < _GUESS:
        return [ask, _say(max(0, p.answer + rng.randint(-40, 40)))]
    first = p.first
    if rng.random() < (_WRONG_OPERATOR if p.first == "*" else _SLIP):
        first = rng.choice([o for o in "+-*" if o != p.first])
    middle = _apply(p.a, first, p.b)
    talk = [ask, *_call(p.a, first, p.b)]
    if rng.random() < (_STOPS_EARLY if p.second == "-" else _SLIP):
        return [*talk, _say(middle)]
    c = p.c if rng.random() > _SLIP else int(str(p.c)[:-1] + str(rng.randint(0, 9)))
    return [*talk, *_call(middle, p.second, c), _say(_apply(middle, p.second, c))]


def _say(number: int) -> events_pb2.Message:
    return text_message(events_pb2.ROLE_ASSISTANT, str(number))


def _call(left: int, operator: str, right: int) -> list[events_pb2.Message]:
    code = f"print({left}{operator}{right})"
    call = events_pb2.ToolCall(name="python", arguments_json=json.dumps({"code": code}))
    return [
        events_pb2.Message(role=events_pb2.ROLE_ASSISTANT, tool_calls=[call]),
        text_message(events_pb2.ROLE_TOOL, str(_apply(left, operator, right))),
    ]


@cache
def _tokenizer_files() -> Mapping[str, bytes]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [*_SPECIAL, *_CHARACTERS, _UNKNOWN]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=_UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*_SPECIAL, _UNKNOWN)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "unk_token": _UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
        "rollstream_tool_syntax": {
            "open": "<tool>",
            "close": "</tool>",
            "tool": "python",
            "argument": "code",
        },
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }
