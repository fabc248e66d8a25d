"""The trainer's work as blocking calls: open or resume, warm up, step, save.

Runs in one thread of its own, so that the service's loop stays alive. Everything that decides what
comes next is in the checkpoint; nothing is emitted from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog
import torch

from environments.registry import make
from rollstream import codecs
from rollstream.chat import ChatFormat
from rollstream.config import Config
from rollstream.config.model import OptimiserConfig, RlStage, SftStage
from rollstream.v1 import events_pb2
from trainer.buffer import GroupBuffer, live_samples
from trainer.checkpoint import Checkpoint, CheckpointStore, TrainerState
from trainer.learner import Learner, StepResult
from trainer.model import load_model, prepare_start, write_policy
from trainer.packing import TrainSequence
from trainer.records import sample_uses, step_event

log = structlog.get_logger(__name__)
Item = TypeVar("Item")

Samples = Sequence[tuple[events_pb2.TrainingGroup, events_pb2.TrainingSample]]

_SFT_CHECKPOINT_STEPS = 100


class TrainerSession:
    """Model, optimiser, buffer and checkpoints of one run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = TrainerState()
        self.buffer = GroupBuffer(
            window=config.trainer.trained_window, max_length=config.policy.max_length
        )
        self.progress: dict[str, float] = {}
        self._store = CheckpointStore(
            config.run.dir / "checkpoints", keep=config.trainer.keep_checkpoints
        )
        self._pending: list[str] = []

    def open(self) -> Checkpoint | None:
        """Load the model: from the latest checkpoint (whose events are due again), or afresh."""
        checkpoint = self._store.latest()
        self._learner = self._load(checkpoint)
        if checkpoint is not None:
            self._resume(checkpoint)
        return checkpoint

    def _load(self, checkpoint: Checkpoint | None) -> Learner:
        settings = self.config.trainer
        torch.set_num_threads(settings.threads)
        # numpy looks at denormal numbers once, and warns when it finds them flushed.
        np.finfo(np.float32), np.finfo(np.float64)
        torch.set_flush_denormal(True)
        self._device = _device(settings.device)
        self._start = prepare_start(self.config, self.config.run.dir / "start")
        self.chat = ChatFormat(self._start)
        model = load_model(checkpoint.policy if checkpoint else self._start, self._device)
        self.buffer.vocab_size = int(model.config.vocab_size)
        torch.manual_seed(self.config.run.seed)
        return Learner(
            model,
            pad_id=self.chat.pad_id,
            row_tokens=settings.row_tokens,
            micro_tokens=settings.pack_tokens,
            device=self._device,
        )

    @property
    def stage(self) -> SftStage | RlStage | None:
        """The stage to work on now; None when all are done."""
        stages = self.config.trainer.stages
        return stages[self.state.stage] if self.state.stage < len(stages) else None

    @property
    def unsaved(self) -> bool:
        """Whether steps were done that no checkpoint contains yet."""
        return bool(self._pending)

    def warm_up(self, stage: SftStage, stopped: Callable[[], bool]) -> Checkpoint | None:
        """Do the rest of an SFT stage.

        None when it was stopped: a checkpoint marks how far it got.
        """
        self._begin(stage.optimiser)
        batches = ahead(self._demonstrations(stage, skip=self.state.stage_step))
        for index in range(self.state.stage_step, stage.steps):
            lr = _sft_rate(stage, index)
            metrics = self._learner.sft_step(next(batches), lr=lr)
            if not metrics["applied"]:
                log.error("loss or gradient is not finite: step refused", warm_up_step=index + 1)
            self.state = replace(self.state, stage_step=index + 1)
            self.progress = {"sft_step": index + 1, "sft_loss": metrics["loss"]}
            if (index + 1) % 50 == 0:
                log.info("warm-up", step=index + 1, of=stage.steps, loss=round(metrics["loss"], 4))
            if stopped():
                self.save()
                return None
            if (index + 1) % _SFT_CHECKPOINT_STEPS == 0 and index + 1 < stage.steps:
                self.save()
        return self._end_warm_up(stage)

    def _end_warm_up(self, stage: SftStage) -> Checkpoint | None:
        """Go on to the next stage. The weights are a version, unless they are warmed further."""
        following = self._next_stage()
        if isinstance(following, SftStage):
            self.save()
            return None
        self.state = replace(self.state, version=self.state.version + 1)
        return self.save(publish=True, final=following is None, made_by=stage.name)

    def publish_baseline(self) -> Checkpoint:
        """Version 0 of a run without warm-up: the weights as they are."""
        self.state = replace(self.state, version=0)
        return self.save(publish=True)

    def step(
        self,
        stage: RlStage,
        groups: Sequence[events_pb2.TrainingGroup],
        *,
        wait_s: float = 0.0,
    ) -> Checkpoint | None:
        """One optimiser step on ``groups``. Returns the checkpoint when one was due.

        The record of the step is held back until a checkpoint contains the step.
        """
        started = time.perf_counter()
        self._begin(stage.optimiser)
        samples = [(group, sample) for group in groups for sample in live_samples(group)]
        sequences = [_sequence(group, sample) for group, sample in samples]
        result = self._learner.rl_step(
            sequences, lr=_rl_rate(stage, self.state.stage_step), tis_clip=stage.tis_clip
        )
        self._record(stage, samples, result, wait_s=wait_s, compute_s=time.perf_counter() - started)
        done = self.state.stage_step >= stage.steps
        if not done and self.state.stage_step % self.config.trainer.publish_every:
            return None
        final = (self._next_stage() if done else stage) is None
        # A step that was refused made no version.
        newer = self.state.version > self.state.published_version
        return self.save(publish=newer or final, final=final, made_by=stage.name)

    def _record(
        self,
        stage: RlStage,
        samples: Samples,
        result: StepResult,
        *,
        wait_s: float,
        compute_s: float,
    ) -> None:
        """Take note of a step: what is to be emitted, where the run stands, what it shows."""
        version, step = self.state.version, self.state.step + 1
        if not result.applied:
            log.error("loss or gradient is not finite: step refused", step=step)
        reason = "" if result.applied else "non_finite"
        uses = sample_uses(samples, result.sequences, version=version, drop_reason=reason)
        tokens = sum(len(sample.tokens.token_ids) // 4 for _, sample in samples)
        metrics = {
            **result.metrics,
            **_reward_metrics(samples),
            "staleness_max": float(max(use.staleness for use in uses)),
            "tokens_per_s": tokens / max(compute_s, 1e-9),
        }
        event = step_event(
            self.config,
            step=step,
            stage=stage.name,
            version=version,
            uses=uses,
            metrics=metrics,
            wait_s=wait_s,
            compute_s=compute_s,
        )
        self._pending.append(event.SerializeToString().hex())
        self.progress |= metrics | {"wait_s": wait_s, "compute_s": compute_s}
        trained = len({use.rollout_id for use in uses if not use.drop_reason})
        self.state = replace(
            self.state,
            step=step,
            stage_step=self.state.stage_step + 1,
            version=version + int(result.applied),
            samples_trained=self.state.samples_trained + trained,
        )

    def _next_stage(self) -> SftStage | RlStage | None:
        """End this stage; its optimiser ends with it."""
        self.state = replace(self.state, stage=self.state.stage + 1, stage_step=0)
        self._learner.optimiser = None
        return self.stage

    def save(self, *, publish: bool = False, final: bool = False, made_by: str = "") -> Checkpoint:
        """Make everything up to here durable; with ``publish`` as a version to be announced."""
        number, version = self.state.number + 1, self.state.version
        self.state = replace(
            self.state,
            number=number,
            positions=dict(self.buffer.positions),
            finished=self.buffer.finished,
            events=self._pending,
            publish=publish,
            baseline=publish and version == 0,
            final=final,
            made_by=made_by,
            published=number if publish else self.state.published,
            published_version=version if publish else self.state.published_version,
        )
        checkpoint = self._store.save(
            self.state, self.buffer.groups, self._tensors(), self._write_policy
        )
        self._pending = []
        return checkpoint

    def _tensors(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the policy."""
        optimiser = self._learner.optimiser
        return {
            "optimiser": optimiser.state_dict() if optimiser else {},
            "rng": torch.get_rng_state(),
            # What is published in less than float32 is not what the next step starts from.
            "weights": {}
            if self.config.policy.dtype == "float32"
            else self._learner.model.state_dict(),
        }

    def _restore(self, tensors: dict[str, Any]) -> None:
        if tensors["optimiser"] and self.stage is not None:
            self._learner.begin_stage(self.stage.optimiser)
            assert self._learner.optimiser is not None
            self._learner.optimiser.load_state_dict(tensors["optimiser"])
        if tensors["weights"]:
            self._learner.model.load_state_dict(tensors["weights"])
        torch.set_rng_state(tensors["rng"])

    def _write_policy(self, folder: Path) -> None:
        write_policy(self._learner.model, self._start, folder, dtype=self.config.policy.dtype)

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.state = checkpoint.state
        self.buffer.restore(
            positions=checkpoint.state.positions,
            groups=iter(checkpoint.groups),
            finished=checkpoint.state.finished,
        )
        self._restore(checkpoint.tensors())
        log.info("resumed", checkpoint=checkpoint.folder.name, step=self.state.step)

    def _begin(self, settings: OptimiserConfig) -> None:
        if self._learner.optimiser is None:
            self._learner.begin_stage(settings)

    def _demonstrations(self, stage: SftStage, *, skip: int) -> Iterator[list[TrainSequence]]:
        environment = make(self.config.domain(stage.domain))
        stream = environment.demonstrations(seed=self.config.run.seed)
        for _ in islice(stream, skip * stage.batch_size):
            pass
        while True:
            yield [
                TrainSequence(token_ids=ids, mask=mask)
                for ids, mask in (
                    self.chat.encode_demonstration(messages, environment.tools)
                    for messages in islice(stream, stage.batch_size)
                )
            ]


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each made while the one before is in use: torch leaves Python free."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, items)
        while True:
            item = coming.result()
            coming = pool.submit(next, items)
            yield item


def _sequence(group: events_pb2.TrainingGroup, sample: events_pb2.TrainingSample) -> TrainSequence:
    return TrainSequence(
        token_ids=codecs.token_array(sample.tokens),
        mask=codecs.sampled_mask(sample.tokens),
        logprobs=codecs.full_logprobs(sample.tokens),
        advantage=sample.advantage * group.loss_weight,
    )


def _reward_metrics(samples: Samples) -> Mapping[str, float]:
    rewards = np.array([sample.reward for _, sample in samples])
    advantages = np.array([sample.advantage for _, sample in samples])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_abs_mean": float(np.abs(advantages).mean()),
        "groups": float(len({group.group_id for group, _ in samples})),
        "samples": float(len(samples)),
    }


def _sft_rate(stage: SftStage, index: int) -> float:
    """Linear warm-up, then linear decay to ``final_lr_share`` of the rate."""
    settings = stage.optimiser
    warm = min(1.0, (index + 1) / max(1, settings.warmup_steps))
    decay = 1.0 - (1.0 - stage.final_lr_share) * index / stage.steps
    return settings.lr * warm * decay


def _rl_rate(stage: RlStage, index: int) -> float:
    return stage.optimiser.lr * min(1.0, (index + 1) / max(1, stage.optimiser.warmup_steps))


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
