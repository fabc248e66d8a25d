"""The producers on a real Kafka: paced, resumed without a gap, and undisturbed by what is malformed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf.message import Message

from environments.registry import make
from environments.tasks import TaskOrigin, topic_of, training_task
from producers.main import Producers
from rollstream import codecs
from rollstream.bus import Record
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.topics import (
    ALL,
    DEAD_LETTERS,
    EVALUATIONS,
    POLICY_VERSIONS,
    REPLAY,
    TASKS_LONG,
    TASKS_SHORT,
    TRAINING_STEPS,
    Topic,
)
from rollstream.v1 import events_pb2, policy_pb2
from tests.conftest import MakeConfig
from tests.services import read, running, send, send_bytes
from tests.waiting import until

# Six usable groups on their way at most: (1 + 1) * 3.
RL = 'trainer.stages=[{kind="rl", groups_per_step=3, max_staleness=1}]'
DEMO = 'domains=[{name="d", environment="demo-arithmetic", group_size=4}]'


async def prepared(config: Config) -> Config:
    await KafkaBus(config).ensure_topics(ALL)
    return config


async def produced(config: Config, count: int, topic: Topic = TASKS_SHORT) -> list[events_pb2.Task]:
    """The tasks of the topic when there are ``count``; in the order of their indices."""
    tasks = [task for _, task in await read(config, topic, count)]
    return sorted(tasks, key=lambda t: (t.domain, t.epoch, t.index))  # type: ignore[return-value]


def header(config: Config, name: str, run_id: str = "") -> events_pb2.Header:
    return codecs.header(run_id or config.run.id, name)


async def tell(config: Config, topic: Topic, *events: Message) -> None:
    await send(config, topic, [("k", event) for event in events])


def closed(config: Config, task: events_pb2.Task, reason: str = "") -> events_pb2.TrainingGroup:
    return events_pb2.TrainingGroup(
        header=header(config, f"closed-{task.task_id}"),
        group_id=task.group_id,
        samples=[events_pb2.TrainingSample(rollout_id="r")],
        drop_reason=reason,
    )


def used(config: Config, tasks: Sequence[events_pb2.Task]) -> events_pb2.TrainingStep:
    return events_pb2.TrainingStep(
        header=header(config, f"step-{tasks[0].task_id}"),
        samples=[events_pb2.SampleUse(group_id=t.group_id) for t in tasks],
    )


async def test_no_more_than_can_be_used_in_time(kafka: str, make_config: MakeConfig) -> None:
    config = await prepared(make_config(kafka, DEMO, RL))
    async with running(Producers, config) as service:
        await until(lambda: service.stats()["tasks_produced"] == 6)
        assert service.stats() == {
            "tasks_produced": 6,
            "groups_in_flight": 6,
            "allowed": 0,
            "domains_parked": 0,
            "paused": 1.0,
        }
        first = await produced(config, 6)
        # Closed makes no room, used and dropped do.
        await tell(config, REPLAY, closed(config, first[0]), closed(config, first[1], "few"))
        await tell(config, TRAINING_STEPS, used(config, first[2:4]))
        await until(lambda: service.stats()["tasks_produced"] == 9)
        # A task that a worker gave up makes room too: the run must not wait for it.
        letter = events_pb2.DeadLetter(
            header=header(config, "letter"), topic="t", task_id=first[4].task_id, samples=4
        )
        await tell(config, DEAD_LETTERS, letter)
        await until(lambda: service.stats()["tasks_produced"] == 10)
        # A group that nobody can read as well; its key says which.
        await send_bytes(config, REPLAY, first[5].group_id, b"\xff\xff")
        await until(lambda: service.stats()["tasks_produced"] == 11)
        final = policy_pb2.PolicyVersion(header=header(config, "v"), policy="p", final=True)
        await tell(config, POLICY_VERSIONS, final)
        await tell(config, TRAINING_STEPS, used(config, await produced(config, 11)))
        await until(lambda: not service._progress.usable)
        assert service.stats()["tasks_produced"] == 11
    tasks = await produced(config, 11)
    assert [t.index for t in tasks] == list(range(11))
    assert {t.group_size for t in tasks} == {4}


async def test_each_task_is_the_root_of_a_trace(kafka: str, make_config: MakeConfig) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    config = await prepared(make_config(kafka, DEMO, RL))
    async with running(Producers, config):
        records = [record for record, _ in await read(config, TASKS_SHORT, 6)]
    parents = {trace_parent(record) for record in records}
    assert len({parent.split("-")[1] for parent in parents}) == 6


def trace_parent(record: Record) -> str:
    return dict(record.headers)["traceparent"].decode()


async def test_a_restart_leaves_no_gap_and_repeats_nothing(
    kafka: str, make_config: MakeConfig
) -> None:
    domains = (
        'domains=[{name="a", environment="demo-arithmetic"},'
        ' {name="b", environment="demo-arithmetic", tier="long", weight=0.5}]'
    )
    config = await prepared(make_config(kafka, domains, "producers.max_groups_in_flight=50"))
    async with running(Producers, config) as service:
        await until(lambda: service.stats()["tasks_produced"] == 50)
    more = config.model_copy(
        update={"producers": config.producers.model_copy(update={"max_groups_in_flight": 120})}
    )
    async with running(Producers, more) as service:
        assert service.stats()["tasks_produced"] >= 50
        await until(lambda: service.stats()["tasks_produced"] == 120)
    short, long = [await seen(more, topic) for topic in (TASKS_SHORT, TASKS_LONG)]
    assert len(short) + len(long) == 120
    for indices in (short, long):
        assert sorted(indices) == list(range(len(indices)))


async def seen(config: Config, topic: Topic) -> list[int]:
    """Indices of all tasks on a topic, repeats included."""
    ends = await KafkaBus(config).end_offsets(topic)
    return [t.index for t in await produced(config, sum(ends.values()), topic)]


async def test_what_a_kill_lost_of_a_batch_is_produced(kafka: str, make_config: MakeConfig) -> None:
    config = await prepared(make_config(kafka, DEMO, "producers.max_tasks=40"))
    domain = config.domains[0]
    environment = make(domain)
    kept = [index for index in range(30) if index not in (7, 28)]
    specs = dict(zip(range(30), environment.tasks(seed=0, split="train"), strict=False))
    tasks = [
        training_task(
            environment,
            domain,
            specs[index],  # type: ignore[arg-type]
            TaskOrigin(run_id=config.run.id, source=f"d/{environment.source}", index=index),
        )
        for index in kept
    ]
    await send(config, topic_of(domain), [(t.task_id, t) for t in tasks])
    async with running(Producers, config) as service:
        await until(lambda: service.stats()["tasks_produced"] == 40)
        # It has nothing more to do, and stays up.
        assert service.stats()["paused"] == 1.0
    assert sorted(await seen(config, TASKS_SHORT)) == list(range(40))


async def test_nothing_before_the_baseline(kafka: str, make_config: MakeConfig) -> None:
    config = await prepared(
        make_config(kafka, DEMO, RL, "producers.wait_for_baseline=true", 'evaluation.domains=["d"]')
    )
    # What another run has left on these topics says nothing about this one.
    theirs = policy_pb2.PolicyVersion(header=header(config, "x", "old"), policy="p", final=True)
    total = events_pb2.EvaluationResult(header=header(config, "y", "old"), suite="s", baseline=True)
    await tell(config, POLICY_VERSIONS, theirs)
    await tell(config, EVALUATIONS, total)
    async with running(Producers, config) as service:
        assert service.stats()["paused"] == 1.0
        assert service.stats()["tasks_produced"] == 0
        total.header.CopyFrom(header(config, "z"))
        await tell(config, EVALUATIONS, total)
        await until(lambda: service.stats()["tasks_produced"] == 6)


async def test_a_malformed_line_is_a_dead_letter_and_the_others_are_tasks(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    file, held_out = tmp_path / "tasks.jsonl", tmp_path / "held.jsonl"
    good = [json.dumps({"prompt": f"q{i}", "answer": i}).encode() for i in range(4)]
    bad = b'{"prompt": "q", "answr": 1}\xff'
    file.write_bytes(b"\n".join([*good[:2], bad, *good[2:]]))
    held_out.write_bytes(good[0])
    options = f'{{path="{file}", held_out="{held_out}"}}'
    config = await prepared(
        make_config(
            kafka,
            f'domains=[{{name="j", environment="jsonl", options={options}}}]',
            "producers.max_tasks=10",
        )
    )
    async with running(Producers, config) as service:
        await until(lambda: service.stats()["tasks_produced"] == 10)
    tasks = await produced(config, 10)
    places = [(0, 0), (0, 1), (0, 3), (0, 4), (1, 0), (1, 1), (1, 3), (1, 4), (2, 0), (2, 1)]
    assert [(t.epoch, t.index) for t in tasks] == places
    letters = [letter for _, letter in await read(config, DEAD_LETTERS, 1)]
    assert len(letters) == 1
    assert letters[0].value == bad + b"\n"
    assert (letters[0].topic, letters[0].offset) == (str(file), 3)
    assert "tasks.jsonl, line 3" in letters[0].error
    assert letters[0].hint.startswith("fields: prompt or messages")
    assert letters[0].samples == 0


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ('{name="d", environment="jsonk"}', "unknown environment 'jsonk' -- did you mean 'jsonl'?"),
        (
            '{name="d", environment="jsonl", options={path="/none.jsonl"}}',
            "domain 'd': task file '/none.jsonl' cannot be read",
        ),
    ],
)
def test_a_wrong_domain_ends_it_with_status_2(tmp_path: Path, domain: str, message: str) -> None:
    command = [sys.executable, "-m", "producers.main", "--set", f"domains=[{domain}]"]
    command += ["--set", f'run.dir="{tmp_path}"']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
