"""What happens to one trajectory: score, normalise, group. No Kafka, no clock.

``Pipeline`` is a pure function of (tables, event): it reads and writes two mappings of bytes and
returns the events to emit. The Faust app gives it changelogged tables, tests give it dictionaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from google.protobuf.message import Message

from processors import grouping
from processors.grouping import GroupingRules
from processors.normaliser import RunningNormaliser
from processors.rewards import Score, digest, score
from rollstream import codecs, ids
from rollstream.config import Config
from rollstream.config.model import DomainConfig
from rollstream.errors import ContractError
from rollstream.topics import REPLAY, REWARDS, Topic
from rollstream.v1 import events_pb2

Table = MutableMapping[bytes, bytes]
Emission = tuple[Topic, str, Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The record that an event came from."""

    partition: int
    offset: int


class Pipeline:
    """Score, normalise, group, by the rules of the configuration."""

    def __init__(self, config: Config, *, groups: Table, normalisers: Table) -> None:
        self._config = config
        self._groups = groups
        self._normalisers = normalisers
        self._domains = {domain.name: domain for domain in config.domains}
        self._digests = {domain.name: digest(domain.reward) for domain in config.domains}
        self._rules = GroupingRules(
            estimator=config.processors.advantage,
            min_samples=config.processors.group_min_samples,
            deadline_s=config.processors.group_deadline_s,
        )
        # Groups that wait for samples: (partition, deadline), to know which to tick.
        self.open: dict[bytes, tuple[int, float]] = {}
        # Groups that are remembered as closed, oldest first, by partition.
        self._closed: dict[int, deque[bytes]] = {}
        self._closed_limit = config.processors.closed_groups

    def on_trajectory(self, trajectory: events_pb2.Trajectory, origin: Origin) -> list[Emission]:
        """The events that one trajectory causes; none when it was seen before.

        Raises:
            ContractError: the domain is unknown or the evidence does not fit its reward spec.
        """
        domain = self._domain(trajectory.domain)
        key = trajectory.group_id.encode()
        state = self._group(key)
        training = trajectory.purpose == events_pb2.PURPOSE_TRAIN
        if training and grouping.is_known(state, trajectory.sample_index):
            if grouping.is_replay(state, trajectory.sample_index, offset=origin.offset):
                # A crash came between the two tables: what the record caused is on the broker and
                # in its group, but perhaps not in the statistic.
                result = score(trajectory.evidence, domain.reward)
                self._normalise(result, domain, origin, training=True)
            return []
        scored = self._score(trajectory, domain, origin, training=training)
        emissions: list[Emission] = [(REWARDS, trajectory.group_id, scored)]
        if training:
            group = grouping.add(state, scored, self._rules, offset=origin.offset)
            self._keep(key, state, origin.partition)
            if group is not None:
                emissions.append((REPLAY, group.group_id, group))
        return emissions

    def on_tick(self, key: bytes, now_s: float, *, partition: int) -> list[Emission]:
        """The events that the passing of time causes for one group."""
        state = self._group(key)
        group = grouping.tick(state, now_s, self._rules)
        if group is None:
            return []
        self._keep(key, state, partition)
        return [(REPLAY, group.group_id, group)]

    def due(self, now_s: float) -> list[tuple[bytes, int]]:
        """(group, partition) of the groups whose deadline has passed."""
        return [(key, partition) for key, (partition, at) in self.open.items() if at <= now_s]

    def recover(self, groups: Mapping[bytes, bytes]) -> None:
        """Know again which groups wait and which are closed, from a table that was restored."""
        self.open.clear()
        self._closed.clear()
        states = [(key, events_pb2.GroupState.FromString(data)) for key, data in groups.items()]
        for key, state in sorted(
            states, key=lambda item: max(item[1].absorbed.values(), default=0)
        ):
            self._note(key, state)

    def _score(
        self,
        trajectory: events_pb2.Trajectory,
        domain: DomainConfig,
        origin: Origin,
        *,
        training: bool,
    ) -> events_pb2.ScoredTrajectory:
        result = score(trajectory.evidence, domain.reward)
        normaliser, normalised = self._normalise(result, domain, origin, training=training)
        event_id = ids.event_id("ScoredTrajectory", trajectory.rollout_id, trajectory.attempt)
        return events_pb2.ScoredTrajectory(
            header=codecs.header(
                trajectory.header.run_id, event_id, occurred_at=trajectory.header.occurred_at
            ),
            rollout_id=trajectory.rollout_id,
            task_id=trajectory.task_id,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            attempt=trajectory.attempt,
            domain=trajectory.domain,
            purpose=trajectory.purpose,
            group_size=trajectory.group_size,
            components=[
                events_pb2.RewardComponent(name=name, value=value, weight=weight)
                for name, value, weight in result.components
            ],
            raw=result.raw,
            normalised=normalised,
            normaliser=normaliser,
            reward_spec_digest=self._digests[trajectory.domain],
            flags=result.flags,
            validity=events_pb2.VALIDITY_VALID if result.valid else events_pb2.VALIDITY_INVALID,
            invalid_reason=result.invalid_reason,
            sequences=trajectory.sequences,
            policy_version_min=trajectory.policy_version_min,
            policy_version_max=trajectory.policy_version_max,
            suite=trajectory.suite,
            loss_weight=domain.reward.loss_weight,
        )

    def _normalise(
        self, result: Score, domain: DomainConfig, origin: Origin, *, training: bool
    ) -> tuple[events_pb2.NormaliserState, float]:
        """The normalised reward and the statistic used: that of the samples before this one."""
        if not result.valid or domain.reward.normaliser == "none":
            return events_pb2.NormaliserState(kind=domain.reward.normaliser), result.raw
        # Per partition: the statistic is then a function of that partition's log alone.
        key = f"{origin.partition}/{domain.name}".encode()
        before = RunningNormaliser.from_bytes(self._normalisers.get(key) or b"")
        if training:
            after = before.absorb(result.raw, offset=origin.offset, decay=domain.reward.decay)
            self._normalisers[key] = after.to_bytes()
        used = events_pb2.NormaliserState(
            kind="running", mean=before.mean, std=before.std, count=before.count
        )
        return used, before.normalise(result.raw)

    def _domain(self, name: str) -> DomainConfig:
        domain = self._domains.get(name)
        if domain is None:
            raise ContractError(
                f"unknown domain {name!r}",
                hint=f"known: {', '.join(sorted(self._domains)) or 'none'}; add it to [[domains]]",
            )
        return domain

    def _group(self, key: bytes) -> events_pb2.GroupState:
        return events_pb2.GroupState.FromString(self._groups.get(key) or b"")

    def _keep(self, key: bytes, state: events_pb2.GroupState, partition: int) -> None:
        state.partition = partition
        self._groups[key] = state.SerializeToString(deterministic=True)
        self._note(key, state)
        closed = self._closed.setdefault(partition, deque())
        while len(closed) > self._closed_limit:
            self._groups.pop(closed.popleft(), None)

    def _note(self, key: bytes, state: events_pb2.GroupState) -> None:
        if state.closed:
            self.open.pop(key, None)
            self._closed.setdefault(state.partition, deque()).append(key)
        else:
            self.open[key] = (state.partition, state.opened_at_s + self._rules.deadline_s)
