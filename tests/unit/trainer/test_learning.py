"""The step teaches: a policy that is paid for saying one token comes to say it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollstream.config.model import OptimiserConfig
from trainer.learner import Learner
from trainer.packing import TrainSequence

VOCABULARY, PAYS, PROMPT, SAMPLED = 16, 5, 3, 6
GROUPS, GROUP_SIZE, STEPS = 8, 8, 40
# How far the policy that samples stays behind the one that is trained.
STALENESS = 2

pytestmark = pytest.mark.train


def _policy(seed: int) -> Learner:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    learner = Learner(model, pad_id=0, row_tokens=1, micro_tokens=256, device=torch.device("cpu"))
    learner.begin_stage(OptimiserConfig())
    return learner


@torch.no_grad()
def _sample(
    model: Qwen3ForCausalLM, prompts: torch.Tensor
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Token ids [n, PROMPT + SAMPLED] and log-probabilities of the sampled ones [n, SAMPLED]."""
    ids, logprobs = prompts, []
    for _ in range(SAMPLED):
        full = model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(full.exp(), 1)
        logprobs.append(full.gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids.numpy().astype(np.int32), torch.cat(logprobs, dim=1).numpy()


def _rewards(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Share of the sampled tokens that are the one that pays."""
    share: npt.NDArray[np.float64] = (ids[:, PROMPT:] == PAYS).mean(axis=1)
    return share


def _batch(model: Qwen3ForCausalLM) -> tuple[list[TrainSequence], float]:
    prompts = torch.randint(1, VOCABULARY, (GROUPS, PROMPT)).repeat_interleave(GROUP_SIZE, dim=0)
    ids, logprobs = _sample(model, prompts)
    rewards = _rewards(ids)
    grouped = rewards.reshape(GROUPS, GROUP_SIZE)
    spread = grouped.std(axis=1, keepdims=True) + 1e-4
    advantages = ((grouped - grouped.mean(axis=1, keepdims=True)) / spread).reshape(-1)
    mask = np.arange(PROMPT + SAMPLED) >= PROMPT
    sequences = [
        TrainSequence(
            token_ids=row,
            mask=mask,
            logprobs=np.concatenate([np.zeros(PROMPT, dtype=np.float32), said]),
            advantage=float(advantage),
        )
        for row, said, advantage in zip(ids, logprobs, advantages, strict=True)
    ]
    return sequences, float(rewards.mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_off_policy(seed: int) -> None:
    learner = _policy(seed)
    waiting, rewards = [], []
    for _ in range(STEPS):
        sequences, reward = _batch(learner.model)
        rewards.append(reward)
        waiting.append(sequences)
        if len(waiting) > STALENESS:
            assert learner.rl_step(waiting.pop(0), lr=3e-3, tis_clip=2.0).applied
    # Chance is 1 / VOCABULARY = 0.06.
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-5:]) > 0.7
