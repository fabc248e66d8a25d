"""Stages, versions and exact resumption, without a broker."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream import codecs, ids
from rollstream.config.model import RlStage, SftStage
from rollstream.errors import InfraError
from rollstream.v1 import events_pb2
from tests.conftest import MakeConfig
from trainer.buffer import Refusal
from trainer.checkpoint import Checkpoint
from trainer.records import refusal_event, version_event
from trainer.session import TrainerSession

SMALL = (
    'domains=[{name="d", environment="demo-arithmetic"}]',
    'policy.model={tokenizer_domain="d", hidden_size=32, intermediate_size=64, layers=1, heads=2,'
    " kv_heads=1, head_dim=16}",
)
SFT = '{kind="sft", domain="d", steps=4, batch_size=4}'
RL = '{kind="rl", steps=2, groups_per_step=1}'


def _group(number: int, *, loss_weight: float = 1.0, version: int = 0) -> events_pb2.TrainingGroup:
    rng = np.random.default_rng(number)
    tokens = codecs.make_sequence(
        rng.integers(7, 50, 12).astype(np.int32),
        rng.normal(-4, 0.2, 8).astype(np.float32),
        sampled=[(4, 8)],
        versions=[(version, 4, 8)],
    )
    sample = events_pb2.TrainingSample(
        rollout_id=f"r{number}", tokens=tokens, advantage=1.0, policy_version_min=version
    )
    return events_pb2.TrainingGroup(
        header=codecs.header("run", ids.event_id("G", number)),
        group_id=f"g{number}",
        samples=[sample],
        loss_weight=loss_weight,
    )


def _open(make_config: MakeConfig, stages: str, *overrides: str) -> TrainerSession:
    config = make_config("127.0.0.1:1", *SMALL, f"trainer.stages=[{stages}]", *overrides)
    session = TrainerSession(config)
    session.open()
    return session


def _run(session: TrainerSession, *, stop_after: int = -1) -> list[Checkpoint]:
    """Every checkpoint that the rest of the stages makes; gives up after ``stop_after`` steps."""
    made: list[Checkpoint | None] = []
    while (stage := session.stage) is not None and session.state.step != stop_after:
        if isinstance(stage, SftStage):
            made.append(session.warm_up(stage, lambda: False))
        else:
            made.append(session.step(stage, [_group(session.state.step)]))
    return [checkpoint for checkpoint in made if checkpoint is not None]


def _weights(session: TrainerSession) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in session._learner.model.state_dict().items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def _published(checkpoints: list[Checkpoint]) -> list[tuple[int, bool, bool]]:
    states = [c.state for c in checkpoints]
    return [(s.version, s.baseline, s.final) for s in states if s.publish]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (SFT, [(0, True, True)]),
        (f"{SFT}, {SFT}", [(0, True, True)]),
        (f"{SFT}, {RL}", [(0, True, False), (1, False, False), (2, False, True)]),
        (
            f"{SFT}, {RL}, {SFT}, {RL}",
            [(0, True, False), *((v, False, False) for v in (1, 2, 3, 4)), (5, False, True)],
        ),
        (
            f"{SFT}, {RL}, {SFT}",
            [(0, True, False), (1, False, False), (2, False, False), (3, False, True)],
        ),
    ],
)
def test_each_recipe_publishes_its_versions(
    make_config: MakeConfig, stages: str, expected: list[tuple[int, bool, bool]]
) -> None:
    assert _published(_run(_open(make_config, stages))) == expected


def test_a_stopped_warm_up_goes_on_to_the_same_bits(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    whole = _open(make_config, SFT, f'run.dir="{tmp_path / "whole"}"')
    _run(whole)
    parted = _open(make_config, SFT, f'run.dir="{tmp_path / "parted"}"')
    stage = parted.stage
    assert isinstance(stage, SftStage)
    assert parted.warm_up(stage, lambda: parted.state.stage_step == 2) is None
    parted = _open(make_config, SFT, f'run.dir="{tmp_path / "parted"}"')
    assert parted.state.stage_step == 2
    _run(parted)
    assert _same(_weights(whole), _weights(parted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumption_starts_from_the_weights_themselves(make_config: MakeConfig, dtype: str) -> None:
    """Also where they are published rounded."""
    stages, settings = f"{SFT}, {RL}", f"policy.dtype={dtype}"
    session = _open(make_config, stages, settings)
    _run(session, stop_after=1)
    assert _same(_weights(session), _weights(_open(make_config, stages, settings)))


def test_a_new_stage_has_a_new_optimiser(make_config: MakeConfig, tmp_path: Path) -> None:
    session = _open(make_config, f"{SFT}, {RL}, {RL}")
    _run(session, stop_after=2)
    assert session.state.stage == 2
    assert session._learner.optimiser is None
    resumed = tmp_path / "resumed"
    shutil.copytree(session.config.run.dir, resumed)
    again = _open(make_config, f"{SFT}, {RL}, {RL}", f'run.dir="{resumed}"')
    assert again._learner.optimiser is None
    _run(session)
    _run(again)
    assert _same(_weights(session), _weights(again))


def test_a_second_trainer_in_the_same_folder_ends(make_config: MakeConfig) -> None:
    first, second = _open(make_config, RL), _open(make_config, RL)
    first.publish_baseline()
    with pytest.raises(InfraError, match="is another trainer at work"):
        second.publish_baseline()


def test_steps_between_publications_wait_for_their_checkpoint(make_config: MakeConfig) -> None:
    session = _open(
        make_config, '{kind="rl", steps=3, groups_per_step=1}', "trainer.publish_every=2"
    )
    session.publish_baseline()
    stage = session.stage
    assert isinstance(stage, RlStage)
    assert session.step(stage, [_group(0)]) is None
    assert session.unsaved
    # Nothing was made durable: a crash here repeats the step.
    assert _open(make_config, RL).state.step == 0
    checkpoint = session.step(stage, [_group(1)])
    assert checkpoint is not None
    assert not session.unsaved
    records = [
        events_pb2.TrainingStep.FromString(bytes.fromhex(e)) for e in checkpoint.state.events
    ]
    assert [r.step for r in records] == [1, 2]
    assert _published([checkpoint]) == [(2, False, False)]


def test_the_announced_version_is_kept_as_long_as_it_is_the_newest(make_config: MakeConfig) -> None:
    session = _open(make_config, RL, "trainer.keep_checkpoints=1")
    announced = session.publish_baseline()
    latest = [session.save() for _ in range(3)][-1]
    assert announced.folder.exists()
    assert {p.name for p in announced.folder.parent.iterdir()} == {
        announced.folder.name, latest.folder.name,
    }  # fmt: skip
    session.save(publish=True)
    assert not announced.folder.exists()


def test_a_refused_last_step_still_ends_the_run(make_config: MakeConfig) -> None:
    session = _open(make_config, RL)
    session.publish_baseline()
    stage = session.stage
    assert isinstance(stage, RlStage)
    first = session.step(stage, [_group(0)])
    before = _weights(session)
    last = session.step(stage, [_group(1, loss_weight=float("nan"))])
    assert first is not None
    assert last is not None
    assert _same(before, _weights(session))
    assert _published([first, last]) == [(1, False, False), (1, False, True)]
    assert session.state.samples_trained == 1
    (record,) = [events_pb2.TrainingStep.FromString(bytes.fromhex(e)) for e in last.state.events]
    assert [use.drop_reason for use in record.samples] == ["non_finite"]
    assert all(np.isfinite(v) for v in record.metrics.values())
    one, other = (
        version_event(
            session.config, c.policy, version=c.state.version, step=c.state.step, stage="rl",
            baseline=False, final=c.state.final,
        )
        for c in (first, last)
    )  # fmt: skip
    assert one.digest == other.digest
    assert one.header.event_id != other.header.event_id


def test_groups_of_a_later_version_than_the_trainers_are_not_negatively_stale(
    make_config: MakeConfig,
) -> None:
    session = _open(make_config, RL)
    session.publish_baseline()
    stage = session.stage
    assert isinstance(stage, RlStage)
    checkpoint = session.step(stage, [_group(0, version=7)])
    assert checkpoint is not None
    record = events_pb2.TrainingStep.FromString(bytes.fromhex(checkpoint.state.events[0]))
    assert record.samples[0].staleness == 0
    refusal = Refusal(group=_group(1, version=7), reason="stale")
    event = refusal_event(session.config, refusal, step=1, stage="rl", version=1)
    assert event.samples[0].staleness == 0


def test_a_loss_weight_of_zero_moves_nothing(make_config: MakeConfig) -> None:
    session = _open(make_config, RL)
    session.publish_baseline()
    stage = session.stage
    assert isinstance(stage, RlStage)
    before = _weights(session)
    session.step(stage, [_group(0, loss_weight=0.0)])
    assert _same(before, _weights(session))
