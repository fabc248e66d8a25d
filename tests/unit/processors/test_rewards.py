"""Rewards, normaliser, advantages: numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from processors.advantages import ESTIMATORS, has_signal
from processors.normaliser import RunningNormaliser
from processors.rewards import digest, score
from rollstream.config.model import GateConfig, RewardComponentConfig, RewardConfig
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2


def _evidence(**values: float) -> events_pb2.Evidence:
    return events_pb2.Evidence(
        validity=events_pb2.VALIDITY_VALID,
        items=[events_pb2.EvidenceItem(name=k, value=v) for k, v in values.items()],
    )


SPEC = RewardConfig(
    components=(
        RewardComponentConfig(name="result", evidence="correct", weight=1.0),
        RewardComponentConfig(name="form", evidence="format", weight=0.5),
    ),
    gates=(GateConfig(evidence="honest", at_least=1.0, value=-1.0),),
    clip_max=1.25,
)


def test_the_weighted_sum_is_clipped() -> None:
    result = score(_evidence(correct=1.0, format=0.25, honest=1.0), SPEC)
    assert (result.raw, result.flags) == (1.125, ())
    result = score(_evidence(correct=1.0, format=1.0, honest=1.0), SPEC)
    assert (result.raw, result.flags) == (1.25, ("clipped",))


def test_a_failed_gate_overrules_the_sum() -> None:
    result = score(_evidence(correct=1.0, format=1.0, honest=0.0), SPEC)
    assert (result.raw, result.flags) == (-1.0, ("gate:honest",))


def test_invalid_evidence_is_no_reward_of_zero() -> None:
    evidence = events_pb2.Evidence(
        validity=events_pb2.VALIDITY_INVALID, invalid_reason="sandbox lost"
    )
    result = score(evidence, SPEC)
    assert (result.valid, result.invalid_reason) == (False, "sandbox lost")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"correct": 1.0}, "'form' needs the evidence 'format'"),
        ({"correct": math.nan, "format": 1.0, "honest": 1.0}, "'correct' is nan"),
        ({"correct": math.inf, "format": 1.0, "honest": 1.0}, "'correct' is inf"),
    ],
)
def test_missing_and_infinite_evidence_is_a_contract_error(
    values: dict[str, float], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        score(_evidence(**values), SPEC)


def test_the_digest_names_the_rules() -> None:
    assert digest(SPEC) == digest(SPEC.model_copy())
    assert digest(SPEC) != digest(SPEC.model_copy(update={"clip_max": 2.0}))


def test_the_normaliser_without_forgetting_is_the_plain_statistic() -> None:
    state = RunningNormaliser()
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    for offset, value in enumerate(values):
        state = state.absorb(value, offset=offset, decay=1.0 - 1e-12)
    assert state.mean == pytest.approx(0.6)
    assert state.std == pytest.approx(math.sqrt(0.24))
    assert state.normalise(1.0) == pytest.approx(0.4 / math.sqrt(0.24))


def test_the_normaliser_by_hand_with_decay_one_half() -> None:
    # w = 1, mean = 1, m2 = 0; then w = 1.5, mean = 1 - 1/1.5 = 1/3, m2 = 0 + (-1)(0 - 1/3) = 1/3.
    state = RunningNormaliser().absorb(1.0, offset=0, decay=0.5).absorb(0.0, offset=1, decay=0.5)
    assert state.mean == pytest.approx(1 / 3)
    assert state.std == pytest.approx(math.sqrt((1 / 3) / 1.5))


def test_a_replayed_offset_changes_nothing() -> None:
    state = RunningNormaliser().absorb(1.0, offset=5, decay=0.9)
    assert state.absorb(0.0, offset=5, decay=0.9) is state
    assert state.absorb(0.0, offset=3, decay=0.9) is state
    assert RunningNormaliser.from_bytes(state.to_bytes()) == state
    assert RunningNormaliser.from_bytes(b"") == RunningNormaliser()


def test_rewards_without_spread_are_not_blown_up() -> None:
    state = RunningNormaliser()
    for offset in range(10):
        state = state.absorb(0.5, offset=offset, decay=0.9)
    assert state.normalise(0.5) == pytest.approx(0.0, abs=1e-9)


REWARDS = np.array([1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # mean 0.5, sample deviation sqrt(1/3).
        ("group_std", [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ("group_mean", [0.5, -0.5, -0.5, 0.5]),
        # 1 - mean(0, 0, 1) = 2/3; 0 - mean(1, 0, 1) = -2/3.
        ("leave_one_out", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ],
)
def test_advantages_by_hand(name: str, expected: list[float]) -> None:
    np.testing.assert_allclose(ESTIMATORS[name](REWARDS), expected, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_no_signal_gives_no_advantage(name: str) -> None:
    for rewards in ([0.3], [0.1 + 0.2, 0.3, 0.3], [1.0, 1.0 + 1e-9]):
        array = np.array(rewards)
        assert not has_signal(array)
        np.testing.assert_array_equal(ESTIMATORS[name](array), np.zeros(len(rewards)))
