"""What the agent loop decides."""

from __future__ import annotations

import pytest

from rollouts.decisions import Room, budget_of, cut_reason, problem_with
from rollstream.config.model import BudgetConfig
from rollstream.v1 import events_pb2

PLENTY = {"turns": 5, "tokens": 100, "window": 100, "wall_s": 10.0}


@pytest.mark.parametrize(
    ("spent", "reason"),
    [
        ({"turns": 0}, "max_turns"),
        ({"tokens": 0}, "max_tokens"),
        ({"window": 0}, "context"),
        ({"window": -7}, "context"),
        ({"wall_s": 0.0}, "wall"),
        ({"turns": 0, "wall_s": -1.0}, "max_turns"),
    ],
)
def test_a_budget_that_is_spent_truncates(spent: dict[str, float], reason: str) -> None:
    stop = Room(**{**PLENTY, **spent}).limit()  # type: ignore[arg-type]
    assert stop is not None
    assert (stop.status, stop.reason) == (events_pb2.OUTCOME_STATUS_TRUNCATED, reason)


def test_with_room_it_goes_on_and_a_cut_is_the_turns_own() -> None:
    room = Room(**PLENTY)  # type: ignore[arg-type]
    assert room.limit() is None
    assert cut_reason(room).reason == "max_tokens_per_turn"


def test_what_a_budget_leaves_open_is_the_default() -> None:
    default = BudgetConfig()
    budget = budget_of(events_pb2.Task(budget=events_pb2.Budget(max_turns=3)))
    assert budget.max_turns == 3
    assert (budget.max_tokens, budget.wall_s) == (default.max_tokens, default.wall_s)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("python", '{"code": "1"}', ""),
        ("ruby", "{}", "error: no tool 'ruby'; there is python"),
        ("", "{broken", "error: no tool ''; there is python"),
        ("python", "{broken", "error: the arguments are not JSON"),
        ("python", '["code"]', "error: the arguments are not a JSON object"),
        ("python", "[" * 100_000, "error: the arguments are not JSON"),
        # Half of a surrogate pair: JSON, but no text that could be sent to a sandbox.
        ("python", '{"code": "\\ud800"}', "error: the arguments are not JSON"),
    ],
)
def test_a_call_that_makes_no_sense_is_told_so(name: str, arguments: str, said: str) -> None:
    call = events_pb2.ToolCall(name=name, arguments_json=arguments)
    problem = problem_with(call, [events_pb2.ToolSpec(name="python")])
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


def test_without_tools_the_answer_says_none() -> None:
    call = events_pb2.ToolCall(name="python", arguments_json="{}")
    assert problem_with(call, []) == "error: no tool 'python'; there is none"
