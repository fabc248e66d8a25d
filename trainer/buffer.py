"""What the trainer holds between the log and the step: a pure state machine.

Invariants: a group is in exactly one of {buffered, taken, refused}; one that was taken is never
taken again within the window; ``positions`` is, per partition, the offset after the last group that
was offered, so that (positions, buffer) together lose and double nothing when both are restored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollstream import codecs
from rollstream.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group that will not be trained on, and why."""

    group: events_pb2.TrainingGroup
    reason: str


@dataclass(slots=True, kw_only=True)
class GroupBuffer:
    """Groups in arrival order.

    ``window``: how many finished group ids are remembered. ``max_length``: longest sequence;
    ``vocab_size``: ids from there on are no tokens of the policy (0: not checked).
    """

    window: int
    max_length: int
    vocab_size: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0
    _groups: OrderedDict[str, events_pb2.TrainingGroup] = field(default_factory=OrderedDict)
    _finished: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[events_pb2.TrainingGroup]:
        return list(self._groups.values())

    @property
    def finished(self) -> list[str]:
        return list(self._finished)

    def restore(
        self,
        *,
        positions: Mapping[int, int],
        groups: Iterator[events_pb2.TrainingGroup],
        finished: list[str],
    ) -> None:
        """Take over the state of a checkpoint."""
        self.positions = dict(positions)
        self._groups = OrderedDict((g.group_id, g) for g in groups)
        self._finished = OrderedDict.fromkeys(finished)

    def offer(
        self, group: events_pb2.TrainingGroup, *, partition: int, offset: int
    ) -> Refusal | None:
        """A group read from the log. Returns a refusal when it can never be trained on.

        A group that was dropped before it came here, or that came before, is passed over: the books
        know it already.
        """
        if offset < self.positions.get(partition, 0):
            return None
        self.positions[partition] = offset + 1
        if group.group_id in self._groups or group.group_id in self._finished:
            self.duplicates += 1
            return None
        if group.drop_reason or not live_samples(group):
            self._finish(group.group_id)
            return None
        if reason := self._fault(group):
            self._finish(group.group_id)
            return Refusal(group=group, reason=reason)
        self._groups[group.group_id] = group
        return None

    def expire(self, *, version: int, max_staleness: int) -> list[Refusal]:
        """Remove the groups that are too old to be trained on at ``version``."""
        stale = [g for g in self._groups.values() if staleness(g, version) > max_staleness]
        for group in stale:
            del self._groups[group.group_id]
            self._finish(group.group_id)
        return [Refusal(group=group, reason="stale") for group in stale]

    def take(self, count: int) -> list[events_pb2.TrainingGroup] | None:
        """The ``count`` oldest groups, or None while there are fewer."""
        if len(self._groups) < count:
            return None
        taken = [self._groups.popitem(last=False)[1] for _ in range(count)]
        for group in taken:
            self._finish(group.group_id)
        return taken

    def drain(self) -> list[Refusal]:
        """Give up what is left: the run is complete."""
        left = [Refusal(group=group, reason="run_complete") for group in self._groups.values()]
        for refusal in left:
            self._finish(refusal.group.group_id)
        self._groups.clear()
        return left

    def _fault(self, group: events_pb2.TrainingGroup) -> str:
        """Why a group can never be trained on; "" when it can."""
        tokens = [codecs.token_array(s.tokens) for s in live_samples(group)]
        if max(map(len, tokens)) > self.max_length:
            return "oversize"
        if not any(codecs.sampled_mask(s.tokens)[1:].any() for s in live_samples(group)):
            return "empty"
        known = self.vocab_size
        if known and any(len(t) and (t.min() < 0 or t.max() >= known) for t in tokens):
            return "unknown_token"
        return ""

    def _finish(self, group_id: str) -> None:
        self._finished[group_id] = None
        while len(self._finished) > self.window:
            self._finished.popitem(last=False)


def live_samples(group: events_pb2.TrainingGroup) -> list[events_pb2.TrainingSample]:
    """The samples of a group that are to be trained on: the others were accounted for before."""
    return [s for s in group.samples if not s.drop_reason]


def staleness(group: events_pb2.TrainingGroup, version: int) -> int:
    """Trainer version minus the oldest version that sampled a token of the group."""
    return max((version - s.policy_version_min for s in live_samples(group)), default=0)
