"""Any dataset of the ``reasoning-gym`` package as a domain, with the dataset's own scorer as
verifier.

The splits are disjoint by a hash of the question: seeds alone do not part them, as small datasets
ask the same thing twice. Text in, text out: no tool, no sandbox. What the policy says is scored as
a whole, or what stands between ``<answer>`` and ``</answer>`` if it says so.

Scorers run here, in the worker. A few of them hand the answer to ``eval``: those are refused,
unless ``evaluates_answers`` says that this machine may run what a policy writes.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from environments.base import Environment, RejectedTask, SandboxSession, TaskSpec, final_answer
from rollstream.codecs import text_message
from rollstream.errors import ConfigError
from rollstream.v1 import events_pb2

# Items per dataset object.
_BLOCK = 1000
# One question in so many is held out.
_HELD_OUT_SHARE = 8
# Items tried for one task: with questions enough, all are of the wrong split once in 10^14 tasks
# (7/8 to the power of 256).
_TRIES = 256
# Held-out tasks try items of 40 datasets or so; each can take half a second to make.
_CACHED_BLOCKS = 64
_EVALUATING = frozenset({"eval", "exec", "parse_expr", "sympify", "simplify", "S"})


class ReasoningGym(Environment):
    """One dataset. ``params`` go to it as they are (difficulty and the like)."""

    def __init__(
        self,
        *,
        dataset: str,
        params: dict[str, Any] | None = None,
        system_prompt: str = "",
        evaluates_answers: bool = False,
    ) -> None:
        """``system_prompt``: said before each question, if not empty.

        Raises:
            ConfigError: there is no such dataset, it refuses ``params``, or its scorer evaluates
                answers and ``evaluates_answers`` does not allow it.
        """
        from reasoning_gym.factory import DATASETS

        self._dataset, self._params, self._system = dataset, params or {}, system_prompt
        given = [*sorted(self._params.items()), *([system_prompt] if system_prompt else [])]
        self._source = f"reasoning-gym/{version('reasoning-gym')}/{dataset}/{given}"
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=3)
            raise ConfigError(
                f"reasoning-gym has no dataset {dataset!r}",
                hint=f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"there are {len(DATASETS)}: {', '.join(sorted(DATASETS))}",
            )
        if _evaluates(DATASETS[dataset][0]) and not evaluates_answers:
            raise ConfigError(
                f"the scorer of reasoning-gym dataset {dataset!r} runs answers as Python,"
                " outside the sandbox",
                hint="take another dataset, or set options.evaluates_answers = true on a worker"
                " that may run what the policy writes",
            )
        try:
            self._block(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym dataset {dataset!r} refuses params {self._params}: {error}",
                hint="check options.params",
            ) from error

    @property
    def source(self) -> str:
        return self._source

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec | RejectedTask]:
        for index in itertools.count(start):
            block, item, entry = self._find(seed, split, index)
            question = text_message(events_pb2.ROLE_USER, entry["question"])
            system = text_message(events_pb2.ROLE_SYSTEM, self._system)
            yield TaskSpec(
                prompt=(system, question) if self._system else (question,),
                verifier={"block": block, "item": item},
            )

    def _find(self, seed: int, split: str, index: int) -> tuple[int, int, Any]:
        """The ``index``-th item of a split: the same place of other blocks until one belongs."""
        item = index % _BLOCK
        for attempt in range(_TRIES):
            block = _number(f"{seed}-{index // _BLOCK}-{attempt}") % 2**31
            entry = self._block(block)[item]
            held_out = _number(entry["question"]) % _HELD_OUT_SHARE == 0
            if held_out == (split != "train"):
                return block, item, entry
        raise ConfigError(
            f"reasoning-gym dataset {self._dataset!r} has no {split} question among {_TRIES}",
            hint="it asks too few different things: widen options.params",
        )

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        said = _answer(final_answer(turns))
        # In a thread: some scorers compute for seconds, and the worker's loop must turn.
        score, problem = await asyncio.to_thread(
            self._score, int(verifier["block"]), int(verifier["item"]), said
        )
        return events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID,
            items=[events_pb2.EvidenceItem(name="correct", value=score, detail=problem)],
        )

    def _score(self, block: int, item: int, said: str) -> tuple[float, str]:
        dataset = self._block(block)
        entry = dataset[item]
        try:
            return float(dataset.score_answer(answer=said, entry=entry)), ""
        except Exception as error:  # noqa: BLE001 - it is data
            # Many scorers do not expect text that is no answer. The policy wrote it: it scores 0.
            return 0.0, f"the scorer refuses the answer: {error!r}"[:500]

    @lru_cache(maxsize=_CACHED_BLOCKS)  # noqa: B019 - lives as long as the environment, which lives as long as the process
    def _block(self, seed: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self._dataset, size=_BLOCK, seed=seed, **self._params)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _answer(said: str) -> str:
    """What stands in the last pair of answer tags, or all of it."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(said)
    return said if tagged is None else str(tagged)


def _evaluates(kind: type[Any]) -> bool:
    """Whether ``score_answer`` leads to a call that runs text, through functions of its module."""
    module = inspect.getmodule(kind.score_answer)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    todo, seen = ["score_answer"], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for called in _calls(functions[name]):
            if called in functions:
                todo.append(called)
            elif called in _EVALUATING:
                return True
    return False


def _calls(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name
