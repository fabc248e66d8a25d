"""The trainer's buffer: a group is trained, refused or held, never two of them, never none."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream import codecs
from rollstream.v1 import events_pb2
from trainer.buffer import GroupBuffer

MAX_STALENESS, BATCH, MAX_LENGTH = 1, 2, 8


def make_group(
    number: int, *, version: int = 0, length: int = 4, dropped: str = ""
) -> events_pb2.TrainingGroup:
    tokens = codecs.make_sequence(
        np.arange(length, dtype=np.int32),
        np.zeros(1, dtype=np.float32),
        sampled=[(length - 1, 1)],
        versions=[(version, length - 1, 1)],
    )
    sample = events_pb2.TrainingSample(
        rollout_id=f"r{number}", tokens=tokens, policy_version_min=version
    )
    missing = events_pb2.TrainingSample(rollout_id=f"m{number}", drop_reason="missing")
    return events_pb2.TrainingGroup(
        group_id=f"g{number}", samples=[sample, missing], drop_reason=dropped
    )


class BufferMachine(RuleBasedStateMachine):
    """Random arrivals, repeats, steps and restores."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = GroupBuffer(window=10_000, max_length=MAX_LENGTH)
        self.log: list[events_pb2.TrainingGroup] = []
        self.version = 0
        self.trained: list[str] = []
        self.refused: list[str] = []

    def _offer(self, group: events_pb2.TrainingGroup) -> None:
        self.log.append(group)
        refusal = self.buffer.offer(group, partition=0, offset=len(self.log) - 1)
        if refusal is not None:
            self.refused.append(group.group_id)

    @rule(behind=st.integers(0, 3), long=st.booleans(), dropped=st.booleans())
    def arrive(self, behind: int, long: bool, dropped: bool) -> None:
        number = len({g.group_id for g in self.log})
        self._offer(
            make_group(
                number,
                version=max(0, self.version - behind),
                length=MAX_LENGTH + 1 if long else 4,
                dropped="zero_variance" if dropped else "",
            )
        )

    @rule(pick=st.integers(0, 50))
    def arrive_again(self, pick: int) -> None:
        if self.log:
            self._offer(self.log[pick % len(self.log)])

    @rule()
    def step(self) -> None:
        expired = self.buffer.expire(version=self.version, max_staleness=MAX_STALENESS)
        self.refused += [r.group.group_id for r in expired]
        taken = self.buffer.take(BATCH)
        if taken is not None:
            for group in taken:
                assert self.version - group.samples[0].policy_version_min <= MAX_STALENESS
            self.trained += [group.group_id for group in taken]
            self.version += 1

    @rule()
    def restore_and_read_again(self) -> None:
        fresh = GroupBuffer(window=10_000, max_length=MAX_LENGTH)
        fresh.restore(
            positions=self.buffer.positions,
            groups=iter(self.buffer.groups),
            finished=self.buffer.finished,
        )
        self.buffer = fresh
        for offset, group in enumerate(self.log):
            assert fresh.offer(group, partition=0, offset=offset) is None

    @invariant()
    def each_group_is_in_exactly_one_place(self) -> None:
        held = [group.group_id for group in self.buffer.groups]
        passed = {g.group_id for g in self.log if g.drop_reason}
        places = [*self.trained, *self.refused, *held]
        assert len(places) == len(set(places))
        assert set(places) | passed == {g.group_id for g in self.log}


BufferMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestBuffer = BufferMachine.TestCase
