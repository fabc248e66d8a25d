"""Pacing and sampling: bounded by the staleness rule, the same after a restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from environments.base import Environment, TaskSpec
from environments.demo_arithmetic import DemoArithmetic
from producers.pacing import Pace, Progress, allowance
from producers.sampler import DomainCursor, Sampler
from rollstream.config.model import DomainConfig
from rollstream.v1 import events_pb2

PACE = Pace(usable=8, open=100)


def _progress(*, produced: int, unusable: int = 0, consumed: int = 0, closed: int = 0) -> Progress:
    names = [f"g{i}" for i in range(produced)]
    return Progress(
        produced=set(names),
        unusable=set(names[:unusable]),
        consumed=set(names[unusable : unusable + consumed]),
        closed=set(names[:closed]),
    )


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (_progress(produced=0), 8),
        (_progress(produced=8), 0),
        # What was dropped or used makes room.
        (_progress(produced=8, unusable=3), 3),
        (_progress(produced=8, unusable=3, consumed=2), 5),
        (_progress(produced=20), 0),
    ],
)
def test_usable_groups_on_their_way_are_bounded(progress: Progress, expected: int) -> None:
    assert allowance(progress, PACE) == expected


def test_open_groups_are_bounded_whatever_is_used() -> None:
    progress = _progress(produced=10, unusable=10, closed=7)
    assert allowance(progress, Pace(usable=8, open=5)) == 2


def test_nothing_after_the_final_version() -> None:
    progress = _progress(produced=0)
    progress.final = True
    assert allowance(progress, PACE) == 0


def test_repeated_events_count_once() -> None:
    progress = _progress(produced=4)
    group = events_pb2.TrainingGroup(group_id="g1", drop_reason="zero_variance")
    step = events_pb2.TrainingStep(samples=[events_pb2.SampleUse(group_id="g2")])
    for _ in range(3):
        progress.on_group(group)
        progress.on_step(step)
    assert allowance(progress, PACE) == 8 - 2


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


def _cursor(name: str, environment: Environment, weight: float = 1.0) -> DomainCursor:
    config = DomainConfig(name=name, environment="x", weight=weight)
    return DomainCursor(config=config, environment=environment)


def test_shares_follow_the_weights() -> None:
    cursors = [_cursor("a", DemoArithmetic(), 3.0), _cursor("b", DemoArithmetic(), 1.0)]
    sampler = Sampler(cursors, run_id="run", seed=0)
    names = [sampler.draw().cursor.config.name for _ in range(2000)]  # type: ignore[union-attr]
    # Binomial(2000, 3/4): standard deviation 19.4.
    assert abs(names.count("a") - 1500) < 5 * 19.4


def test_a_restart_goes_on_with_the_same_sequence() -> None:
    def draw(sampler: Sampler, count: int) -> list[tuple[str, int]]:
        drawn = [sampler.draw() for _ in range(count)]
        return [(d.cursor.config.name, d.origin.index) for d in drawn if d]

    def make() -> Sampler:
        cursors = [_cursor("a", DemoArithmetic()), _cursor("b", DemoArithmetic())]
        return Sampler(cursors, run_id="run", seed=3)

    whole = draw(make(), 40)
    resumed = make()
    for cursor in resumed.cursors:
        done = [index for name, index in whole[:25] if name == cursor.config.name]
        cursor.seek(index=max(done), epoch=0)
    resumed.drawn = 25
    assert draw(resumed, 15) == whole[25:]


def test_a_finite_source_begins_its_next_epoch() -> None:
    sampler = Sampler([_cursor("a", Finite())], run_id="run", seed=0)
    origins = [sampler.draw().origin for _ in range(7)]  # type: ignore[union-attr]
    assert [(o.epoch, o.index) for o in origins] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0),
    ]  # fmt: skip


def test_a_failing_domain_is_parked_and_the_others_go_on() -> None:
    sampler = Sampler([_cursor("bad", Broken()), _cursor("good", Finite())], run_id="run", seed=0)
    names = {sampler.draw().cursor.config.name for _ in range(20)}  # type: ignore[union-attr]
    assert names == {"good"}
    assert "the disk is gone" in sampler.cursors[0].parked
    assert Sampler([_cursor("bad", Broken())], run_id="run", seed=0).draw() is None
