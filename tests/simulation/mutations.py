"""Bugs planted on purpose, to prove that the simulation would find them.

Each is a change of one decision in the services' code, as a context manager, with what the simulation must say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from processors import grouping
from processors.pipeline import Pipeline
from rollouts.main import Rollouts
from rollstream.bus.marks import Marks
from rollstream.bus.watermark import Watermark
from trainer.buffer import GroupBuffer
from trainer.checkpoint import CheckpointStore
from trajectories.writer import ChunkWriter

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """``finds``: a part of what is said of it."""

    name: str
    plant: Plant
    finds: str


def _commit_before_delivery() -> AbstractContextManager[object]:
    work = Rollouts._work

    async def early(self: Any, record: Any, consumer: Any, producer: Any, sandboxes: Any) -> None:
        consumer.done(record)
        await work(self, record, consumer, producer, sandboxes)

    return mock.patch.object(Rollouts, "_work", early)


def _watermark_skips() -> AbstractContextManager[object]:
    def done(self: Any, offset: int) -> None:
        self._position = max(self._position, offset + 1)

    return mock.patch.object(Watermark, "done", done)


@contextmanager
def _groups_take_repeats() -> Iterator[None]:
    never = mock.Mock(return_value=False)
    with mock.patch.object(grouping, "is_known", never):
        yield


def _tables_not_read_back() -> AbstractContextManager[object]:
    def recover(self: Any, groups: Any) -> None:
        groups.clear()

    return mock.patch.object(Pipeline, "recover", recover)


def _checkpoint(change: Callable[[Any, list[Any]], tuple[Any, list[Any]]]) -> Plant:
    save = CheckpointStore.save

    def changed(self: Any, state: Any, groups: Any, *rest: Any) -> Any:
        return save(self, *change(state, groups), *rest)

    return lambda: mock.patch.object(CheckpointStore, "save", changed)


def _stale_is_trained() -> AbstractContextManager[object]:
    return mock.patch.object(GroupBuffer, "expire", lambda self, **_: [])


def _no_token() -> AbstractContextManager[object]:
    put = ChunkWriter._put
    return mock.patch.object(
        ChunkWriter, "_put", lambda self, table, rows, token: put(self, table, rows, "")
    )


def _attempts_stay() -> AbstractContextManager[object]:
    fetched = Marks.fetched

    def first(self: Any, partition: Any, offset: int) -> int:
        fetched(self, partition, offset)
        return 0

    return mock.patch.object(Marks, "fetched", first)


ALL: tuple[Mutation, ...] = (
    Mutation(name="commit_before_delivery", plant=_commit_before_delivery, finds="not on the log"),
    Mutation(name="watermark_skips", plant=_watermark_skips, finds="not on the log"),
    Mutation(name="attempts_stay", plant=_attempts_stay, finds="two trajectories of attempt"),
    Mutation(name="groups_take_repeats", plant=_groups_take_repeats, finds="in flight"),
    Mutation(name="tables_not_read_back", plant=_tables_not_read_back, finds="in flight"),
    Mutation(
        name="checkpoint_without_buffer", plant=_checkpoint(lambda s, g: (s, [])), finds="in flight"
    ),
    Mutation(
        name="checkpoint_without_offsets_and_ids",
        plant=_checkpoint(lambda s, g: (replace(s, positions={}, finished=[]), g)),
        finds="two lineages",
    ),
    Mutation(name="stale_is_trained", plant=_stale_is_trained, finds="stale"),
    Mutation(name="sink_without_token", plant=_no_token, finds="stored twice"),
)

MUTATIONS = {mutation.name: mutation for mutation in ALL}
