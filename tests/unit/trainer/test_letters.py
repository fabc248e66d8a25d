"""A group that cannot be read is told by what is left of it."""

from __future__ import annotations

import pytest

from rollstream.bus import Record
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2
from trainer.letters import letter_of

_GROUP = events_pb2.TrainingGroup(group_id="g1", task_id="t1", group_size=4).SerializeToString()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (b"g1", _GROUP, ("t1", 4)),
        (b"g1", b"\xff" * 9, ("", 0)),
        # It decodes, but not to the group that its key names.
        (b"g2", _GROUP, ("", 0)),
    ],
)
def test_letter_tells_what_the_bytes_tell(
    key: bytes, value: bytes, expected: tuple[str, int]
) -> None:
    record = Record(
        topic="replay", partition=1, offset=7, key=key, value=value, timestamp_ms=0, headers=()
    )
    letter = letter_of(record, ContractError("broken", hint="none"), run_id="r")
    assert (letter.task_id, letter.samples) == expected
    assert (letter.key, letter.value, letter.offset) == (key, value, 7)
