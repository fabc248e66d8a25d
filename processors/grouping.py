"""When a group is closed and what it becomes: a state machine without clock or I/O.

State: ``GroupState`` per group. Events: a scored trajectory; a tick that carries the time. Effect:
at most one ``TrainingGroup``, which always lists ``group_size`` samples. The first complete attempt
of a sample wins; what comes again, or after the close, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from processors.advantages import ESTIMATORS, has_signal
from rollstream import codecs, ids
from rollstream.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingRules:
    """``deadline_s`` after its first trajectory an incomplete group is closed as it is."""

    estimator: str
    min_samples: int
    deadline_s: float


def add(
    state: events_pb2.GroupState,
    scored: events_pb2.ScoredTrajectory,
    rules: GroupingRules,
    *,
    offset: int,
) -> events_pb2.TrainingGroup | None:
    """Take in one scored trajectory (``state`` is updated); the group when this completes it."""
    if is_known(state, scored.sample_index):
        return None
    if not state.scored:
        state.opened_at_s = scored.header.occurred_at.ToMilliseconds() / 1000.0
    state.scored.add().CopyFrom(scored)
    state.absorbed[scored.sample_index] = offset
    if len(state.scored) < scored.group_size:
        return None
    return _close(state, rules, events_pb2.CLOSE_REASON_COMPLETE)


def is_known(state: events_pb2.GroupState, sample_index: int) -> bool:
    """Whether a sample was taken in before, or comes too late."""
    return state.closed or sample_index in state.absorbed


def is_replay(state: events_pb2.GroupState, sample_index: int, *, offset: int) -> bool:
    """Whether this very record was taken in before."""
    return sample_index in state.absorbed and state.absorbed[sample_index] == offset


def tick(
    state: events_pb2.GroupState, now_s: float, rules: GroupingRules
) -> events_pb2.TrainingGroup | None:
    """Time has passed: the group, if its deadline has."""
    if state.closed or not state.scored or now_s < state.opened_at_s + rules.deadline_s:
        return None
    return _close(state, rules, events_pb2.CLOSE_REASON_DEADLINE)


def _close(
    state: events_pb2.GroupState, rules: GroupingRules, reason: events_pb2.CloseReason
) -> events_pb2.TrainingGroup:
    scored = sorted(state.scored, key=lambda s: s.sample_index)
    group = _group(scored, rules, reason)
    state.ClearField("scored")
    state.closed = True
    return group


def _group(
    scored: list[events_pb2.ScoredTrajectory],
    rules: GroupingRules,
    reason: events_pb2.CloseReason,
) -> events_pb2.TrainingGroup:
    first = scored[0]
    valid = [s for s in scored if s.validity == events_pb2.VALIDITY_VALID]
    rewards = np.array([s.raw for s in valid], dtype=np.float64)
    advantages = dict(
        zip((s.sample_index for s in valid), ESTIMATORS[rules.estimator](rewards), strict=True)
    )
    drop_reason = ""
    if len(valid) < min(rules.min_samples, first.group_size):
        drop_reason = "too_few_valid"
    elif not has_signal(rewards):
        drop_reason = "zero_variance"
    samples: list[events_pb2.TrainingSample] = []
    present = {s.sample_index: s for s in scored}
    for index in range(first.group_size):
        samples += _samples(
            first, present.get(index), index, advantages.get(index, 0.0), tokens=not drop_reason
        )
    latest = max((s.header.occurred_at for s in scored), key=Timestamp.ToNanoseconds)
    event_id = ids.event_id("TrainingGroup", first.group_id)
    return events_pb2.TrainingGroup(
        header=codecs.header(first.header.run_id, event_id, occurred_at=latest),
        group_id=first.group_id,
        task_id=first.task_id,
        domain=first.domain,
        group_size=first.group_size,
        samples=samples,
        advantage_estimator=rules.estimator,
        close_reason=reason,
        drop_reason=drop_reason,
        loss_weight=first.loss_weight,
        reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
        reward_std=float(rewards.std()) if len(rewards) else 0.0,
    )


def _samples(
    first: events_pb2.ScoredTrajectory,
    scored: events_pb2.ScoredTrajectory | None,
    index: int,
    advantage: float,
    *,
    tokens: bool,
) -> list[events_pb2.TrainingSample]:
    """The entries of one sample: one per token sequence, or one that says why there is none."""
    if scored is None:
        missing = ids.rollout_id(first.task_id, index)
        return [
            events_pb2.TrainingSample(rollout_id=missing, sample_index=index, drop_reason="missing")
        ]
    entry = events_pb2.TrainingSample(
        rollout_id=scored.rollout_id,
        sample_index=index,
        attempt=scored.attempt,
        reward=scored.raw,
        advantage=advantage,
        policy_version_min=scored.policy_version_min,
        policy_version_max=scored.policy_version_max,
    )
    if scored.validity != events_pb2.VALIDITY_VALID:
        entry.drop_reason = "invalid"
    elif not any(sequence.sampled for sequence in scored.sequences):
        entry.drop_reason = "empty"
    if entry.drop_reason or not tokens:
        return [entry]
    entries = []
    for segment, sequence in enumerate(scored.sequences):
        one = events_pb2.TrainingSample()
        one.CopyFrom(entry)
        one.segment = segment
        one.tokens.CopyFrom(sequence)
        entries.append(one)
    return entries
