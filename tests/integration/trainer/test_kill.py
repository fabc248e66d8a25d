"""Killed at its checkpoints, the trainer ends with the weights and books of one that was not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from rollstream import ids
from rollstream.bus.kafka import KafkaBus
from rollstream.config import Config
from rollstream.config.load import dump
from rollstream.topics import ALL, POLICY_VERSIONS, TRAINING_STEPS
from rollstream.v1 import policy_pb2
from tests.conftest import MakeConfig
from tests.integration.trainer.test_trainer import GROUP_SIZE, PER_STEP, SMALL, feed, group
from tests.services import read, running
from tests.waiting import until
from trainer.main import Trainer

STEPS = 4
KILLED = (
    *SMALL,
    f'trainer.stages=[{{kind="rl", steps={STEPS}, groups_per_step={PER_STEP}, max_staleness=9}}]',
)


async def _trainer(config: Config, folder: Path) -> asyncio.subprocess.Process:
    path = folder / "run.toml"
    path.write_text(dump(config), encoding="utf-8")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainer.main", "--config", str(path),
        cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def _kill_at(config: Config, folder: Path, checkpoint: int) -> None:
    """Run the trainer until this checkpoint is there, and kill it at once: what it makes true may
    be emitted by then, in part, or not.
    """
    process = await _trainer(config, folder)
    try:
        path = config.run.dir / "checkpoints" / f"{checkpoint:08d}"
        await until(lambda: path.exists() or process.returncode is not None, seconds=120)
        assert process.returncode is None, "the trainer ended by itself"
    finally:
        if process.returncode is None:
            process.kill()
    assert await process.wait() == -signal.SIGKILL


async def test_killed_and_resumed_is_as_never_killed(
    kafka: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    groups = [group(i) for i in range(STEPS * PER_STEP)]
    whole, killed = (
        make_config(kafka, *KILLED, f'run.dir="{tmp_path / name}"') for name in ("whole", "killed")
    )
    for config in (whole, killed):
        await KafkaBus(config).ensure_topics(ALL)
        await feed(config, groups)
    async with running(Trainer, whole):
        expected = await _final(whole)
    # Checkpoint 1 is the baseline, checkpoint n + 1 that of step n.
    for checkpoint in (2, 4):
        await _kill_at(killed, tmp_path, checkpoint)
    async with running(Trainer, killed):
        found = await _final(killed)
        steps = [step for _, step in await read(killed, TRAINING_STEPS, STEPS)]
    assert found.version == expected.version == STEPS
    weights = {f.path: f.sha256 for f in found.files}
    assert weights == {f.path: f.sha256 for f in expected.files}
    # Events may come again, as the same events; every sample is in one of them.
    once = {step.header.event_id: step for step in steps}
    assert all(once[step.header.event_id] == step for step in steps)
    uses = Counter(use.rollout_id for step in once.values() for use in step.samples)
    assert uses == {
        ids.rollout_id(str(number), index): 1
        for number in range(len(groups))
        for index in range(GROUP_SIZE)
    }


async def _final(config: Config) -> policy_pb2.PolicyVersion:
    found: list[policy_pb2.PolicyVersion] = []

    async def final() -> bool:
        found[:] = [v for _, v in await read(config, POLICY_VERSIONS, 1) if v.final]
        return bool(found)

    await until(final, seconds=60)
    return found[0]


async def test_stale_between_publications_is_recorded_after_what_made_it_so(
    kafka: str, make_config: MakeConfig
) -> None:
    """A refusal that depends on steps which no checkpoint holds yet waits for one that does."""
    stages = f'trainer.stages=[{{kind="rl", steps=9, groups_per_step={PER_STEP}, max_staleness=0}}]'
    config = make_config(kafka, *SMALL, stages, "trainer.publish_every=9")
    await KafkaBus(config).ensure_topics(ALL)
    late = [group(i) for i in range(PER_STEP, 2 * PER_STEP)]
    async with running(Trainer, config) as service:
        await feed(config, [group(i) for i in range(PER_STEP)])
        await until(lambda: service.stats()["step"] == 1)
        assert not [p for p in (config.run.dir / "checkpoints").iterdir() if p.name > "00000001"]
        await feed(config, late)
        steps = [step for _, step in await read(config, TRAINING_STEPS, 1 + len(late))]
        assert (config.run.dir / "checkpoints" / "00000002").exists()
        versions = await read(config, POLICY_VERSIONS, 1)
    reasons = [{use.drop_reason for use in step.samples} for step in steps]
    assert reasons == [{""}, *({"stale"} for _ in late)]
    # The step was recorded; its version was not due.
    assert [v.version for _, v in versions] == [0]
    assert service.stats()["samples_dropped_stale"] == len(late) * GROUP_SIZE


async def test_told_to_stop_it_saves_what_it_did(kafka: str, make_config: MakeConfig) -> None:
    stages = f'trainer.stages=[{{kind="rl", steps=9, groups_per_step={PER_STEP}, max_staleness=0}}]'
    config = make_config(kafka, *SMALL, stages, "trainer.publish_every=9")
    await KafkaBus(config).ensure_topics(ALL)
    async with running(Trainer, config) as service:
        await feed(config, [group(i) for i in range(PER_STEP)])
        await until(lambda: service.stats()["step"] == 1)
    ((_, step),) = await read(config, TRAINING_STEPS, 1)
    assert len(step.samples) == PER_STEP * GROUP_SIZE
    async with running(Trainer, config) as service:
        assert service.stats()["step"] == 1
