"""Recorded binaries of every message must keep decoding to the same values.

``python -m tests.golden.record`` writes the missing ones; a change of an existing one is a break of
the contract.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream import codecs
from rollstream.topics import ALL
from tests.golden.record import FOLDER, example, path_of


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.name)
def test_golden_binaries_keep_decoding(topic) -> None:  # type: ignore[no-untyped-def]
    assert codecs.decode(topic, path_of(topic).read_bytes()) == example(topic)


@pytest.mark.parametrize("topic", ALL, ids=lambda topic: topic.name)
def test_the_same_event_has_the_same_bytes(topic) -> None:  # type: ignore[no-untyped-def]
    assert codecs.encode(example(topic)) == path_of(topic).read_bytes()


def test_every_binary_belongs_to_a_topic() -> None:
    known = {path_of(topic).name for topic in ALL}
    assert {p.name for p in Path(FOLDER).glob("*.bin")} == known
