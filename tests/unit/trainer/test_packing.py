"""Packing changes nothing but the cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.learner import Learner
from trainer.packing import TrainSequence, micro_batches, pack


def _sequence(rng: np.random.Generator, length: int) -> TrainSequence:
    return TrainSequence(
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        mask=rng.random(length) < 0.5,
        logprobs=rng.random(length).astype(np.float32),
        advantage=float(rng.random()),
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 64))
def test_every_token_is_packed_once(lengths: list[int], row_tokens: int) -> None:
    rng = np.random.default_rng(0)
    sequences = [_sequence(rng, n) for n in lengths]
    batch = pack(sequences, row_tokens=row_tokens, pad_id=63)
    assert batch.tokens == sum(lengths)
    assert batch.token_ids.shape[1] <= max(row_tokens, max(lengths))
    flat, segment = batch.token_ids.reshape(-1), batch.segment.reshape(-1)
    for index, sequence in enumerate(sequences):
        np.testing.assert_array_equal(flat[segment == index], sequence.token_ids)
        at = batch.sequence == index
        # The first token is predicted by nothing; the others by the position before them.
        wanted = sequence.mask.copy()
        wanted[0] = False
        np.testing.assert_array_equal(batch.target[at], sequence.token_ids[wanted])
        assert sequence.logprobs is not None
        np.testing.assert_array_equal(batch.logprobs[at], sequence.logprobs[wanted])
        np.testing.assert_array_equal(flat[batch.source[at] + 1], sequence.token_ids[wanted])
        assert (segment[batch.source[at]] == index).all()


@pytest.fixture(scope="module")
def learner() -> Learner:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    return Learner(model, pad_id=0, row_tokens=64, micro_tokens=1 << 20, device=torch.device("cpu"))


def test_packed_logprobs_are_those_of_each_sequence_alone(learner: Learner) -> None:
    rng = np.random.default_rng(1)
    sequences = [_sequence(rng, n) for n in (5, 17, 30, 2, 9, 30, 11)]
    with torch.no_grad():
        batch = pack(sequences, row_tokens=40, pad_id=0)
        packed, _ = learner.logprobs(batch)
        for index, sequence in enumerate(sequences):
            ids = torch.from_numpy(sequence.token_ids).long()[None]
            full = learner.model(ids).logits[0].log_softmax(-1)
            wanted = torch.from_numpy(sequence.mask)[1:]
            alone = full[:-1].gather(-1, ids[0, 1:, None])[:, 0][wanted]
            found = packed[torch.from_numpy(batch.sequence == index)]
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_micro_batches_add_up_to_the_same_gradient(learner: Learner) -> None:
    rng = np.random.default_rng(2)
    sequences = [_sequence(rng, n) for n in (9, 17, 30, 21)]

    def gradient(micro_tokens: int) -> torch.Tensor:
        learner._micro_tokens = micro_tokens
        learner.begin_stage(learner._settings)
        grads: list[torch.Tensor] = []
        apply = learner._apply

        def capture(loss: float, *, lr: float) -> tuple[bool, float]:
            grads.extend(p.grad.flatten().clone() for p in learner.model.parameters())
            return True, 0.0

        learner._apply = capture  # type: ignore[method-assign]
        learner.rl_step(sequences, lr=0.0, tis_clip=2.0)
        learner._apply = apply  # type: ignore[method-assign]
        return torch.cat(grads)

    torch.testing.assert_close(gradient(1 << 20), gradient(20), atol=1e-6, rtol=1e-4)


def test_micro_batches_hold_sequences_of_about_one_length() -> None:
    rng = np.random.default_rng(3)
    sequences = [_sequence(rng, n) for n in (10, 50, 10, 5, 10)]
    # Shortest first, ties in order, at most 20 tokens; what is longer stands alone.
    assert micro_batches(sequences, limit_tokens=20) == [[3, 0], [2, 4], [1]]


def test_what_a_step_reports_is_in_the_order_of_its_sequences(learner: Learner) -> None:
    rng = np.random.default_rng(5)
    sequences = [_sequence(rng, n) for n in (30, 5, 17, 9, 30, 2)]
    learner._micro_tokens = 32
    learner.begin_stage(learner._settings)
    found = learner.rl_step(sequences, lr=0.0, tis_clip=2.0).sequences
    assert found.tokens.tolist() == [int(s.mask[1:].sum()) for s in sequences]
    alone = [learner.rl_step([s], lr=0.0, tis_clip=2.0).sequences.ratio_max[0] for s in sequences]
    np.testing.assert_allclose(found.ratio_max, alone, rtol=1e-4)


def test_a_step_that_is_not_finite_changes_nothing(learner: Learner) -> None:
    rng = np.random.default_rng(4)
    sequence = _sequence(rng, 12)
    broken = TrainSequence(
        token_ids=sequence.token_ids,
        mask=sequence.mask,
        logprobs=sequence.logprobs,
        advantage=float("nan"),
    )
    learner._micro_tokens = 1 << 20
    learner.begin_stage(learner._settings)
    before = [p.detach().clone() for p in learner.model.parameters()]
    assert not learner.rl_step([broken], lr=1.0, tis_clip=2.0).applied
    for old, new in zip(before, learner.model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), atol=0, rtol=0)
