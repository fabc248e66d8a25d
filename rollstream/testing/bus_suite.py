"""What every bus keeps, as tests: subclass ``BusSuite`` in a test module and give it a fixture
``bus`` (a ``Bus`` with two partitions a topic and nothing on it). Needs pytest with
``asyncio_mode = auto``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollstream import codecs, ids
from rollstream.bus.base import Bus, Consumer, Record
from rollstream.errors import InfraError
from rollstream.topics import REPLAY, TASKS_SHORT, TRAINING_STEPS
from rollstream.v1 import events_pb2

_DEADLINE_S = 40.0


def _task(number: int) -> events_pb2.Task:
    return events_pb2.Task(
        header=codecs.header("run", ids.event_id("Task", number)), task_id=f"t{number}"
    )


async def _until(met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not await met():
            await asyncio.sleep(0)


async def _take(consumer: Consumer, count: int, *, finish: bool = False) -> list[Record]:
    """At least ``count`` records."""
    found: list[Record] = []

    async def enough() -> bool:
        records = await consumer.poll(timeout_s=0.1)
        found.extend(records)
        for record in records if finish else ():
            consumer.done(record)
        return len(found) >= count

    await _until(enough)
    return found


async def _send(bus: Bus, numbers: range, *, partition: int | None = None) -> None:
    producer = bus.producer(client_id="suite")
    await producer.start()
    futures = [
        await producer.send(TASKS_SHORT, _task(n), key=f"t{n}", partition=partition)
        for n in numbers
    ]
    await asyncio.gather(*futures)
    await producer.stop()


class BusSuite:
    """Runs through one implementation of ``Bus``."""

    async def test_what_is_sent_is_read_in_order_of_its_partition(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        assert await bus.partitions(TASKS_SHORT) == 2
        await _send(bus, range(20))
        consumer = bus.consumer([TASKS_SHORT], client_id="c")
        await consumer.start()
        records = await _take(consumer, 20)
        assert consumer.assignment() == {(TASKS_SHORT.name, 0), (TASKS_SHORT.name, 1)}
        for partition in (0, 1):
            mine = [r for r in records if r.partition == partition]
            assert [r.offset for r in mine] == list(range(len(mine)))
            numbers = [int(r.key.decode()[1:]) for r in mine]
            assert numbers == sorted(numbers)
        events = [bus.decode(record) for record in records]
        assert {e.task_id for e in events if isinstance(e, events_pb2.Task)} == {
            f"t{n}" for n in range(20)
        }
        ends = await bus.end_offsets(TASKS_SHORT)
        assert sum(ends.values()) == 20
        assert all(p.position == p.end == ends[p.partition] for p in await consumer.positions())
        await consumer.stop()

    async def test_a_key_always_goes_to_the_same_partition(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        for _ in range(2):
            await _send(bus, range(10))
        consumer = bus.consumer([TASKS_SHORT], client_id="c")
        await consumer.start()
        places = {(r.key, r.partition) for r in await _take(consumer, 20)}
        assert len(places) == 10
        await consumer.stop()

    async def test_only_the_low_watermark_is_committed(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        await _send(bus, range(10), partition=0)
        first = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await first.start()
        for record in await _take(first, 10):
            if record.offset not in {4, 7}:
                first.done(record)
        await first.commit()
        assert (await bus.committed("g", TASKS_SHORT))[0] == 4
        await first.stop()
        second = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await second.start()
        assert [r.offset for r in await _take(second, 6)] == [4, 5, 6, 7, 8, 9]
        await second.stop()

    async def test_each_delivery_knows_how_many_there_may_have_been(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        seen = []
        for life in range(3):
            consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
            await consumer.start()
            old = await _take(consumer, 2 * life) if life else []
            # Two more, which this owner reads as well and does not finish.
            await _send(bus, range(2), partition=0)
            new = await _take(consumer, 2)
            seen.append([r.deliveries for r in (*old, *new)])
            await consumer.stop()
        assert seen == [[0, 0], [1, 1, 0, 0], [2, 2, 1, 1, 0, 0]]
        # What is finished is forgotten; the rest is not.
        consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await consumer.start()
        for record in await _take(consumer, 6):
            if record.offset != 3:
                consumer.done(record)
        await consumer.stop()
        consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await consumer.start()
        again = await _take(consumer, 3)
        assert [(r.offset, r.deliveries) for r in again] == [(3, 3), (4, 2), (5, 2)]
        await consumer.stop()

    async def test_what_is_begun_alone_is_known_to_the_next_owner(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        await _send(bus, range(4), partition=0)
        seen = []
        for _ in range(3):
            # It dies of the second record: nothing is finished.
            consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
            await consumer.start()
            records = await _take(consumer, 4)
            seen.append(await consumer.begin_alone(records[1]))
            await consumer.stop()
        # Another record; what was known of the first is of no use any more.
        consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="g")
        await consumer.start()
        records = await _take(consumer, 4)
        seen += [await consumer.begin_alone(records[2]) for _ in range(2)]
        await consumer.stop()
        assert seen == [0, 1, 2, 0, 1]
        assert [r.deliveries for r in records] == [3, 3, 3, 3]

    async def test_two_members_share_and_the_rest_comes_again_to_who_stays(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        members = [bus.consumer([TASKS_SHORT], client_id="c", group_id="g") for _ in range(2)]
        for member in members:
            await member.start()

        async def shared() -> bool:
            for member in members:
                await member.poll(timeout_s=0.1)
            return [len(member.assignment()) for member in members] == [1, 1]

        await _until(shared)
        for partition in (0, 1):
            await _send(bus, range(5), partition=partition)
        leaver, stayer = members
        left = await _take(leaver, 5)
        await leaver.commit()
        await leaver.stop()
        kept = await _take(stayer, 10)
        again = [r for r in kept if r.partition == left[0].partition]
        assert {r.offset for r in again} == set(range(5))
        assert all(r.deliveries >= 1 for r in again)
        # A record from before the partition was lost is not finished by who lost it.
        for record in kept:
            stayer.done(record)
        await stayer.commit()
        assert dict(await bus.committed("g", TASKS_SHORT)) == {0: 5, 1: 5}
        await stayer.stop()

    async def test_a_self_assigned_consumer_reads_from_where_it_is_told(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        await _send(bus, range(6), partition=1)
        consumer = bus.consumer([TASKS_SHORT], client_id="c")
        await consumer.start()
        await _take(consumer, 6)
        consumer.seek(TASKS_SHORT, 1, 4)
        again = await _take(consumer, 2)
        assert [(r.offset, r.deliveries) for r in again] == [(4, 0), (5, 0)]
        await consumer.commit()
        assert not await bus.committed("g", TASKS_SHORT)
        await consumer.stop()

    async def test_a_group_may_begin_at_the_end(self, bus: Bus) -> None:
        await bus.ensure_topics([TASKS_SHORT])
        await _send(bus, range(3), partition=0)
        consumer = bus.consumer([TASKS_SHORT], client_id="c", group_id="late", from_end=True)
        await consumer.start()

        async def assigned() -> bool:
            assert not await consumer.poll(timeout_s=0.1)
            found = await consumer.positions()
            return len(found) == 2 and all(p.position == p.end for p in found)

        await _until(assigned)
        await _send(bus, range(3, 5), partition=0)
        assert [r.offset for r in await _take(consumer, 2)] == [3, 4]
        await consumer.stop()

    async def test_control_topics_have_one_partition(self, bus: Bus) -> None:
        await bus.ensure_topics([TRAINING_STEPS, REPLAY])
        await bus.ensure_topics([TRAINING_STEPS, REPLAY])
        assert (await bus.partitions(TRAINING_STEPS), await bus.partitions(REPLAY)) == (1, 2)

    async def test_the_log_has_a_name(self, bus: Bus) -> None:
        name = await bus.cluster_id()
        assert name
        assert await bus.cluster_id() == name

    async def test_a_missing_topic_is_an_error_that_names_it(self, bus: Bus) -> None:
        consumer = bus.consumer([REPLAY], client_id="c")
        with pytest.raises(InfraError, match=REPLAY.name):
            await consumer.start()
