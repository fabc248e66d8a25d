"""Score, normalise, group under repeats and reorderings: nothing lost, nothing counted twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.pipeline import Origin, Pipeline
from rollstream import codecs, ids
from rollstream.config import load
from rollstream.topics import REPLAY, REWARDS
from rollstream.v1 import events_pb2

GROUP_SIZE = 4
CONFIG = load(
    overrides=['domains=[{name="d", environment="x"}]', "processors.group_deadline_s=100"],
    environ={},
)


def trajectory(
    group: int, index: int, reward: float, *, attempt: int = 0, valid: bool = True
) -> events_pb2.Trajectory:
    task_id = ids.task_id("run", "s", group, 0)
    sequence = codecs.make_sequence(
        np.array([1, 2, 3], dtype=np.int32),
        np.array([-0.1, -0.2], dtype=np.float32),
        sampled=[(1, 2)],
        versions=[(0, 1, 2)],
    )
    header = codecs.header("run", ids.event_id("T", group, index, attempt))
    header.occurred_at.FromMilliseconds(1_000_000 + group * 1000 + index)
    return events_pb2.Trajectory(
        header=header,
        rollout_id=ids.rollout_id(task_id, index),
        task_id=task_id,
        group_id=ids.group_id(task_id),
        sample_index=index,
        attempt=attempt,
        domain="d",
        purpose=events_pb2.PURPOSE_TRAIN,
        group_size=GROUP_SIZE,
        sequences=[sequence],
        evidence=events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID if valid else events_pb2.VALIDITY_INVALID,
            invalid_reason="" if valid else "lost",
            items=[events_pb2.EvidenceItem(name="correct", value=reward)],
        ),
    )


def pipeline() -> Pipeline:
    return Pipeline(CONFIG, groups={}, normalisers={})


def groups_of(emissions: list) -> list[events_pb2.TrainingGroup]:  # type: ignore[type-arg]
    return [message for topic, _, message in emissions if topic is REPLAY]


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations([(g, i) for g in range(3) for i in range(GROUP_SIZE)]),
    repeats=st.lists(st.integers(0, 11), max_size=10),
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=12, max_size=12),
)
def test_every_sample_is_in_exactly_one_group(
    order: list[tuple[int, int]], repeats: list[int], rewards: list[float]
) -> None:
    stage, emitted = pipeline(), []
    arrivals = [*order, *(order[r] for r in repeats)]
    for offset, (group, index) in enumerate(arrivals):
        event = trajectory(group, index, rewards[group * GROUP_SIZE + index])
        emitted += stage.on_trajectory(event, Origin(partition=0, offset=offset))
    groups = groups_of(emitted)
    assert len(groups) == 3
    listed = [sample.rollout_id for group in groups for sample in group.samples]
    assert len(listed) == len(set(listed)) == 3 * GROUP_SIZE
    assert sum(topic is REWARDS for topic, _, _ in emitted) == 3 * GROUP_SIZE
    assert not stage.open


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(list(range(GROUP_SIZE))), crash=st.integers(0, GROUP_SIZE))
def test_a_replay_from_the_last_commit_emits_the_same_bytes(order: list[int], crash: int) -> None:
    events = [trajectory(0, i, float(i % 2)) for i in order]

    def run(stage: Pipeline, start: int) -> list[bytes]:
        return [
            message.SerializeToString(deterministic=True)
            for offset in range(start, len(events))
            for _, _, message in stage.on_trajectory(
                events[offset], Origin(partition=0, offset=offset)
            )
        ]

    groups: dict[bytes, bytes] = {}
    normalisers: dict[bytes, bytes] = {}
    stage = Pipeline(CONFIG, groups=groups, normalisers=normalisers)
    for offset in range(crash):
        stage.on_trajectory(events[offset], Origin(partition=0, offset=offset))
    saved = dict(groups), dict(normalisers)
    first = run(stage, crash)
    again = run(Pipeline(CONFIG, groups=saved[0], normalisers=saved[1]), crash)
    assert first == again


def test_a_group_with_missing_and_invalid_samples_closes_at_its_deadline() -> None:
    stage = pipeline()
    for offset, (index, valid) in enumerate(((0, True), (1, False), (3, True))):
        event = trajectory(0, index, float(index == 0), valid=valid)
        stage.on_trajectory(event, Origin(partition=1, offset=offset))
    opened_s = 1000.0
    ((key, partition),) = stage.due(opened_s + 101)
    assert partition == 1
    assert stage.on_tick(key, opened_s + 99, partition=1) == []
    (group,) = groups_of(stage.on_tick(key, opened_s + 101, partition=1))
    assert group.close_reason == events_pb2.CLOSE_REASON_DEADLINE
    reasons = [sample.drop_reason for sample in group.samples]
    assert reasons == ["", "invalid", "missing", ""]
    assert [s.rollout_id for s in group.samples] == [
        ids.rollout_id(group.task_id, index) for index in range(GROUP_SIZE)
    ]
    # Too late: the group is closed, and stays as it was.
    late = trajectory(0, 2, 1.0)
    assert stage.on_trajectory(late, Origin(partition=1, offset=9)) == []


def test_groups_without_spread_or_without_samples_are_dropped_whole() -> None:
    stage, emitted = pipeline(), []
    for index in range(GROUP_SIZE):
        emitted += stage.on_trajectory(trajectory(0, index, 1.0), Origin(partition=0, offset=index))
        emitted += stage.on_trajectory(
            trajectory(1, index, 0.0, valid=index == 0), Origin(partition=0, offset=10 + index)
        )
    equal, invalid = groups_of(emitted)
    assert (equal.drop_reason, invalid.drop_reason) == ("zero_variance", "too_few_valid")
    assert len(equal.samples) == len(invalid.samples) == GROUP_SIZE
    assert not any(sample.HasField("tokens") for sample in equal.samples)


def test_evaluation_is_scored_and_not_grouped() -> None:
    event = trajectory(0, 0, 1.0)
    event.purpose = events_pb2.PURPOSE_EVAL
    emissions = pipeline().on_trajectory(event, Origin(partition=0, offset=0))
    assert [topic for topic, _, _ in emissions] == [REWARDS]
