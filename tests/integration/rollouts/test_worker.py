"""The worker on a real Kafka and a real sandbox: tasks in, trajectories out, nothing lost on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from environments.demo_arithmetic import DemoArithmetic
from environments.registry import make
from environments.tasks import TaskOrigin, topic_of, training_task
from rollouts.main import Rollouts
from rollstream import codecs
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.errors import InfraError
from rollstream.net import free_port
from rollstream.topics import ALL, DEAD_LETTERS, POLICY_VERSIONS, TASKS_SHORT, TRAJECTORIES
from rollstream.v1 import events_pb2
from sandboxes.client import SandboxClient
from sandboxes.main import Sandboxes
from tests.conftest import MakeConfig
from tests.services import read, running, send, send_bytes
from trainer.records import version_event

SCRIPTED = (
    'domains=[{name="d", environment="demo-arithmetic", group_size=3}]',
    'rollouts.engine.kind="scripted"',
    'rollouts.engine.script="bench.scripts:two_calls"',
    "policy.max_length=160",
    "sandboxes.pool={python=2}",
)


def settings() -> tuple[str, ...]:
    port = free_port()
    return (*SCRIPTED, f"sandboxes.port={port}", f'rollouts.sandbox_targets=["127.0.0.1:{port}"]')


def tasks(config: Config, count: int) -> list[events_pb2.Task]:
    domain = config.domains[0]
    environment = make(domain)
    specs = environment.tasks(seed=0, split="train")
    return [
        training_task(
            environment,
            domain,
            next(specs),  # type: ignore[arg-type]
            TaskOrigin(run_id=config.run.id, source="test", index=index),
        )
        for index in range(count)
    ]


async def publish(config: Config, version: int = 0) -> None:
    """A version that holds a chat format and no weights: the scripted engine needs none."""
    folder = Path(config.run.dir, f"policy-{version}")
    folder.mkdir(parents=True)
    for name, data in DemoArithmetic().tokenizer().items():
        (folder / name).write_bytes(data)
    event = version_event(
        config, folder, version=version, step=0, stage="", baseline=not version, final=False
    )
    await send(config, POLICY_VERSIONS, [(config.policy.name, event)])


@asynccontextmanager
async def worker(config: Config) -> AsyncIterator[Rollouts]:
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Sandboxes, config), running(Rollouts, config) as service:
        yield service


async def test_tasks_become_trajectories(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, *settings())
    async with worker(config):
        offered = tasks(config, 4)
        await send(config, topic_of(config.domains[0]), [(t.task_id, t) for t in offered])
        await publish(config)
        found = [t for _, t in await read(config, TRAJECTORIES, 12)]
    assert len({t.rollout_id for t in found}) == 12
    one = found[0]
    # Two sandboxed calls and an answer; the arithmetic was done in the sandbox.
    assert [r.content for turn in one.turns for r in turn.tool_results] == ["296", "281"]
    assert one.outcome.status == events_pb2.OUTCOME_STATUS_COMPLETED
    sequence = one.sequences[0]
    spoken = sum(turn.sampled.length for turn in one.turns)
    assert codecs.sampled_mask(sequence).sum() == spoken == one.sampled_tokens
    assert one.evidence.validity == events_pb2.VALIDITY_VALID
    values = {item.name: item.value for item in one.evidence.items}
    assert values["tool_successes"] == 2.0


async def test_bad_tasks_are_dead_letters_that_name_the_remedy(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *settings())
    async with worker(config):
        await publish(config)
        good, strange = tasks(config, 2)
        strange.domain = "nowhere"
        await send_bytes(config, TASKS_SHORT, "k", b"\xff\xff")
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in (strange, good)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
        letters = [d for _, d in await read(config, DEAD_LETTERS, 2)]
    assert {t.task_id for t in found} == {good.task_id}
    by_task = {letter.task_id: letter for letter in letters}
    # Its bytes name no task, so it is written off by its key.
    assert "not a Task" in by_task["k"].error
    assert "unknown domain 'nowhere'" in by_task[strange.task_id].error
    assert by_task[strange.task_id].hint == "known: d"
    # The books can write off its three samples.
    assert by_task[strange.task_id].samples == 3


async def test_a_tool_that_crashes_spoils_only_its_own_rollout(
    kafka: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(kafka, *settings())
    real, calls = DemoArithmetic.call_tool, iter(range(1000))

    async def crashing(self, session, call, *, timeout_s):  # type: ignore[no-untyped-def]
        if next(calls) == 0:
            raise ZeroDivisionError("the tool is broken")
        return await real(self, session, call, timeout_s=timeout_s)

    monkeypatch.setattr(DemoArithmetic, "call_tool", crashing)
    async with worker(config):
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in tasks(config, 1)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    failed = [t for t in found if t.outcome.status == events_pb2.OUTCOME_STATUS_FAILED]
    assert len(failed) == 1
    assert failed[0].outcome.reason == "tool_crashed"
    assert "the tool is broken" in failed[0].outcome.error
    assert failed[0].evidence.validity == events_pb2.VALIDITY_INVALID


async def test_evidence_that_is_not_a_number_is_invalid(
    kafka: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(kafka, *settings())

    async def verify(self, session, verifier, turns):  # type: ignore[no-untyped-def]
        return events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID,
            items=[events_pb2.EvidenceItem(name="correct", value=float("nan"))],
        )

    monkeypatch.setattr(DemoArithmetic, "verify", verify)
    async with worker(config):
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in tasks(config, 1)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    assert {t.evidence.invalid_reason for t in found} == {
        "evidence is not a finite number: correct"
    }


async def test_without_an_executor_rollouts_are_recorded_as_not_done(
    kafka: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"127.0.0.1:{free_port()}"
    config = make_config(
        kafka, *SCRIPTED, f'rollouts.sandbox_targets=["{target}"]', "rollouts.max_attempts=2"
    )
    await KafkaBus(config).ensure_topics(ALL)
    initialise = SandboxClient.__init__
    monkeypatch.setattr(
        SandboxClient,
        "__init__",
        lambda self, targets, **more: initialise(self, targets, **{**more, "budget_s": 0.5}),
    )
    async with running(Rollouts, config):
        await publish(config)
        await send(config, TASKS_SHORT, [(t.task_id, t) for t in tasks(config, 1)])
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    for trajectory in found:
        assert trajectory.attempt == 1
        assert trajectory.evidence.validity == events_pb2.VALIDITY_INVALID
        assert target in trajectory.outcome.error
        assert "is the service sandboxes up" in trajectory.outcome.error


async def test_a_task_waits_for_its_policy_version(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, *settings())
    async with worker(config) as service:
        await publish(config, 0)
        (task,) = tasks(config, 1)
        task.min_policy_version = 2
        await send(config, TASKS_SHORT, [(task.task_id, task)])
        from tests.waiting import until

        await until(lambda: service.stats()["tasks_in_flight"] == 1)
        await until(lambda: service.stats()["policy_version"] == 0)
        assert service.stats()["rollouts_done"] == 0
        await publish(config, 2)
        found = [t for _, t in await read(config, TRAJECTORIES, 3)]
    assert {(t.policy_version_min, t.policy_version_max) for t in found} == {(2, 2)}


async def test_a_damaged_version_is_passed_over(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, *settings())
    async with worker(config) as service:
        await publish(config, 0)
        from tests.waiting import until

        await until(lambda: service.stats()["policy_version"] == 0)
        await publish(config, 1)
        folder = Path(config.run.dir, "policy-2")
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({}))
        event = version_event(
            config, folder, version=2, step=0, stage="", baseline=False, final=False
        )
        (folder / "tokenizer.json").write_text("damaged")
        await send(config, POLICY_VERSIONS, [(config.policy.name, event)])
        policy = service._policy
        assert policy is not None
        await until(lambda: policy.failures_total == 1)
        assert service.stats()["policy_version"] == 1


async def test_no_executor_is_named_by_the_client() -> None:
    target = f"127.0.0.1:{free_port()}"
    spec = events_pb2.SandboxSpec(toolchain="python")
    async with SandboxClient([target], budget_s=0.3) as client:
        with pytest.raises(
            InfraError, match=rf"no sandbox from {target}.*is the service sandboxes up"
        ):
            async with client.session(spec):
                raise AssertionError("there is none")
    await asyncio.sleep(0)
