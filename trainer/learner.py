"""The numbers of training: one optimiser step on packed sequences. No I/O, no clock, no events.

Single-threaded compute; deterministic on a CPU: the same state and the same batch give the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollstream.config.model import OptimiserConfig
from trainer.objectives import cross_entropy, grpo, k3
from trainer.packing import PackedBatch, TrainSequence, micro_batches, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Per sequence, float64 [k] each: what the step did with it."""

    tokens: npt.NDArray[np.int64]
    ratio_mean: npt.NDArray[np.float64]
    ratio_max: npt.NDArray[np.float64]
    clip_fraction: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """``applied`` is False when loss or gradient was not finite: then nothing was changed."""

    applied: bool
    metrics: Mapping[str, float]
    sequences: SequenceStats


class Learner:
    """A model and its optimiser."""

    def __init__(
        self, model: Any, *, pad_id: int, row_tokens: int, micro_tokens: int, device: torch.device
    ) -> None:
        self.model = model
        self.optimiser: torch.optim.Optimizer | None = None
        self._pad_id = pad_id
        self._row_tokens = row_tokens
        self._micro_tokens = micro_tokens
        self._device = device
        self._settings = OptimiserConfig()

    def begin_stage(self, settings: OptimiserConfig) -> None:
        """A fresh optimiser for a new stage."""
        self._settings = settings
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each target token and entropy of its distribution, float32 [m] each.

        The output head is applied to the positions that predict something, and to no others.
        """
        device = self._device
        segment = torch.from_numpy(batch.segment).to(device)
        hidden = self.model.model(
            input_ids=torch.from_numpy(batch.token_ids).to(device),
            position_ids=torch.from_numpy(batch.positions).to(device),
            attention_mask=_block_causal(segment),
            use_cache=False,
        ).last_hidden_state
        flat = hidden.reshape(-1, hidden.shape[-1])
        chosen = flat.index_select(0, torch.from_numpy(batch.source).to(device))
        full = self.model.lm_head(chosen).float().log_softmax(-1)
        target = torch.from_numpy(batch.target).to(device)
        entropy = -(full.detach().exp() * full.detach()).sum(-1)
        return full.gather(-1, target[:, None])[:, 0], entropy

    def sft_step(self, sequences: Sequence[TrainSequence], *, lr: float) -> Mapping[str, float]:
        """One step of maximum likelihood on demonstrations."""
        total = _targets(sequences)
        loss_sum = 0.0
        self._zero()
        for part in micro_batches(sequences, limit_tokens=self._micro_tokens):
            logp, _ = self.logprobs(self._pack([sequences[i] for i in part]))
            loss = cross_entropy(logp, normaliser=total)
            loss.backward()
            loss_sum += loss.item()
        applied, norm = self._apply(loss_sum, lr=lr)
        return {"loss": loss_sum, "grad_norm": norm, "applied": float(applied)}

    def rl_step(
        self, sequences: Sequence[TrainSequence], *, lr: float, tis_clip: float
    ) -> StepResult:
        """One GRPO step with truncated importance sampling.

        At least one sequence must have a token that the loss applies to.
        """
        total = _targets(sequences)
        parts = micro_batches(sequences, limit_tokens=self._micro_tokens)
        self._zero()
        loss_sum, kept = 0.0, []
        for part in parts:
            batch = self._pack([sequences[i] for i in part])
            logp, entropy = self.logprobs(batch)
            behaviour = torch.from_numpy(batch.logprobs).to(self._device)
            advantage = torch.from_numpy(batch.advantage).to(self._device)
            result = grpo(logp, behaviour, advantage, tis_clip=tis_clip, normaliser=total)
            result.loss.backward()
            loss_sum += result.loss.item()
            kept.append(
                np.stack(
                    [
                        np.array(part)[batch.sequence],
                        _numpy(result.ratio),
                        _numpy(result.clipped),
                        _numpy(result.token_loss),
                        _numpy(entropy),
                        _numpy(k3(behaviour, logp.detach())),
                    ]
                )
            )
        applied, norm = self._apply(loss_sum, lr=lr)
        # What is recorded of a refused step is finite too: readers need not know of such steps.
        tokens = np.nan_to_num(np.concatenate(kept, axis=1), nan=0.0, posinf=0.0, neginf=0.0)
        metrics = {"loss": loss_sum, "grad_norm": norm, **_token_metrics(tokens)}
        metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        return StepResult(
            applied=applied, metrics=metrics, sequences=_by_sequence(tokens, len(sequences))
        )

    def _pack(self, part: Sequence[TrainSequence]) -> PackedBatch:
        return pack(part, row_tokens=self._row_tokens, pad_id=self._pad_id)

    def _zero(self) -> None:
        assert self.optimiser is not None, "begin_stage() first"
        self.optimiser.zero_grad(set_to_none=True)

    def _apply(self, loss: float, *, lr: float) -> tuple[bool, float]:
        """Clip and step, unless loss or gradient is not finite.

        Returns (applied, gradient norm).
        """
        assert self.optimiser is not None
        clip = self._settings.grad_clip
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        if not np.isfinite(loss) or not np.isfinite(norm):
            self._zero()
            return False, norm
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        return True, norm


def _block_causal(segment: Tensor) -> Tensor:
    """Bool [r, 1, l, l]: True where a position may look: its own sequence, not ahead.

    Padding looks at itself, so that no row of the softmax is empty.
    """
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    same = segment[:, :, None] == segment[:, None, :]
    return (same & causal)[:, None]


def _targets(sequences: Sequence[TrainSequence]) -> float:
    """Tokens that the loss applies to."""
    return float(sum(int(s.mask[1:].sum()) for s in sequences))


def _numpy(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _token_metrics(tokens: npt.NDArray[np.float64]) -> dict[str, float]:
    _, ratio, clipped, _, entropy, kl = tokens
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": float(clipped.mean()),
        "entropy": float(entropy.mean()),
        # Estimate of KL(behaviour || policy), on the behaviour's own tokens: how far off policy.
        "kl_behaviour": float(kl.mean()),
    }


def _by_sequence(tokens: npt.NDArray[np.float64], count: int) -> SequenceStats:
    index = tokens[0].astype(np.int64)
    _, ratio, clipped, loss, _, _ = tokens
    number = np.bincount(index, minlength=count)
    divisor = np.maximum(number, 1)
    highest = np.zeros(count)
    np.maximum.at(highest, index, ratio)
    return SequenceStats(
        tokens=number,
        ratio_mean=np.bincount(index, ratio, count) / divisor,
        ratio_max=highest,
        clip_fraction=np.bincount(index, clipped, count) / divisor,
        loss=np.bincount(index, loss, count) / divisor,
    )
