"""The books of a run: every sample that was produced ends in exactly one way.

``balance`` is a pure function of sets of ids; ``read_ledger`` gets them from the store. What is in
flight is found by looking, not by subtraction: a sample whose group is not closed, or whose group
was handed to the trainer and has no record from it. The books balance when the parts add up to what
was produced and nothing contradicts anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream import ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the store knows. Ids are rollout ids; a sample is one.

    ``produced``: rollout id -> group id, of every training task. ``closed``: rollout id -> drop
    reason ("" = handed to the trainer), of closed groups. ``trained``: rollout id -> the step
    events that trained it. ``refused``: rollout id -> the trainer's drop reason. ``dead``: rollout
    ids that stand in dead letters. ``gaps``: descriptions of offsets that the sink never wrote.
    """

    produced: Mapping[str, str]
    closed: Mapping[str, str] = field(default_factory=dict)
    trained: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Counts of samples. ``problems`` are contradictions, in words."""

    produced: int
    trained: int
    dropped: Mapping[str, int]
    dead_lettered: int
    in_flight: int
    problems: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        parts = self.trained + sum(self.dropped.values()) + self.dead_lettered + self.in_flight
        return parts == self.produced and not self.problems


def balance(ledger: Ledger) -> Books:
    """The books of a ledger.

    What is known twice counts once: the trainer's word stands above a dead letter, and that above
    the group's (which calls "missing" what was dead-lettered).
    """
    trained, dead, in_flight = 0, 0, 0
    dropped: Counter[str] = Counter()
    for rollout in ledger.produced:
        closed = ledger.closed.get(rollout)
        if rollout in ledger.trained:
            trained += 1
        elif rollout in ledger.refused:
            dropped[ledger.refused[rollout]] += 1
        elif rollout in ledger.dead:
            dead += 1
        elif closed:
            dropped[closed] += 1
        else:
            in_flight += 1
    return Books(
        produced=len(ledger.produced),
        trained=trained,
        dropped=dict(dropped),
        dead_lettered=dead,
        in_flight=in_flight,
        problems=tuple(_problems(ledger)),
    )


def _problems(ledger: Ledger) -> list[str]:
    twice = [r for r, events in ledger.trained.items() if len(events) > 1]
    both = sorted(set(ledger.trained) & set(ledger.refused))
    after_drop = [r for r in ledger.trained if ledger.closed.get(r)]
    unknown = sorted(
        (set(ledger.closed) | set(ledger.trained) | set(ledger.refused)) - set(ledger.produced)
    )
    closed_groups = {ledger.produced[r] for r in ledger.closed if r in ledger.produced}
    unlisted = [
        r for r, g in ledger.produced.items() if g in closed_groups and r not in ledger.closed
    ]
    unclosed = sorted((set(ledger.trained) | set(ledger.refused)) - set(ledger.closed))
    found = [
        ("trained in two steps", twice),
        ("trained and dropped by the trainer", both),
        ("trained although their group had dropped them", after_drop),
        ("finished and never produced", unknown),
        ("not listed by their closed group", unlisted),
        ("used by the trainer and in no closed group", unclosed),
    ]
    words = [f"{len(r)} samples {what}: {', '.join(r[:3])}" for what, r in found if r]
    return [*words, *ledger.gaps]


_TASKS = """
SELECT task_id, group_id, group_size FROM tasks FINAL
WHERE run_id = {run:String} AND purpose = 'train'
"""
_CLOSED = """
SELECT rollout_id, min(drop_reason) FROM group_samples FINAL
WHERE run_id = {run:String} GROUP BY rollout_id
"""
_TRAINED = """
SELECT rollout_id, groupUniqArray(event_id) FROM training_samples FINAL
WHERE run_id = {run:String} AND drop_reason = '' GROUP BY rollout_id
"""
_REFUSED = """
SELECT rollout_id, max(drop_reason) FROM training_samples FINAL
WHERE run_id = {run:String} AND drop_reason != '' GROUP BY rollout_id
"""
_DEAD = """
SELECT task_id, rollout_id, samples FROM dead_letters FINAL
WHERE run_id = {run:String} AND samples > 0
"""
# Groups that the trainer could not read: their keys still name them.
_UNREADABLE = """
SELECT DISTINCT key FROM dead_letters FINAL
WHERE run_id = {run:String} AND service = 'trainer' AND origin_topic = 'replay'
"""
_GAPS = """
SELECT _topic, _partition, first, previous FROM
(
    SELECT _topic, _partition, _log, first, last,
           max(last) OVER (PARTITION BY _log, _topic, _partition ORDER BY first
                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS previous,
           row_number() OVER (PARTITION BY _log, _topic, _partition ORDER BY first) AS number
    FROM ingested FINAL
)
WHERE number > 1 AND first > previous + 1 AND _topic NOT IN ('policy.versions', 'curriculum')
"""


def read_ledger(client: Any, run_id: str) -> Ledger:
    """The ledger of a run, from the store. Gaps in compacted topics are not gaps."""

    def rows(query: str) -> Any:
        return client.query(query, parameters={"run": run_id}).result_rows

    # Against the flow: what is written meanwhile is at worst still in flight, and not a sample that
    # was finished and never produced.
    trained, refused, closed = map(rows, (_TRAINED, _REFUSED, _CLOSED))
    letters, unreadable = rows(_DEAD), {key for (key,) in rows(_UNREADABLE)}
    tasks = rows(_TASKS)
    size = {task: group_size for task, _, group_size in tasks}
    dead: set[str] = set()
    for task, rollout, _ in letters:
        lost = [rollout] if rollout else [ids.rollout_id(task, i) for i in range(size.get(task, 0))]
        dead.update(lost)
    for task, group, group_size in tasks:
        if group in unreadable:
            dead.update(ids.rollout_id(task, index) for index in range(group_size))
    return Ledger(
        produced={
            ids.rollout_id(task, index): group
            for task, group, group_size in tasks
            for index in range(group_size)
        },
        closed=dict(closed),
        trained={rollout: frozenset(events) for rollout, events in trained},
        refused=dict(refused),
        dead=frozenset(dead),
        gaps=tuple(
            f"the sink never wrote offsets {previous + 1}..{first - 1} of {topic}/{partition}"
            for topic, partition, first, previous in rows(_GAPS)
        ),
    )
