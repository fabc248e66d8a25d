"""Planted in the store: a stale sample, a group in two steps, a step said by two lineages."""

from __future__ import annotations

from typing import Any

from rollstream.config import Config, load
from rollstream.config.model import RlStage
from rollstream.topics import TRAINING_STEPS
from tests.integration.store.test_commands import EVENTS, fill, rollout, step
from trajectories.findings import read_findings


def _config(bound: int = 1) -> Config:
    config = load(overrides=['run.id="run"'], environ={})
    stages = (RlStage(name="rl", max_staleness=bound),)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"stages": stages})}
    )


def _found(client: Any, bound: int = 1) -> dict[str, Any]:
    return {f.name: f for f in read_findings(client, _config(bound))}


def test_a_sound_run_has_no_findings(tables: Any) -> None:
    fill(tables, EVENTS)
    assert _found(tables) == {}


def test_staleness_beyond_the_stage(tables: Any) -> None:
    event = step(1, (0, 0, ""), (0, 1, ""), (0, 2, "stale"))
    event.stage = "rl"
    fill(tables, [(TRAINING_STEPS, [event])])
    assert _found(tables) == {}
    found = _found(tables, bound=0)["stale"]
    assert (found.count, found.worst) == (2, 1)
    assert found.examples == tuple(sorted((rollout(0, 0), rollout(0, 1))))
    assert len(tables.query(found.sql).result_rows) == 2


def test_a_group_in_two_steps(tables: Any) -> None:
    fill(tables, [(TRAINING_STEPS, [step(1, (0, 0, "")), step(2, (0, 1, ""))])])
    assert set(_found(tables)) == {"group_in_two_steps"}


def test_a_step_that_two_lineages_said(tables: Any) -> None:
    first, other = step(1, (0, 0, "")), step(1, (1, 0, ""))
    fill(tables, [(TRAINING_STEPS, [first, first])])
    assert _found(tables) == {}
    fill(tables, [(TRAINING_STEPS, [other])], start=2)
    assert set(_found(tables)) == {"lineages"}
