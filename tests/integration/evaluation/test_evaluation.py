"""Evaluation on a real Kafka: suites of the baseline and the final version, resumed, and given up in time."""

from __future__ import annotations

from evaluation.main import Evaluation
from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.topics import ALL, EVALUATIONS, POLICY_VERSIONS, REWARDS, TASKS_SHORT
from rollstream.v1 import events_pb2, policy_pb2
from tests.conftest import MakeConfig
from tests.services import read, running, send

DOMAIN = 'domains=[{name="d", environment="demo-arithmetic"}]'
SUITE = ('evaluation.domains=["d"]', "evaluation.tasks=4")


async def publish(
    config: Config, version: int, *, baseline: bool = False, final: bool = False
) -> None:
    event = policy_pb2.PolicyVersion(
        header=codecs.header(config.run.id, ids.event_id("V", version)),
        policy="policy", version=version, baseline=baseline, final=final,
    )  # fmt: skip
    await send(config, POLICY_VERSIONS, [("policy", event)])


def scored(
    task: events_pb2.Task, raw: float, *, valid: bool = True
) -> tuple[str, events_pb2.ScoredTrajectory]:
    event = events_pb2.ScoredTrajectory(
        header=codecs.header(task.header.run_id, ids.event_id("S", task.task_id)),
        rollout_id=ids.rollout_id(task.task_id, 0),
        task_id=task.task_id,
        group_id=task.group_id,
        domain=task.domain,
        purpose=task.purpose,
        suite=task.suite,
        raw=raw,
        validity=events_pb2.VALIDITY_VALID if valid else events_pb2.VALIDITY_INVALID,
    )
    return task.group_id, event


async def test_baseline_and_final_are_evaluated(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, DOMAIN, *SUITE)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Evaluation, config):
        await publish(config, 0, baseline=True)
        tasks = [t for _, t in await read(config, TASKS_SHORT, 4)]
        assert all(
            t.purpose == events_pb2.PURPOSE_EVAL and t.sampling.temperature == 0 for t in tasks
        )
        rewards = [scored(t, 1.0 if i < 2 else 0.0, valid=i != 3) for i, t in enumerate(tasks)]
        await send(config, REWARDS, [*rewards, *rewards])
        results = [e for _, e in await read(config, EVALUATIONS, 5)]
        await publish(config, 3)
        await publish(config, 7, final=True)
        every = [t for _, t in await read(config, TASKS_SHORT, 8)]
        later = [t for t in every if t.task_id not in {known.task_id for known in tasks}]
    (total,) = [e for e in results if not e.task_id]
    # Two of three: the invalid one does not count.
    assert (total.score, total.tasks, total.baseline) == (2 / 3, 3, True)
    assert {t.min_policy_version for t in later} == {7}
    # The same held-out problems, under other ids.
    problems = [sorted(t.prompt[0].content[0].text for t in suite) for suite in (tasks, later)]
    assert problems[0] == problems[1]


async def test_an_interrupted_suite_is_done_again_and_finds_its_results(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, DOMAIN, *SUITE)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Evaluation, config):
        await publish(config, 0, baseline=True)
        tasks = [t for _, t in await read(config, TASKS_SHORT, 4)]
    await send(config, REWARDS, [scored(t, 1.0) for t in tasks])
    async with running(Evaluation, config):
        results = [e for _, e in await read(config, EVALUATIONS, 5)]
    assert [e.score for e in results if not e.task_id] == [1.0]
    async with running(Evaluation, config) as third:
        assert third.stats()["evaluations_done"] == 1
        assert third.stats()["outstanding"] == 0


async def test_what_does_not_come_is_invalid(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, DOMAIN, *SUITE, "evaluation.timeout_s=2")
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Evaluation, config):
        await publish(config, 0, baseline=True)
        tasks = [t for _, t in await read(config, TASKS_SHORT, 4)]
        await send(config, REWARDS, [scored(tasks[0], 1.0)])
        results = [e for _, e in await read(config, EVALUATIONS, 5)]
    (total,) = [e for e in results if not e.task_id]
    assert (total.score, total.tasks) == (1.0, 1)
    invalid = [e for e in results if e.validity == events_pb2.VALIDITY_INVALID]
    assert {e.invalid_reason for e in invalid} == {"no result within evaluation.timeout_s"}
    assert len(invalid) == 3
