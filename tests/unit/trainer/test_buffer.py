"""What the trainer never trains on, and says so. (The state machine: tests/property.)"""

from __future__ import annotations

import numpy as np
import pytest

from rollstream import codecs
from rollstream.v1 import events_pb2
from trainer.buffer import GroupBuffer


def _group(token_ids: list[int], *, sampled: list[tuple[int, int]]) -> events_pb2.TrainingGroup:
    count = sum(length for _, length in sampled)
    tokens = codecs.make_sequence(
        np.array(token_ids, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        sampled=sampled,
        versions=[(0, start, length) for start, length in sampled],
    )
    sample = events_pb2.TrainingSample(rollout_id="r", tokens=tokens)
    return events_pb2.TrainingGroup(group_id="g", samples=[sample])


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_group([1, 2, 3], sampled=[(1, 2)]), ""),
        (_group([1, 2, 3, 4, 5], sampled=[(1, 2)]), "oversize"),
        (_group([1, 2, 3], sampled=[]), "empty"),
        # Nothing predicts the first token: no loss applies to it.
        (_group([1, 2, 3], sampled=[(0, 1)]), "empty"),
        (_group([1, 10, 3], sampled=[(1, 2)]), "unknown_token"),
        (_group([1, -1, 3], sampled=[(1, 2)]), "unknown_token"),
    ],
)
def test_groups_that_cannot_be_trained_on(group: events_pb2.TrainingGroup, reason: str) -> None:
    buffer = GroupBuffer(window=10, max_length=4, vocab_size=10)
    refusal = buffer.offer(group, partition=0, offset=0)
    assert (refusal.reason if refusal else "") == reason
    assert len(buffer) == (0 if reason else 1)
    # It is not taken in later, either.
    assert buffer.offer(group, partition=0, offset=1) is None
    assert len(buffer) == (0 if reason else 1)


def test_the_oldest_ids_are_forgotten() -> None:
    buffer = GroupBuffer(window=2, max_length=4)
    for number in range(3):
        group = _group([1, 2], sampled=[(1, 1)])
        group.group_id = f"g{number}"
        buffer.offer(group, partition=0, offset=number)
    buffer.take(3)
    assert buffer.finished == ["g1", "g2"]
