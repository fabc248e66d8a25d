"""Batches cut by a crash at any effect: the same events come out, byte for byte, and the same state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.batch import Batch, Change, WriteBack
from processors.pipeline import Emission, Origin, Pipeline
from rollstream.v1 import events_pb2
from tests.property.test_pipeline import CONFIG, GROUP_SIZE, trajectory


class Crash(Exception):
    """The process is gone."""


@dataclass
class Broker:
    """What outlives the process: the tables, what was emitted, how far is committed."""

    tables: tuple[dict[bytes, bytes], dict[bytes, bytes]] = field(default_factory=lambda: ({}, {}))
    emitted: list[bytes] = field(default_factory=list)
    committed: int = 0
    # Effects until the crash.
    fuel: int = 1_000_000

    def effect(self) -> None:
        if not self.fuel:
            raise Crash
        self.fuel -= 1


class _Batch(Batch[int]):
    """Records are numbers: offsets in the log."""

    def __init__(self, broker: Broker, log: list[events_pb2.Trajectory]) -> None:
        self._broker, self._log = broker, log
        self.tables = [WriteBack(table) for table in broker.tables]
        self._pipeline = Pipeline(CONFIG, groups=self.tables[0], normalisers=self.tables[1])

    def partition(self, event: int) -> int:
        return 0

    def apply(self, event: int) -> list[Emission]:
        return self._pipeline.on_trajectory(self._log[event], Origin(partition=0, offset=event))

    async def bury(self, event: int, error: Exception) -> None:
        raise error

    async def send(self, emission: Emission) -> asyncio.Future[object]:
        self._broker.effect()
        self._broker.emitted.append(emission[2].SerializeToString(deterministic=True))
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def write(self, table: int, changes: Mapping[bytes, Change]) -> None:
        for key, (_, value) in changes.items():
            self._broker.effect()
            assert value is not None
            self._broker.tables[table][key] = value

    async def acknowledge(self, event: int) -> None:
        self._broker.effect()
        self._broker.committed = event + 1


def _live(broker: Broker, log: list[events_pb2.Trajectory], size: int) -> None:
    """One life of the process."""

    async def life() -> None:
        batch = _Batch(broker, log)
        for start in range(broker.committed, len(log), size):
            await batch.work_through(range(start, min(len(log), start + size)))

    asyncio.run(life())


@settings(max_examples=150, deadline=None)
@given(
    order=st.permutations([(g, i) for g in range(3) for i in range(GROUP_SIZE)]),
    repeats=st.lists(st.integers(0, 11), max_size=4),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12),
    sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    crashes=st.lists(st.integers(0, 40), max_size=3),
)
def test_a_crash_at_any_effect_changes_nothing(
    order: list[tuple[int, int]],
    repeats: list[int],
    rewards: list[float],
    sizes: list[int],
    crashes: list[int],
) -> None:
    log = [
        trajectory(group, index, rewards[group * GROUP_SIZE + index])
        for group, index in [*order, *(order[r] for r in repeats)]
    ]
    calm, stormy = Broker(), Broker()
    _live(calm, log, len(log))
    for crash, size in zip(crashes, sizes, strict=False):
        stormy.fuel = crash
        with contextlib.suppress(Crash):
            _live(stormy, log, size)
    stormy.fuel = 1_000_000
    _live(stormy, log, sizes[-1])
    # Repeats are the same bytes, so that readers see what an undisturbed run emits.
    assert list(dict.fromkeys(stormy.emitted)) == list(dict.fromkeys(calm.emitted))
    assert stormy.tables == calm.tables


@settings(max_examples=100, deadline=None)
@given(
    base=st.dictionaries(st.sampled_from([b"a", b"b", b"c"]), st.binary(min_size=1, max_size=2)),
    steps=st.lists(
        st.tuples(
            st.sampled_from([b"a", b"b", b"c", b"d"]),
            st.one_of(st.none(), st.binary(min_size=1, max_size=2)),
            st.booleans(),
        )
    ),
)
def test_a_write_back_reads_like_the_table_it_will_make(
    base: dict[bytes, bytes], steps: list[tuple[bytes, bytes | None, bool]]
) -> None:
    table, model = WriteBack(base), dict(base)
    for key, value, succeeds in steps:
        trial = dict(model)
        if value is None:
            assert table.pop(key, None) == trial.pop(key, None)
        else:
            table[key] = trial[key] = value
        assert dict(table) == trial
        if succeeds:
            table.accept()
            model = trial
        else:
            table.rollback()
        assert dict(table) == model
    for key, (_, value) in table.take().items():
        if value is None:
            base.pop(key, None)
        else:
            base[key] = value
    assert base == model


def test_changes_know_the_partition_of_their_record() -> None:
    table = WriteBack({})
    for partition, key in ((3, b"a"), (1, b"b")):
        table.partition = partition
        table[key] = b"1"
        table.accept()
    with pytest.raises(KeyError):
        del table[b"z"]
    assert table.take() == {b"a": (3, b"1"), b"b": (1, b"1")}
