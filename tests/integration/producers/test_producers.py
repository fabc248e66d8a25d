"""The producers on a real Kafka: paced, resumed, and a bad line loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

from producers.main import Producers
from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.topics import ALL, DEAD_LETTERS, EVALUATIONS, POLICY_VERSIONS, REPLAY, TASKS_SHORT
from rollstream.v1 import events_pb2, policy_pb2
from tests.conftest import MakeConfig
from tests.services import read, running, send
from tests.waiting import until

RL = 'trainer.stages=[{kind="rl", groups_per_step=3, max_staleness=1}]'
DEMO = 'domains=[{name="d", environment="demo-arithmetic", group_size=4}]'


def closed(task: events_pb2.Task, *, drop: str = "") -> tuple[str, events_pb2.TrainingGroup]:
    group = events_pb2.TrainingGroup(
        header=codecs.header("run", ids.event_id("G", task.group_id)),
        group_id=task.group_id,
        drop_reason=drop,
        samples=[events_pb2.TrainingSample(rollout_id="r")],
    )
    return group.group_id, group


async def test_tasks_are_paced_by_what_is_used_and_end_with_the_final_version(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, RL, DEMO)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Producers, config) as service:
        # (max_staleness + 1) * groups_per_step.
        tasks = [t for _, t in await read(config, TASKS_SHORT, 6)]
        await until(lambda: service.stats()["paused"] == 1.0)
        assert service.stats()["tasks_produced"] == 6
        await send(config, REPLAY, [closed(tasks[0], drop="zero_variance"), closed(tasks[1])])
        await until(lambda: service.stats()["tasks_produced"] == 7)
        final = policy_pb2.PolicyVersion(
            header=codecs.header("run", "v"), policy="policy", version=1, final=True
        )
        await send(config, POLICY_VERSIONS, [("policy", final)])
        await until(lambda: service.stats()["allowed"] == 0)
        await send(config, REPLAY, [closed(t, drop="zero_variance") for t in tasks])
        await until(lambda: service.stats()["groups_in_flight"] == 1)
        assert service.stats()["tasks_produced"] == 7
    assert len({t.task_id for t in tasks}) == 6


async def test_a_restart_goes_on_where_it_was(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, RL, DEMO)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Producers, config):
        first = [t for _, t in await read(config, TASKS_SHORT, 6)]
    await send(config, REPLAY, [closed(t, drop="zero_variance") for t in first])
    async with running(Producers, config):
        whole = [t for _, t in await read(config, TASKS_SHORT, 12)]
    assert len({t.task_id for t in whole}) == len(whole) == 12
    assert sorted(t.index for t in whole) == list(range(12))


async def test_the_baseline_is_waited_for(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, RL, DEMO, "producers.wait_for_baseline=true")
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Producers, config) as service:
        assert service.stats()["paused"] == 1.0
        total = events_pb2.EvaluationResult(header=codecs.header("run", "e"), baseline=True)
        await send(config, EVALUATIONS, [("suite", total)])
        await read(config, TASKS_SHORT, 6)


async def test_a_malformed_line_is_a_dead_letter_and_the_others_are_tasks(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"say {i}", "answer": i}) for i in range(4)]
    lines.insert(2, '{"prompt": "broken"')
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.jsonl").write_text(lines[0])
    domain = (
        'domains=[{name="j", environment="jsonl", group_size=2, options='
        f'{{path="{tmp_path}/tasks.jsonl", held_out="{tmp_path}/held.jsonl"}}}}]'
    )
    config = make_config(kafka, RL, domain, "producers.max_tasks=4")
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Producers, config):
        tasks = [t for _, t in await read(config, TASKS_SHORT, 4)]
        ((_, letter),) = await read(config, DEAD_LETTERS, 1)
    assert {t.prompt[0].content[0].text for t in tasks} == {f"say {i}" for i in range(4)}
    assert letter.value == b'{"prompt": "broken"\n'
    assert letter.offset == 3
    assert "tasks.jsonl, line 3" in letter.error
    assert "prompt or messages" in letter.hint
