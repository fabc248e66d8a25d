"""Groups of several partitions come in one order, however their fetches arrived."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rollstream.bus import Record
from trainer.ordering import LogOrder


def _record(partition: int, offset: int, timestamp_ms: int) -> Record:
    return Record(
        topic="replay",
        partition=partition,
        offset=offset,
        key=b"g",
        value=b"v",
        timestamp_ms=timestamp_ms,
        headers=(),
    )


def _order(logs: dict[int, list[Record]], rng: random.Random) -> list[tuple[int, int]]:
    """What is released of logs that do not grow, fetched by pieces as chance has it."""
    order, taken, left = LogOrder(logs), [], {p: list(log) for p, log in logs.items()}
    while True:
        some = [p for p, log in left.items() if log]
        if some:
            partition = rng.choice(some)
            size = rng.randint(1, 3)
            order.add(left[partition][:size])
            del left[partition][:size]
        if order.blocked:
            order.at_end(p for p, log in left.items() if not log)
        taken += [(r.partition, r.offset) for r in order.take()]
        if not some and not order.blocked:
            return taken


@given(
    times=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4),
    seeds=st.tuples(st.integers(), st.integers()),
)
def test_the_logs_alone_decide(times: list[list[int]], seeds: tuple[int, int]) -> None:
    logs = {p: [_record(p, o, t) for o, t in enumerate(log)] for p, log in enumerate(times)}
    one, other = (_order(logs, random.Random(seed)) for seed in seeds)
    assert one == other
    assert sorted(one) == [(p, o) for p, log in logs.items() for o in range(len(log))]


def test_waits_for_a_partition_that_is_behind() -> None:
    order = LogOrder([0, 1])
    order.add([_record(0, 0, 5)])
    assert order.take() == [] and order.blocked
    order.add([_record(1, 0, 3)])
    # The second partition may have more that is older than 5.
    assert [r.partition for r in order.take()] == [1]
    order.at_end([1])
    assert [r.partition for r in order.take()] == [0]
    assert not order.blocked
