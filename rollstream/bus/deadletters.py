"""Dead letters: an event that cannot be processed is kept, byte for byte, with what was wrong and
what to do.
"""

from __future__ import annotations

from rollstream import codecs, ids
from rollstream.bus.base import Producer, Record
from rollstream.errors import RollstreamError
from rollstream.topics import DEAD_LETTERS
from rollstream.v1 import events_pb2


def dead_letter(
    record: Record,
    error: Exception,
    *,
    service: str,
    run_id: str,
    task_id: str = "",
    rollout_id: str = "",
    samples: int = 0,
) -> events_pb2.DeadLetter:
    """The letter for one record; the same record and service give the same id.

    ``task_id``, ``rollout_id`` and ``samples`` say which samples the books are to write off, as far
    as they can be told.
    """
    event_id = ids.event_id("DeadLetter", service, record.topic, record.partition, record.offset)
    return events_pb2.DeadLetter(
        header=codecs.header(run_id, event_id),
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value,
        headers=dict(record.headers),
        service=service,
        error_code=error.code if isinstance(error, RollstreamError) else "internal",
        error=(error.message if isinstance(error, RollstreamError) else repr(error))[:4000],
        hint=error.hint if isinstance(error, RollstreamError) else "a bug: please report it",
        task_id=task_id,
        rollout_id=rollout_id,
        samples=samples,
    )


async def send_dead_letter(producer: Producer, letter: events_pb2.DeadLetter) -> None:
    """Send a letter and wait until it is acknowledged: only then may its record count as done."""
    await producer.send_batch(DEAD_LETTERS, [(letter.topic, letter)])
