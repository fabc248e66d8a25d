"""Dead letters of the processors: which samples a trajectory that cannot be handled stands for."""

from __future__ import annotations

from rollstream.bus import Record
from rollstream.bus.deadletters import dead_letter
from rollstream.v1 import events_pb2

APP = "processors"


def letter_of(record: Record, error: Exception, *, run_id: str) -> events_pb2.DeadLetter:
    """The letter of one record, with what can be told of it."""
    trajectory = _as_trajectory(record)
    return dead_letter(
        record,
        error,
        service=APP,
        run_id=run_id,
        task_id=trajectory.task_id,
        rollout_id=trajectory.rollout_id,
        samples=int(trajectory.purpose == events_pb2.PURPOSE_TRAIN),
    )


def _as_trajectory(record: Record) -> events_pb2.Trajectory:
    """What can be told of a record that may be broken."""
    try:
        return events_pb2.Trajectory.FromString(record.value)
    except Exception:  # noqa: BLE001 - broken bytes tell nothing
        return events_pb2.Trajectory()
