"""What goes wrong under a worker: nothing is written off that can be done again, nothing is done for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from environments.demo_arithmetic import DemoArithmetic
from rollouts.agent import Rollout
from rollouts.engines.base import EngineBrokenError
from rollouts.main import Rollouts
from rollstream import ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.errors import SandboxLostError
from rollstream.topics import ALL, DEAD_LETTERS, POLICY_VERSIONS, TASKS_SHORT, TRAJECTORIES
from rollstream.v1 import events_pb2
from sandboxes.main import Sandboxes
from tests.conftest import MakeConfig
from tests.integration.rollouts.scripts import Switch
from tests.integration.rollouts.test_worker import publish, settings, tasks, worker
from tests.services import read, running, send
from tests.waiting import until
from trainer.records import version_event

SCRIPTS = 'rollouts.engine.script="tests.integration.rollouts.scripts:{}"'


@pytest.fixture(autouse=True)
def switch() -> Iterator[None]:
    Switch.broken, Switch.deadly = False, ""
    Switch.open = asyncio.Event()
    yield
    Switch.open.set()


async def count(config: Config) -> int:
    return sum((await KafkaBus(config).end_offsets(TRAJECTORIES)).values())


async def test_a_broken_engine_ends_the_worker_and_the_next_one_does_its_tasks(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings(), SCRIPTS.format("breaking"))
    await KafkaBus(config).ensure_topics(ALL)
    offered = tasks(config, 3)
    async with running(Sandboxes, config):
        Switch.broken = True
        with pytest.raises(EngineBrokenError):
            async with running(Rollouts, config) as service:
                await publish(config)
                await send(config, TASKS_SHORT, [(t.task_id, t) for t in offered])
                await until(service.context.stopping.is_set)
        # Nothing was written off.
        assert await count(config) == 0
        Switch.broken = False
        async with running(Rollouts, config):
            found = [t for _, t in await read(config, TRAJECTORIES, 9)]
    assert {t.task_id for t in found} == {t.task_id for t in offered}
    assert all(t.outcome.status == events_pb2.OUTCOME_STATUS_COMPLETED for t in found)


async def test_what_the_drain_time_does_not_allow_comes_again(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings(), SCRIPTS.format("waiting"), "rollouts.drain_s=0.5")
    await KafkaBus(config).ensure_topics(ALL)
    (task,) = tasks(config, 1)
    async with running(Sandboxes, config):
        async with running(Rollouts, config) as service:
            await publish(config)
            await send(config, TASKS_SHORT, [(task.task_id, task)])
            await until(lambda: service.stats().get("running_requests") == 3)
        assert await count(config) == 0
        Switch.open.set()
        async with running(Rollouts, config):
            found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    assert {t.sample_index for t in found} == {0, 1, 2}


async def test_a_drain_finishes_what_has_begun_and_waits_for_no_version(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings(), SCRIPTS.format("waiting"), "rollouts.drain_s=30")
    await KafkaBus(config).ensure_topics(ALL)
    begun, held = tasks(config, 2)
    held.min_policy_version = 99
    async with running(Sandboxes, config):
        async with running(Rollouts, config) as service:
            await publish(config)
            await send(config, TASKS_SHORT, [(t.task_id, t) for t in (begun, held)])
            await until(lambda: service.stats()["tasks_in_flight"] == 2)
            await until(lambda: service.stats().get("running_requests") == 3)
            service.context.stopping.set()
            Switch.open.set()
        assert await count(config) == 3
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    assert {t.task_id for t in found} == {begun.task_id}


async def test_a_lost_sandbox_is_a_second_attempt_of_that_rollout_alone(
    kafka: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(kafka, *settings())
    real, calls = DemoArithmetic.call_tool, iter(range(1000))

    async def losing(self, session, call, *, timeout_s):  # type: ignore[no-untyped-def]
        if next(calls) == 0:
            raise SandboxLostError("out of memory")
        return await real(self, session, call, timeout_s=timeout_s)

    monkeypatch.setattr(DemoArithmetic, "call_tool", losing)
    async with worker(config) as service:
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in tasks(config, 1)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
        assert service.stats()["rollouts_retried"] == 1
    assert sorted(t.attempt for t in found) == [0, 0, 1]
    assert all(t.outcome.status == events_pb2.OUTCOME_STATUS_COMPLETED for t in found)


async def test_a_rollout_that_crashes_is_recorded_and_its_siblings_go_on(
    kafka: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(kafka, *settings())
    real, runs = Rollout.run, iter(range(1000))

    async def crashing(self):  # type: ignore[no-untyped-def]
        if next(runs) == 0:
            raise KeyError("a bug")
        return await real(self)

    monkeypatch.setattr(Rollout, "run", crashing)
    async with worker(config):
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in tasks(config, 1)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    statuses = sorted(t.outcome.status for t in found)
    assert statuses == [
        *[events_pb2.OUTCOME_STATUS_COMPLETED] * 2,
        events_pb2.OUTCOME_STATUS_FAILED,
    ]
    (failed,) = [t for t in found if t.outcome.status == events_pb2.OUTCOME_STATUS_FAILED]
    assert (failed.outcome.reason, failed.attempt) == ("internal", 0)
    assert failed.evidence.validity == events_pb2.VALIDITY_INVALID


async def test_a_prompt_that_fits_no_window_is_recorded_with_the_remedy(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings())
    (long,) = tasks(config, 1)
    long.prompt[0].content[0].text = "1" * 500
    async with worker(config):
        await publish(config)
        await send(config, TASKS_SHORT, [(long.task_id, long)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    for trajectory in found:
        assert (trajectory.outcome.reason, trajectory.attempt) == ("contract", 0)
        assert "raise policy.max_length" in trajectory.outcome.error
        assert trajectory.evidence.validity == events_pb2.VALIDITY_INVALID


async def test_a_version_that_arrives_damaged_is_taken_when_it_is_whole(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings())
    async with worker(config) as service:
        await publish(config)
        await until(lambda: service.stats()["policy_version"] == 0)
        folder = config.run.dir / "policy-1"
        hidden = folder.with_name("hidden")
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(b"{}")
        event = version_event(
            config, folder, version=1, step=1, stage="", baseline=False, final=True
        )
        folder.rename(hidden)
        await send(config, POLICY_VERSIONS, [(config.policy.name, event)])
        await until(lambda: service.stats()["policy_failures"] >= 1)
        assert service.stats()["policy_version"] == 0
        hidden.rename(folder)
        await until(lambda: service.stats()["policy_version"] == 1)


async def test_a_task_that_ends_every_worker_is_done_alone_and_then_quarantined(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings(), SCRIPTS.format("deadly"), "bus.partitions=1")
    await KafkaBus(config).ensure_topics(ALL)
    offered = tasks(config, 5)
    poison = offered[2]
    Switch.deadly = ids.rollout_id(poison.task_id, 1)
    lives = 0
    async with running(Sandboxes, config):
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in offered])

        async def settled(service: Rollouts) -> bool:
            done = (await KafkaBus(config).end_offsets(DEAD_LETTERS))[0]
            return service.context.stopping.is_set() or bool(done)

        while not (await KafkaBus(config).end_offsets(DEAD_LETTERS))[0]:
            lives += 1
            with contextlib.suppress(EngineBrokenError):
                async with running(Rollouts, config) as service:
                    await until(lambda s=service: settled(s), seconds=60)  # type: ignore[misc]
        innocent = {t.task_id for t in offered} - {poison.task_id}
        async with running(Rollouts, config):
            await until(lambda: complete(config, innocent), seconds=60)
    # Two with the others, two alone, and the one that gave it up.
    assert lives == config.rollouts.max_deliveries + 3
    ((_, letter),) = await read(config, DEAD_LETTERS, 1)
    assert (letter.task_id, letter.samples) == (poison.task_id, 3)
    assert "ended 2 workers that had nothing else to do" in letter.error


async def complete(config: Config, task_ids: set[str]) -> bool:
    """Whether all three samples of each task are there."""
    found = [t for _, t in await read(config, TRAJECTORIES, 1)]
    return all(len({t.rollout_id for t in found if t.task_id == i}) == 3 for i in task_ids)
