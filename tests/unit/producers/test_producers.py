"""Pacing and sampling: bounded by the staleness rule, the same after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from environments.base import Environment, RejectedTask, TaskSpec
from environments.demo_arithmetic import DemoArithmetic
from producers.history import History
from producers.main import pace
from producers.pacing import Pace, Progress, allowance
from producers.sampler import DomainCursor, Sampler
from rollstream import ids
from rollstream.config import load
from rollstream.config.model import DomainConfig
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2, policy_pb2

PACE = Pace(usable=8, open=100)
OURS = events_pb2.Header(run_id="run")


def _progress(produced: int, *, group_size: int = 4) -> Progress:
    progress = Progress(run_id="run")
    for i in range(produced):
        progress.on_task(
            events_pb2.Task(group_id=ids.group_id(f"t{i}"), task_id=f"t{i}", group_size=group_size)
        )
    return progress


def _group(number: int, reason: str = "") -> events_pb2.TrainingGroup:
    return events_pb2.TrainingGroup(
        header=OURS,
        group_id=ids.group_id(f"t{number}"),
        drop_reason=reason,
        samples=[events_pb2.TrainingSample(rollout_id="r")],
    )


def _used(*numbers: int) -> events_pb2.TrainingStep:
    uses = [events_pb2.SampleUse(group_id=ids.group_id(f"t{n}")) for n in numbers]
    return events_pb2.TrainingStep(header=OURS, samples=uses)


def _letter(number: int, rollout: str = "", samples: int = 1) -> events_pb2.DeadLetter:
    return events_pb2.DeadLetter(
        header=OURS, task_id=f"t{number}", rollout_id=rollout, samples=samples
    )


@pytest.mark.parametrize(
    ("produced", "events", "expected"),
    [
        (0, [], 8),
        (8, [], 0),
        (20, [], 0),
        # Closed is not used: the trainer may still take it.
        (8, [_group(0)], 0),
        # What was dropped or used makes room, once.
        (8, [_group(0, "zero_variance"), _group(0, "zero_variance")], 1),
        (8, [_group(0), _used(0, 0, 1)], 2),
        (8, [_group(0, "zero_variance"), _used(0)], 1),
        # A task that was given up, or whose rollouts all were.
        (8, [_letter(3, samples=4)], 1),
        (8, [_letter(3, f"r{i}") for i in range(4)], 1),
        (8, [_letter(3, f"r{i % 3}") for i in range(9)], 0),
        # A task of which its bytes told nothing but the name.
        (8, [_letter(3, samples=0)], 1),
        # None of ours.
        (8, [_letter(99, samples=4)], 0),
    ],
)
def test_usable_groups_on_their_way_are_bounded(
    produced: int, events: list[Any], expected: int
) -> None:
    progress = _progress(produced)
    for event in events:
        progress.absorb(event)
    assert allowance(progress, PACE) == expected


def test_a_group_whose_samples_were_all_dropped_makes_room() -> None:
    progress = _progress(8)
    group = _group(0)
    group.samples[0].drop_reason = "invalid"
    progress.absorb(group)
    assert allowance(progress, PACE) == 1


def test_open_groups_are_bounded_whatever_is_used() -> None:
    progress = _progress(10)
    for i in range(10):
        progress.absorb(_used(i))
    for i in range(7):
        progress.absorb(_group(i))
    assert allowance(progress, Pace(usable=8, open=5)) == 2


def test_tasks_altogether_are_bounded() -> None:
    assert allowance(_progress(5), Pace(usable=100, open=100, tasks=7)) == 2


def test_nothing_before_the_baseline_and_after_the_final_version() -> None:
    progress, waits = Progress(run_id="run"), Pace(usable=8, open=100, after_baseline=True)
    assert allowance(progress, waits) == 0
    progress.absorb(events_pb2.EvaluationResult(header=OURS, baseline=True, task_id="t"))
    assert allowance(progress, waits) == 0
    progress.absorb(events_pb2.EvaluationResult(header=OURS, baseline=True))
    assert allowance(progress, waits) == 8
    progress.absorb(policy_pb2.PolicyVersion(header=OURS, version=3, final=True))
    progress.absorb(policy_pb2.PolicyVersion(header=OURS, version=2))
    assert allowance(progress, waits) == 0


def test_other_runs_on_the_same_topics_change_nothing() -> None:
    progress, theirs = _progress(8), events_pb2.Header(run_id="another")
    for event in (
        _group(0, "zero_variance"),
        _used(1),
        _letter(2, samples=4),
        policy_pb2.PolicyVersion(final=True),
        events_pb2.EvaluationResult(baseline=True),
    ):
        event.header.CopyFrom(theirs)
        progress.absorb(event)
    assert (allowance(progress, PACE), len(progress.open)) == (0, 8)
    assert not progress.final
    assert not progress.baseline_evaluated


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "no domain with a weight above 0 among 0 -- add a"),
        (['domains=[{name="d", environment="x", weight=0.0}]'], "weight above 0 among 1"),
        (
            ['domains=[{name="d", environment="x"}]', "producers.wait_for_baseline=true"],
            "nothing is evaluated -- name evaluation.domains",
        ),
    ],
)
def test_a_run_that_could_produce_nothing_says_why(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pace(load(overrides=overrides, environ={}))


def test_the_pace_of_a_run() -> None:
    config = load(
        overrides=[
            'domains=[{name="d", environment="x"}]',
            'trainer.stages=[{kind="rl", groups_per_step=5, max_staleness=2}]',
            "producers.max_tasks=9",
        ],
        environ={},
    )
    assert pace(config) == Pace(usable=15, open=256, tasks=9)


class Finite(Environment):
    """Three tasks, then none."""

    @property
    def source(self) -> str:
        return "finite"

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec]:
        for index in range(start, 3):
            yield TaskSpec(prompt=(), verifier={"index": index})

    async def verify(self, session, verifier, turns) -> events_pb2.Evidence:  # type: ignore[no-untyped-def]
        raise AssertionError("not called")


class Broken(Finite):
    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec]:
        raise RuntimeError("the disk is gone")


class Spoiled(Environment):
    """Items by a pattern: ``t`` is a task, ``x`` none."""

    source = "spoiled"

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec | RejectedTask]:
        for index, kind in list(enumerate(self.pattern))[start:]:
            error = ContractError("no task")
            yield (
                TaskSpec(prompt=(), verifier={})
                if kind == "t"
                else RejectedTask(where="file", position=index + 1, raw=b"x", error=error)
            )

    async def verify(self, session: Any, verifier: Any, turns: Any) -> events_pb2.Evidence:
        raise AssertionError("not called")


def _cursor(name: str, environment: Environment, weight: float = 1.0) -> DomainCursor:
    config = DomainConfig(name=name, environment="x", weight=weight)
    return DomainCursor(config=config, environment=environment)


def _draw(sampler: Sampler, first: int, last: int) -> list[tuple[str, int, int]]:
    """Tasks ``first`` to ``last`` of the run, what is none left out."""
    found: list[tuple[str, int, int]] = []
    while len(found) < last - first and (drawn := sampler.draw(first + len(found))) is not None:
        if isinstance(drawn.item, TaskSpec):
            found.append((drawn.cursor.config.name, drawn.origin.epoch, drawn.origin.index))
    return found


def test_shares_follow_the_weights() -> None:
    cursors = [_cursor("a", DemoArithmetic(), 3.0), _cursor("b", DemoArithmetic(), 1.0)]
    names = [name for name, _, _ in _draw(Sampler(cursors, run_id="run", seed=0), 0, 2000)]
    # Binomial(2000, 3/4): standard deviation 19.4.
    assert abs(names.count("a") - 1500) < 5 * 19.4


def _domains() -> list[DomainCursor]:
    return [
        _cursor("a", DemoArithmetic()),
        _cursor("b", Spoiled("txttxtttx")),
        _cursor("broken", Broken()),
        _cursor("c", Finite(), 0.5),
    ]


@pytest.mark.parametrize("done", [0, 1, 25, 39])
def test_a_restart_goes_on_with_the_same_sequence(done: int) -> None:
    whole = _draw(Sampler(_domains(), run_id="run", seed=3), 0, 60)
    cursors = _domains()
    for cursor in cursors:
        before = [at for name, *at in whole[:done] if name == cursor.config.name]
        if before:
            epoch, index = before[-1]
            cursor.seek(index=index + 1, epoch=epoch)
    assert _draw(Sampler(cursors, run_id="run", seed=3), done, 60) == whole[done:]


def test_a_finite_source_begins_its_next_epoch() -> None:
    drawn = _draw(Sampler([_cursor("a", Finite())], run_id="run", seed=0), 0, 7)
    assert [(epoch, index) for _, epoch, index in drawn] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0),
    ]  # fmt: skip


def test_what_is_no_task_is_told_once() -> None:
    sampler = Sampler([_cursor("a", Spoiled("xtx"))], run_id="run", seed=0)
    items = [sampler.draw(0) for _ in range(6)]
    rejected = [d for d in items if d and isinstance(d.item, RejectedTask)]
    assert [d.origin.index for d in rejected] == [0, 2]
    assert len(items) - len(rejected) == 4


def test_a_source_without_a_valid_task_is_parked() -> None:
    sampler = Sampler([_cursor("a", Spoiled("xx"))], run_id="run", seed=0)
    assert [sampler.draw(0) is None for _ in range(4)] == [False, False, True, True]
    assert "spoiled has no valid task" in sampler.cursors[0].parked


def test_a_failing_domain_is_parked_and_the_others_go_on() -> None:
    sampler = Sampler([_cursor("bad", Broken()), _cursor("good", Finite())], run_id="run", seed=0)
    assert {name for name, _, _ in _draw(sampler, 0, 20)} == {"good"}
    assert "the disk is gone" in sampler.cursors[0].parked
    assert Sampler([_cursor("bad", Broken())], run_id="run", seed=0).draw(0) is None


def test_a_light_domain_is_reached_when_the_heavy_one_is_parked() -> None:
    cursors = [_cursor("bad", Broken(), 1e6), _cursor("good", Finite(), 1e-6)]
    assert _draw(Sampler(cursors, run_id="run", seed=0), 0, 3)[0][0] == "good"


def test_what_a_torn_batch_lost_is_made_again() -> None:
    history = History(batch=4)
    # Of a batch of four that began at (0, 6), the second and the third were lost.
    for index in (0, 1, 2, 3, 4, 5, 6, 9):
        history.on_task(events_pb2.Task(source="s", index=index))
    epoch, index = history.resume_at("s")
    assert epoch == 0
    assert index <= 6
    assert history.resume_at("another") == (0, 0)


def test_a_source_shorter_than_a_batch_is_made_again_from_the_beginning() -> None:
    history = History(batch=4)
    history.on_task(events_pb2.Task(source="s", index=1, epoch=1))
    assert history.resume_at("s") == (0, 0)
