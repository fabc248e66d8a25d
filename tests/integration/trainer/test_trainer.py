"""The trainer on a real Kafka: steps, versions, exact resume, and an account of every sample."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollstream import codecs, ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.errors import ConfigError
from rollstream.lifecycle import ServiceContext
from rollstream.topics import ALL, DEAD_LETTERS, POLICY_VERSIONS, REPLAY, TRAINING_STEPS
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from tests.services import read, running, send, send_bytes
from trainer.main import Trainer
from trainer.session import TrainerSession

STEPS, PER_STEP, GROUP_SIZE = 3, 2, 4
SMALL = (
    'domains=[{name="d", environment="demo-arithmetic"}]',
    "policy.max_length=64",
    'policy.model={tokenizer_domain="d", hidden_size=32, intermediate_size=64, layers=1, heads=2,'
    " kv_heads=1, head_dim=16}",
    f'trainer.stages=[{{kind="rl", steps={STEPS}, groups_per_step={PER_STEP}, max_staleness=1}}]',
    "bus.partitions=1",
)


def group(
    number: int, *, version: int = 0, length: int = 20, drop: str = ""
) -> events_pb2.TrainingGroup:
    rng = np.random.default_rng(number)
    samples = []
    for index in range(GROUP_SIZE):
        tokens = codecs.make_sequence(
            rng.integers(7, 57, length).astype(np.int32),
            rng.normal(-4, 0.2, length - 5).astype(np.float32),
            sampled=[(5, length - 5)],
            versions=[(version, 5, length - 5)],
        )
        samples.append(
            events_pb2.TrainingSample(
                rollout_id=ids.rollout_id(str(number), index),
                sample_index=index,
                tokens=tokens,
                reward=float(index % 2),
                advantage=1.0 if index % 2 else -1.0,
                policy_version_min=version,
                policy_version_max=version,
            )
        )
    return events_pb2.TrainingGroup(
        header=codecs.header("run", ids.event_id("G", number)),
        group_id=ids.group_id(str(number)),
        task_id=str(number),
        group_size=GROUP_SIZE,
        samples=samples,
        drop_reason=drop,
        loss_weight=1.0,
    )


async def feed(config: Config, groups: list[events_pb2.TrainingGroup]) -> None:
    await send(config, REPLAY, [(g.group_id, g) for g in groups])


async def test_steps_versions_and_the_books(kafka: str, make_config: MakeConfig) -> None:
    config = make_config(kafka, *SMALL)
    await KafkaBus(config).ensure_topics(ALL)
    usable = [group(i) for i in range(4)] + [group(i, version=2) for i in (4, 5)]
    async with running(Trainer, config):
        await send_bytes(config, REPLAY, "k", b"\xff")
        # Repeats, a dropped group, one that is too long, one that is too old at version 2.
        await feed(
            config, [usable[0], usable[0], group(90, drop="zero_variance"), group(91, length=65)]
        )
        await feed(config, usable[1:4])
        await read(config, POLICY_VERSIONS, 3)
        await feed(config, [group(92, version=0), *usable[4:]])
        versions = [v for _, v in await read(config, POLICY_VERSIONS, STEPS + 1)]
        await feed(config, [group(93, version=2)])
        steps = [s for _, s in await read(config, TRAINING_STEPS, STEPS + 3)]
        ((_, letter),) = await read(config, DEAD_LETTERS, 1)
    assert [(v.version, v.baseline, v.final) for v in versions] == [
        (0, True, False), (1, False, False), (2, False, False), (3, False, True),
    ]  # fmt: skip
    uses = [use for step in steps for use in step.samples]
    trained = Counter(use.rollout_id for use in uses if not use.drop_reason)
    assert set(trained) == {s.rollout_id for g in usable for s in g.samples}
    assert set(trained.values()) == {1}
    dropped = {use.group_id: use.drop_reason for use in uses if use.drop_reason}
    assert dropped == {
        ids.group_id("91"): "oversize",
        ids.group_id("92"): "stale",
        ids.group_id("93"): "run_complete",
    }
    assert max(use.staleness for use in uses if not use.drop_reason) <= 1
    assert letter.value == b"\xff"


def test_resume_is_exact(make_config: MakeConfig, tmp_path: Path) -> None:
    """Stopped after a checkpoint and opened again: the same bits as without the stop."""
    groups = [group(i) for i in range(STEPS * PER_STEP)]

    def run(folder: Path, *, stop_after: int) -> dict[str, torch.Tensor]:
        config = make_config("127.0.0.1:1", *SMALL)
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
        session = _open(config, groups)
        for number in range(STEPS):
            if number == stop_after:
                session = _open(config, groups)
            stage = session.stage
            assert stage is not None
            assert stage.kind == "rl"
            session.buffer.expire(version=session.state.version, max_staleness=10)
            taken = session.buffer.take(PER_STEP)
            assert taken is not None
            session.step(stage, taken)
        latest = session._store.latest()
        assert latest is not None
        assert latest.state.samples_trained == STEPS * PER_STEP * GROUP_SIZE
        return load_file(latest.policy / "model.safetensors")

    whole = run(tmp_path / "whole", stop_after=-1)
    for stop in (1, 2):
        resumed = run(tmp_path / f"resumed-{stop}", stop_after=stop)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def _open(config: Config, groups: list[events_pb2.TrainingGroup]) -> TrainerSession:
    """A session that has read the log: what it holds already it passes over."""
    session = TrainerSession(config)
    if session.open() is None:
        session.publish_baseline()
    for offset, one in enumerate(groups):
        session.buffer.offer(one, partition=0, offset=offset)
    return session


async def test_a_resumed_trainer_emits_the_last_events_again(
    kafka: str, make_config: MakeConfig
) -> None:
    config = make_config(kafka, *SMALL)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Trainer, config):
        await feed(config, [group(0), group(1)])
        first = await read(config, TRAINING_STEPS, 1)
        await read(config, POLICY_VERSIONS, 2)
    async with running(Trainer, config):
        again = await read(config, TRAINING_STEPS, 2)
        await feed(config, [group(0), group(2), group(3)])
        steps = [s for _, s in await read(config, TRAINING_STEPS, 3)]
    assert {s.header.event_id for _, s in again} == {first[0][1].header.event_id}
    # Group 0 came again and was not trained again.
    assert {use.group_id for use in steps[2].samples} == {ids.group_id("2"), ids.group_id("3")}


def test_a_half_written_checkpoint_is_not_one(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("127.0.0.1:1", *SMALL)
    session = _open(config, [])
    complete = session._store.latest()
    assert complete is not None
    shutil.copytree(complete.folder, session._store.path(99).with_suffix(".tmp"))
    latest = session._store.latest()
    assert latest is not None
    assert latest.folder == complete.folder


def test_what_is_not_built_is_refused(make_config: MakeConfig) -> None:
    config = make_config("127.0.0.1:1", 'trainer.stages=[{kind="rl", kl_coefficient=0.1}]')
    with pytest.raises(ConfigError, match="kl_coefficient=0.1 needs a reference model"):
        Trainer(ServiceContext(config=config))


async def test_a_step_waits_for_the_loop(kafka: str, make_config: MakeConfig) -> None:
    """Compute runs beside the event loop: health answers while a step is computed."""
    config = make_config(kafka, *SMALL)
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Trainer, config) as service:
        await feed(config, [group(i) for i in range(2)])
        turns = 0
        while service.stats()["step"] < 1:
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 0
