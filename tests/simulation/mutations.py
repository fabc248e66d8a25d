"""Bugs planted on purpose, to prove that the simulation would find them.

Each is a change of one decision in the services' code, as a context manager, with what the simulation must say.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from google.protobuf.message import DecodeError

import producers.main
import rollouts.main
from processors import grouping
from processors.batch import Batch
from processors.normaliser import RunningNormaliser
from processors.pipeline import Pipeline
from producers.history import History
from producers.main import pace
from producers.pacing import Progress
from rollouts.main import Rollouts
from rollstream.bus.deadletters import dead_letter
from rollstream.bus.kafka import settle
from rollstream.bus.marks import Marks
from rollstream.bus.watermark import Watermark
from rollstream.v1 import events_pb2
from trainer import buffer
from trainer.buffer import GroupBuffer, live_samples
from trainer.checkpoint import CheckpointStore
from trainer.main import Trainer
from trainer.session import TrainerSession
from trajectories.chunks import Chunk, ChunkBuilder
from trajectories.writer import ChunkWriter

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """``finds``: a part of what is said of it; ``first``: the seed to look from, for the rare."""

    name: str
    plant: Plant
    finds: str
    first: int = 0


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


def _events_are_not_saved() -> AbstractContextManager[object]:
    save = CheckpointStore.save

    def changed(self: Any, state: Any, *rest: Any) -> Any:
        return replace(save(self, replace(state, events=[]), *rest), state=state)

    return mock.patch.object(CheckpointStore, "save", changed)


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


# -- rollouts


def _watermark_one_too_far() -> AbstractContextManager[object]:
    """The record that is being worked on counts as done."""
    done = Watermark.done

    def further(self: Any, offset: int) -> None:
        done(self, offset)
        self._position = min(self._position + 1, self._next)

    return mock.patch.object(Watermark, "done", further)


def _marks_outlive_the_partition() -> AbstractContextManager[object]:
    return mock.patch.object(Marks, "forget", lambda self, partitions: None)


def _failures_are_not_told() -> AbstractContextManager[object]:
    send = Rollouts._send

    async def silent(self: Any, producer: Any, work: Any) -> None:
        trajectory = await work
        if trajectory.outcome.status != events_pb2.OUTCOME_STATUS_FAILED:
            await send(self, producer, _done(trajectory))

    return mock.patch.object(Rollouts, "_send", silent)


async def _done(value: Any) -> Any:
    return value


def _damaged_task_is_believed() -> AbstractContextManager[object]:
    """What is given up is named by bytes that are known to be wrong."""

    def believing(record: Any, error: Any, **known: Any) -> Any:
        with contextlib.suppress(DecodeError):
            known["task_id"] = events_pb2.Task.FromString(record.value).task_id
        return dead_letter(record, error, **known)

    return mock.patch.object(rollouts.main, "dead_letter", believing)


# -- processors


def _work_through(order: str) -> Plant:
    """A batch whose effects have another order: ``e`` events, ``t`` tables, ``a`` acknowledgements."""

    async def work_through(self: Any, events: Any) -> None:
        emissions = [emission for event in events for emission in await self.handle(event)]
        for effect in order:
            if effect == "e":
                await settle([await self.send(emission) for emission in emissions])
            elif effect == "t":
                for number, table in enumerate(self.tables):
                    await self.write(number, table.take())
            else:
                for event in events:
                    await self.acknowledge(event)

    return lambda: mock.patch.object(Batch, "work_through", work_through)


def _close(change: Callable[[Any], None]) -> Plant:
    close = grouping._close

    def changed(*arguments: Any) -> Any:
        group = close(*arguments)
        change(group)
        return group

    return lambda: mock.patch.object(grouping, "_close", changed)


def _forget_missing(group: Any) -> None:
    kept = [sample for sample in group.samples if sample.drop_reason != "missing"]
    del group.samples[:]
    group.samples.extend(kept)


def _closed_is_forgotten() -> AbstractContextManager[object]:
    """Who comes late opens the group again."""
    keep = Pipeline._keep

    def forgetful(self: Any, key: bytes, state: Any, partition: int) -> None:
        self._closed_limit = 0
        keep(self, key, state, partition)

    return mock.patch.object(Pipeline, "_keep", forgetful)


def _statistic_takes_repeats() -> AbstractContextManager[object]:
    absorb = RunningNormaliser.absorb

    def again(self: Any, value: float, *, offset: int, decay: float) -> Any:
        return absorb(replace(self, absorbed=-1), value, offset=offset, decay=decay)

    return mock.patch.object(RunningNormaliser, "absorb", again)


def _statistic_first() -> AbstractContextManager[object]:
    """Groups are written after statistics; the rest of the order is right."""
    write = Batch.work_through

    async def swapped(self: Any, events: Any) -> None:
        one = self.write
        held: list[Any] = []

        async def later(table: int, changes: Any) -> None:
            held.append((table, changes))
            if table == 1:
                for each in reversed(held):
                    await one(*each)

        self.write = later
        await write(self, events)

    return mock.patch.object(Batch, "work_through", swapped)


# -- trainer


def _told_before_saved() -> AbstractContextManager[object]:
    """A checkpoint counts only after what it makes true was told; until then ``unsaved`` lies in it."""
    save, complete, emit = CheckpointStore.save, CheckpointStore._complete, Trainer._emit

    def unsaved(self: Any, state: Any, *rest: Any) -> Any:
        if (self.path(state.number) / "unsaved").exists():
            shutil.rmtree(self.path(state.number))
        checkpoint = save(self, state, *rest)
        (checkpoint.folder / "unsaved").touch()
        return checkpoint

    async def told(self: Any, producer: Any, checkpoint: Any) -> None:
        await emit(self, producer, checkpoint)
        (checkpoint.folder / "unsaved").unlink(missing_ok=True)

    def saved(self: Any) -> Any:
        return [folder for folder in complete(self) if not (folder / "unsaved").exists()]

    return _all(
        mock.patch.object(CheckpointStore, "save", unsaved),
        mock.patch.object(CheckpointStore, "_complete", saved),
        mock.patch.object(Trainer, "_emit", told),
    )


@contextmanager
def _all(*plants: AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield


def _no_random_state() -> AbstractContextManager[object]:
    """It is made afresh from the run's seed at each start."""
    restore = TrainerSession._restore

    def afresh(self: Any, tensors: Any) -> None:
        restore(self, {**tensors, "rng": torch.get_rng_state()})

    return mock.patch.object(TrainerSession, "_restore", afresh)


def _age_of_the_newest() -> AbstractContextManager[object]:
    def newest(group: Any, version: int) -> int:
        return min((version - s.policy_version_max for s in live_samples(group)), default=0)

    return mock.patch.object(buffer, "staleness", newest)


def _bound_one_too_wide() -> AbstractContextManager[object]:
    expire = GroupBuffer.expire

    def wider(self: Any, *, version: int, max_staleness: int) -> Any:
        return expire(self, version=version, max_staleness=max_staleness + 1)

    return mock.patch.object(GroupBuffer, "expire", wider)


def _finished_is_forgotten() -> AbstractContextManager[object]:
    """The window is shorter than what comes again."""
    finish = GroupBuffer._finish

    def short(self: Any, group_id: str) -> None:
        self.window = 1
        finish(self, group_id)

    return mock.patch.object(GroupBuffer, "_finish", short)


def _reads_on_one_too_far() -> AbstractContextManager[object]:
    restore = GroupBuffer.restore

    def further(self: Any, *, positions: Any, **rest: Any) -> None:
        restore(self, positions={p: at + 1 for p, at in positions.items()}, **rest)

    return mock.patch.object(GroupBuffer, "restore", further)


def _refused_before_saved() -> AbstractContextManager[object]:
    """A refusal is told at a version that no checkpoint holds."""
    refuse = Trainer._refuse

    async def early(self: Any, session: Any, producer: Any, refusals: Any) -> None:
        with mock.patch.object(self, "_save", mock.AsyncMock()):
            await refuse(self, session, producer, refusals)

    return mock.patch.object(Trainer, "_refuse", early)


# -- sink


def _line_before_rows() -> AbstractContextManager[object]:
    def write(self: Any, chunk: Any, converted: Any) -> None:
        token = chunk.token(self.log)
        count = len(chunk.records)
        broken = len(converted.broken)
        line = (self.log, chunk.topic, chunk.partition, chunk.first, chunk.last, count, broken)
        self._put("ingested", [line], token)
        for table, rows in converted.tables.items():
            self._put(table, rows, f"{token}:{table}")

    return mock.patch.object(ChunkWriter, "write", write)


def _seeks_one_too_far() -> AbstractContextManager[object]:
    stored = ChunkWriter.stored
    return mock.patch.object(
        ChunkWriter, "stored", lambda self: {at: last + 1 for at, last in stored(self).items()}
    )


def _token_of_no_partition() -> AbstractContextManager[object]:
    def token(self: Any, log: str) -> str:
        return f"{log}:{self.topic}:{self.first}-{self.last}"

    return mock.patch.object(Chunk, "token", token)


def _chunk_without_its_last() -> AbstractContextManager[object]:
    """The record that makes a chunk complete closes it before it is in."""
    add = ChunkBuilder.add

    def lossy(self: Any, record: Any) -> Any:
        return self.flush() if (record.offset + 1) % self.size == 0 else add(self, record)

    return mock.patch.object(ChunkBuilder, "add", lossy)


# -- producers


def _goes_on_after_the_last() -> AbstractContextManager[object]:
    """What of the last batch did not arrive is passed over."""

    def after(self: Any, source: str) -> tuple[int, int]:
        last = self._last.get(source)
        epoch, index = max(last) if last else (0, -1)
        return epoch, index + 1

    return mock.patch.object(History, "resume_at", after)


def _other_ids_after_a_restart() -> AbstractContextManager[object]:
    """A second life begins an epoch of its own."""

    def other(self: Any, source: str) -> tuple[int, int]:
        return (1, 0) if self._last.get(source) else (0, 0)

    return mock.patch.object(History, "resume_at", other)


def _one_step_too_many() -> AbstractContextManager[object]:
    def wider(config: Any) -> Any:
        found = pace(config)
        return replace(found, usable=found.usable + config.rl.groups_per_step)

    return mock.patch.object(producers.main, "pace", wider)


def _letters_make_no_room() -> AbstractContextManager[object]:
    return mock.patch.object(Progress, "on_dead_letter", lambda self, letter: None)


FOUND: tuple[Mutation, ...] = (
    Mutation(name="commit_before_delivery", plant=_commit_before_delivery, finds="not on the log"),
    Mutation(name="watermark_skips", plant=_watermark_skips, finds="not on the log"),
    Mutation(name="watermark_one_too_far", plant=_watermark_one_too_far, finds="not on the log"),
    Mutation(
        name="marks_outlive_the_partition", plant=_marks_outlive_the_partition, finds="attempt"
    ),
    Mutation(name="failures_are_not_told", plant=_failures_are_not_told, finds="not on the log"),
    Mutation(name="attempts_stay", plant=_attempts_stay, finds="two trajectories of attempt"),
    Mutation(
        name="damaged_task_is_believed", plant=_damaged_task_is_believed, finds="no final version"
    ),
    Mutation(name="tables_before_events", plant=_work_through("tea"), finds="no final version"),
    Mutation(name="groups_take_repeats", plant=_groups_take_repeats, finds="in flight"),
    Mutation(name="tables_not_read_back", plant=_tables_not_read_back, finds="in flight"),
    Mutation(name="missing_is_forgotten", plant=_close(_forget_missing), finds="not listed"),
    Mutation(name="closed_is_forgotten", plant=_closed_is_forgotten, finds="told twice"),
    Mutation(name="statistic_takes_repeats", plant=_statistic_takes_repeats, finds="statistic"),
    Mutation(
        name="checkpoint_without_buffer",
        plant=_checkpoint(lambda s, g: (s, [])),
        finds="in flight",
        first=200,
    ),
    Mutation(
        name="checkpoint_without_offsets_and_ids",
        plant=_checkpoint(lambda s, g: (replace(s, positions={}, finished=[]), g)),
        finds="two lineages",
    ),
    Mutation(
        name="checkpoint_without_events",
        plant=_events_are_not_saved,
        finds="in flight",
        first=400,
    ),
    Mutation(name="no_random_state", plant=_no_random_state, finds="uninterrupted"),
    Mutation(name="stale_is_trained", plant=_stale_is_trained, finds="stale"),
    Mutation(name="age_of_the_newest", plant=_age_of_the_newest, finds="stale"),
    Mutation(name="bound_one_too_wide", plant=_bound_one_too_wide, finds="stale"),
    Mutation(
        name="finished_is_forgotten", plant=_finished_is_forgotten, finds="two lineages", first=100
    ),
    Mutation(name="reads_on_one_too_far", plant=_reads_on_one_too_far, finds="in flight"),
    Mutation(name="sink_without_token", plant=_no_token, finds="stored twice"),
    Mutation(name="line_before_rows", plant=_line_before_rows, finds="not in the store"),
    Mutation(name="seeks_one_too_far", plant=_seeks_one_too_far, finds="never stored"),
    Mutation(name="token_of_no_partition", plant=_token_of_no_partition, finds="stored"),
    Mutation(name="chunk_without_its_last", plant=_chunk_without_its_last, finds="is stored up to"),
    Mutation(
        name="other_ids_after_a_restart", plant=_other_ids_after_a_restart, finds="passed over"
    ),
    Mutation(name="one_step_too_many", plant=_one_step_too_many, finds="are usable"),
    Mutation(name="letters_make_no_room", plant=_letters_make_no_room, finds="no final version"),
)
# Not found in 60 seeds (docs/design/simulation.md says what nets them, or that nothing is known to).
UNSEEN: tuple[Mutation, ...] = (
    Mutation(
        name="acknowledged_before_delivery", plant=_work_through("aet"), finds="no final version"
    ),
    Mutation(name="statistic_first", plant=_statistic_first, finds="statistic"),
    Mutation(name="told_before_saved", plant=_told_before_saved, finds="told twice"),
    Mutation(name="refused_before_saved", plant=_refused_before_saved, finds="dropped by the"),
    Mutation(name="goes_on_after_the_last", plant=_goes_on_after_the_last, finds="passed over"),
)

MUTATIONS = {mutation.name: mutation for mutation in FOUND + UNSEEN}
