"""The view draws what the state says, in any phase of a run."""

from __future__ import annotations

import io

from rich.console import Console

from rollstream.demo import view
from rollstream.demo.state import RunState
from rollstream.v1 import events_pb2, policy_pb2


def _step(
    step: int, *, reward: float, staleness: int = 0, drop: str = ""
) -> events_pb2.TrainingStep:
    sample = events_pb2.SampleUse(
        rollout_id=f"r-{step}", reward=reward, staleness=staleness, drop_reason=drop
    )
    return events_pb2.TrainingStep(step=step, samples=[sample], metrics={"reward_mean": reward})


def _state() -> RunState:
    state = RunState(run_id="demo", seed=0)
    for step, reward in enumerate((0.25, 0.5, 1.0), start=1):
        state.on_step(_step(step, reward=reward, staleness=step - 1))
        state.on_version(policy_pb2.PolicyVersion(version=step))
    state.on_evaluation(
        events_pb2.EvaluationResult(policy_version=0, score=0.375, tasks=8, baseline=True)
    )
    return state


def _text(state: RunState) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(view.render(state, steps_total=10, sft_total=300))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_empty_run_can_be_drawn() -> None:
    assert "no optimiser step yet" in _text(RunState(run_id="demo", seed=0))


def test_the_numbers_of_the_run_are_shown() -> None:
    state = _state()
    state.states["rollouts"] = "ready"
    state.stats["rollouts"] = {"rollouts_in_flight": 12, "tokens_per_s": 900, "lag_records": 7}
    text = _text(state)
    for expected in (
        "held-out before 0.375",
        "staleness last 2 max 2",
        "3/10",
        "12 in flight",
        "7",
    ):
        assert expected in text


def test_a_repeated_step_and_a_drain_record_change_nothing() -> None:
    state = _state()
    state.on_step(_step(3, reward=0.0))
    state.on_step(_step(4, reward=0.0, drop="run_complete"))
    assert [point.reward for point in state.steps] == [0.25, 0.5, 1.0]


def test_the_curve_fills_in_proportion() -> None:
    lines = view.curve([0.0, 0.5, 1.0], height=4, width=3)
    columns = [[line[5 + i] for line in lines] for i in range(3)]
    assert columns == [[" "] * 4, [" ", " ", "█", "█"], ["█"] * 4]


def test_the_plain_line_names_what_is_down() -> None:
    state = _state()
    state.states["trainer"] = "restarting"
    line = view.line(state, steps_total=10, sft_total=300)
    assert "step 3/10 reward 1.00 staleness 2" in line
    assert "trainer restarting" in line
