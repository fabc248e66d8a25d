"""Generation, and what a rollout costs outside the model.

``rollouts.tokens_per_s``: the configured engine (vLLM where installed), the demo's model with
random weights, 64 requests of 64 tokens at once, one thread. ``e2e.overhead_ms_per_rollout``:
tasks in Kafka to trajectories in Kafka through the real worker and sandbox executor with a scripted
engine, two sandboxed tool calls each; wall time over rollouts at 64 in flight, so it is cost per
rollout at saturation, not latency.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np

from bench.harness import broker, config_for
from bench.report import Report
from bench.services import service
from environments.demo_arithmetic import DemoArithmetic
from environments.registry import make
from environments.tasks import TaskOrigin, topic_of, training_task
from rollouts.engines.base import GenerateRequest
from rollouts.engines.factory import make_engine
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config, load
from rollstream.net import free_port
from rollstream.topics import ALL, POLICY_VERSIONS, TRAJECTORIES

NAMES = ("rollouts.tokens_per_s", "e2e.overhead_ms_per_rollout")
RUNS, REQUESTS, TOKENS = 5, 64, 64
TASKS, ROUNDS = 40, 3


def run(report: Report) -> None:
    _overhead(report)
    _generation(report)


def _generation(report: Report) -> None:
    from trainer.model import prepare_start

    with tempfile.TemporaryDirectory() as folder:
        demo = str(files("rollstream.demo") / "demo.toml")
        config = load([demo], overrides=[f'run.dir="{folder}"'], environ={})
        asyncio.run(_generate(report, config, prepare_start(config, Path(folder) / "start")))


async def _generate(report: Report, config: Config, model: Path) -> None:
    engine = make_engine(config)
    await engine.start(model, version=0)
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(RUNS + 1):
        requests = [
            GenerateRequest(
                prompt_ids=rng.integers(7, 57, 16).astype(np.int32),
                max_tokens=TOKENS,
                temperature=1.0,
                stop_ids=(),
            )
            for _ in range(REQUESTS)
        ]
        began = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        tokens = sum(len(generation.token_ids) for generation in done)
        rates.append(tokens / (time.perf_counter() - began))
    await engine.stop()
    # The first round compiles kernels where they are not cached.
    report.median("rollouts.tokens_per_s", rates[1:], unit="tokens/s")


def _overhead(report: Report) -> None:
    with broker() as servers, tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = config_for(
            servers,
            folder,
            "policy.max_length=160",
            'domains=[{name="bench", environment="demo-arithmetic", group_size=8}]',
            'rollouts.engine.kind="scripted"',
            'rollouts.engine.script="bench.scripts:two_calls"',
            "rollouts.max_rollouts=64",
            f'rollouts.sandbox_targets=["127.0.0.1:{port}"]',
            f"sandboxes.port={port}",
            "sandboxes.limits.memory_bytes=134217728",
        )
        bus = KafkaBus(config)
        asyncio.run(bus.ensure_topics(ALL))
        with service("sandboxes", config), service("rollouts", config):
            asyncio.run(_publish(bus, config))
            costs = [asyncio.run(_rollouts(bus, config, number)) for number in range(ROUNDS + 1)]
    report.median("e2e.overhead_ms_per_rollout", costs[1:], unit="ms")


async def _publish(bus: KafkaBus, config: Config) -> None:
    """A policy version that holds a chat format and no weights: the script needs none."""
    from trainer.records import version_event

    folder = config.run.dir / "policy"
    folder.mkdir()
    for name, data in DemoArithmetic().tokenizer().items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps({}), encoding="utf-8")
    event = version_event(
        config, folder, version=0, step=0, stage="bench", baseline=True, final=False
    )
    producer = bus.producer(client_id="bench")
    await producer.start()
    await producer.send_batch(POLICY_VERSIONS, [(config.policy.name, event)])
    await producer.stop()


async def _rollouts(bus: KafkaBus, config: Config, number: int) -> float:
    domain = config.domains[0]
    environment = make(domain)
    specs = environment.tasks(seed=number, split="train")
    tasks = [
        training_task(
            environment,
            domain,
            next(specs),  # type: ignore[arg-type]
            TaskOrigin(run_id=config.run.id, source="bench", index=number * TASKS + i),
        )
        for i in range(TASKS)
    ]
    consumer = bus.consumer([TRAJECTORIES], client_id="bench")
    producer = bus.producer(client_id="bench")
    await consumer.start()
    await producer.start()
    groups = {task.group_id for task in tasks}
    wanted = len(tasks) * domain.group_size
    began, got = time.perf_counter(), 0
    await producer.send_batch(topic_of(domain), [(task.task_id, task) for task in tasks])
    while got < wanted:
        records = await consumer.poll(timeout_s=0.2)
        got += sum(record.key.decode() in groups for record in records)
    took = time.perf_counter() - began
    await consumer.stop()
    await producer.stop()
    return took / wanted * 1000
