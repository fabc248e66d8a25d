"""The events that the trainer emits: pure functions of what it did."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollstream import codecs, ids
from rollstream.config import Config
from rollstream.v1 import events_pb2, policy_pb2
from trainer.buffer import Refusal, live_samples
from trainer.learner import SequenceStats


def sample_uses(
    samples: Sequence[tuple[events_pb2.TrainingGroup, events_pb2.TrainingSample]],
    stats: SequenceStats,
    *,
    version: int,
    drop_reason: str = "",
) -> list[events_pb2.SampleUse]:
    """One entry per sample of a step, in the order of ``stats``."""
    return [
        events_pb2.SampleUse(
            rollout_id=sample.rollout_id,
            group_id=group.group_id,
            segment=sample.segment,
            # Never below 0: a trainer that lost its checkpoints finds groups of later versions.
            staleness=max(0, version - sample.policy_version_min),
            advantage=sample.advantage,
            reward=sample.reward,
            tokens=int(stats.tokens[i]),
            ratio_mean=float(stats.ratio_mean[i]),
            ratio_max=float(stats.ratio_max[i]),
            clip_fraction=float(stats.clip_fraction[i]),
            loss=float(stats.loss[i]),
            drop_reason=drop_reason,
        )
        for i, (group, sample) in enumerate(samples)
    ]


def refused_uses(refusal: Refusal, *, version: int) -> list[events_pb2.SampleUse]:
    """One entry per live sample of a refused group."""
    return [
        events_pb2.SampleUse(
            rollout_id=sample.rollout_id,
            group_id=refusal.group.group_id,
            segment=sample.segment,
            staleness=max(0, version - sample.policy_version_min),
            advantage=sample.advantage,
            reward=sample.reward,
            drop_reason=refusal.reason,
        )
        for sample in live_samples(refusal.group)
    ]


def step_event(
    config: Config,
    *,
    step: int,
    stage: str,
    version: int,
    uses: Iterable[events_pb2.SampleUse],
    metrics: Mapping[str, float],
    wait_s: float = 0.0,
    compute_s: float = 0.0,
) -> events_pb2.TrainingStep:
    """The record of one optimiser step; ``wait_s`` was spent waiting for its groups."""
    uses = list(uses)
    return events_pb2.TrainingStep(
        header=codecs.header(config.run.id, ids.event_id("TrainingStep", config.run.id, step)),
        step=step,
        stage=stage,
        policy_version=version,
        samples=uses,
        metrics=dict(metrics),
        tokens=sum(use.tokens for use in uses),
        wait_s=wait_s,
        compute_s=compute_s,
    )


def refusal_event(
    config: Config, refusal: Refusal, *, step: int, stage: str, version: int
) -> events_pb2.TrainingStep:
    """The record of a group that was not trained on; the same group gives the same id."""
    event_id = ids.event_id("Refusal", config.run.id, refusal.group.group_id)
    return events_pb2.TrainingStep(
        header=codecs.header(config.run.id, event_id),
        step=step,
        stage=stage,
        policy_version=max(0, version),
        samples=refused_uses(refusal, version=version),
    )


def version_event(
    config: Config,
    folder: Path,
    *,
    version: int,
    step: int,
    stage: str,
    baseline: bool,
    final: bool,
) -> policy_pb2.PolicyVersion:
    """The announcement of the weights in ``folder`` (the final name, already durable).

    A last step that was refused makes no new version: the one before is announced again as final,
    which is another event.
    """
    files = [_weight_file(folder, path) for path in sorted(folder.iterdir())]
    listing = "\n".join(f"{file.path} {file.sha256}" for file in files)
    event_id = ids.event_id(
        "PolicyVersion", config.run.id, config.policy.name, version, "final" if final else ""
    )
    return policy_pb2.PolicyVersion(
        header=codecs.header(config.run.id, event_id),
        policy=config.policy.name,
        version=version,
        uri=str(folder.resolve()),
        files=files,
        digest=hashlib.sha256(listing.encode()).hexdigest(),
        step=step,
        stage=stage,
        transport="files",
        dtype=config.policy.dtype,
        baseline=baseline,
        final=final,
    )


def _weight_file(folder: Path, path: Path) -> policy_pb2.WeightFile:
    data = path.read_bytes()
    return policy_pb2.WeightFile(
        path=str(path.relative_to(folder)),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
    )
