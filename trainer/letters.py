"""Dead letters of the trainer: which samples a group that cannot be read stands for."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from rollstream.bus import Record
from rollstream.bus.deadletters import dead_letter
from rollstream.v1 import events_pb2


def letter_of(record: Record, error: Exception, *, run_id: str) -> events_pb2.DeadLetter:
    """The letter of one record of ``replay``. Where its bytes tell nothing, its key still names the
    group, by which the books write off its samples.
    """
    group = events_pb2.TrainingGroup()
    try:
        group.ParseFromString(record.value)
    except DecodeError:
        group.Clear()
    if group.group_id.encode() != record.key:
        group.Clear()
    return dead_letter(
        record,
        error,
        service="trainer",
        run_id=run_id,
        task_id=group.task_id,
        samples=group.group_size,
    )
