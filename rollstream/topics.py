"""The topics, listed once: name, message type, key, clean-up, partitions and how long they keep.

``rollstream.bus.admin`` creates and verifies them from this table; no service names a topic by a
literal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import Message

from rollstream.v1 import events_pb2, policy_pb2


class Cleanup(StrEnum):
    DELETE = "delete"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic of the contract. ``key`` names the field that keys the record."""

    name: str
    message: type[Message]
    key: str
    cleanup: Cleanup = Cleanup.DELETE
    # None: the run's default (bus.partitions). Control topics have one partition, so that they are
    # totally ordered.
    partitions: int | None = None
    # Retention, as a multiple of bus.retention_hours: what people act on, and the books, are kept
    # longer than what machines consume.
    kept: int = 1


TASKS_SHORT = Topic(name="tasks.short", message=events_pb2.Task, key="task_id")
TASKS_STANDARD = Topic(name="tasks.standard", message=events_pb2.Task, key="task_id")
TASKS_LONG = Topic(name="tasks.long", message=events_pb2.Task, key="task_id")
TRAJECTORIES = Topic(name="trajectories", message=events_pb2.Trajectory, key="group_id")
REWARDS = Topic(name="rewards", message=events_pb2.ScoredTrajectory, key="group_id")
REPLAY = Topic(name="replay", message=events_pb2.TrainingGroup, key="group_id")
POLICY_VERSIONS = Topic(
    name="policy.versions",
    message=policy_pb2.PolicyVersion,
    key="policy",
    cleanup=Cleanup.COMPACT,
    partitions=1,
)
CURRICULUM = Topic(
    name="curriculum",
    message=events_pb2.CurriculumState,
    key="domain",
    cleanup=Cleanup.COMPACT,
    partitions=1,
)
TRAINING_STEPS = Topic(
    name="training.steps", message=events_pb2.TrainingStep, key="run_id", partitions=1, kept=4
)
EVALUATIONS = Topic(
    name="evaluations", message=events_pb2.EvaluationResult, key="suite", partitions=1, kept=4
)
DEAD_LETTERS = Topic(
    name="dead-letters", message=events_pb2.DeadLetter, key="topic", partitions=1, kept=4
)

TASKS: dict[int, Topic] = {
    events_pb2.TIER_SHORT: TASKS_SHORT,
    events_pb2.TIER_STANDARD: TASKS_STANDARD,
    events_pb2.TIER_LONG: TASKS_LONG,
}

ALL: tuple[Topic, ...] = (
    TASKS_SHORT,
    TASKS_STANDARD,
    TASKS_LONG,
    TRAJECTORIES,
    REWARDS,
    REPLAY,
    POLICY_VERSIONS,
    CURRICULUM,
    TRAINING_STEPS,
    EVALUATIONS,
    DEAD_LETTERS,
)

BY_NAME: dict[str, Topic] = {topic.name: topic for topic in ALL}
