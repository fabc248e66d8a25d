"""What is done about a topic that a broker has with other settings than the table's."""

from __future__ import annotations

import dataclasses

import pytest

from rollstream.bus.topic_settings import Shape, judge, wanted
from rollstream.config import load
from rollstream.errors import ConfigError
from rollstream.topics import ALL, POLICY_VERSIONS, REPLAY, TRAINING_STEPS

BUS = load(overrides=["bus.mode=external", "bus.replication=3"], environ={}).bus
SHOULD = wanted(REPLAY, BUS)
WEEK_MS = str(7 * 24 * 3_600_000)


def found(**settings: str) -> Shape:
    """REPLAY with some other settings; ``retention_ms`` for ``retention.ms``."""
    other = {name.replace("_", "."): value for name, value in settings.items()}
    return dataclasses.replace(SHOULD, settings={**SHOULD.settings, **other})


def test_every_topic_has_all_its_settings() -> None:
    for topic in ALL:
        shape = wanted(topic, BUS)
        assert (shape.replication, shape.settings["min.insync.replicas"]) == (3, "2")
        kept = shape.settings.get("retention.ms")
        assert (kept is None) == (topic.cleanup == "compact")
    assert SHOULD.settings["retention.ms"] == WEEK_MS
    assert wanted(TRAINING_STEPS, BUS).settings["retention.ms"] == str(4 * int(WEEK_MS))
    assert wanted(POLICY_VERSIONS, BUS).partitions == 1


def test_the_same_is_left_alone() -> None:
    verdict = judge(SHOULD, SHOULD)
    assert (verdict.repair, verdict.left, verdict.refused) == ({}, (), ())


@pytest.mark.parametrize(
    ("settings", "repair", "left"),
    [
        ({"retention_ms": "1000"}, {"retention.ms": WEEK_MS}, ()),
        ({"retention_ms": "-1"}, {}, (f"retention.ms=-1, above {WEEK_MS}",)),
        ({"retention_bytes": "1000000"}, {"retention.bytes": "-1"}, ()),
        ({"max_message_bytes": "5"}, {"max.message.bytes": str(32 << 20)}, ()),
        (
            {"max_message_bytes": "99999999"},
            {},
            (f"max.message.bytes=99999999, above {32 << 20}",),
        ),
        ({"min_insync_replicas": "1"}, {"min.insync.replicas": "2"}, ()),
        ({"min_insync_replicas": "3"}, {"min.insync.replicas": "2"}, ()),
    ],
)
def test_settings_are_raised_and_never_lowered_where_events_would_go(
    settings: dict[str, str], repair: dict[str, str], left: tuple[str, ...]
) -> None:
    verdict = judge(SHOULD, found(**settings))
    assert (verdict.repair, verdict.left, verdict.refused) == (repair, left, ())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"partitions": 5}, "5 partitions, not 4"),
        ({"replication": 1}, "1 replicas, not 3"),
        ({"settings": {**SHOULD.settings, "cleanup.policy": "compact"}}, "compact, not delete"),
    ],
)
def test_what_cannot_be_changed_is_refused(change: dict[str, object], word: str) -> None:
    (said,) = judge(SHOULD, dataclasses.replace(SHOULD, **change)).refused  # type: ignore[arg-type]
    assert word in said


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["bus.replication=3"], "replication 3 needs as many brokers"),
        (["bus.brokers=2"], "brokers"),
        (["bus.min_insync_replicas=2"], "nothing could be written"),
    ],
)
def test_replicas_that_cannot_be_are_refused(overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load(overrides=overrides, environ={})
