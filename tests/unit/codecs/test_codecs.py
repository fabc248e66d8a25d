"""Codecs: views without copies, and every contradiction named."""

from __future__ import annotations

import numpy as np
import pytest

from rollstream import codecs, ids, topics
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2


def _sequence() -> events_pb2.TokenSequence:
    return codecs.make_sequence(
        np.array([5, 6, 7, 8, 9], dtype=np.int32),
        np.array([-0.5, -1.0, -1.5], dtype=np.float32),
        sampled=[(1, 2), (4, 1)],
        versions=[(3, 1, 2), (4, 4, 1)],
    )


def _trajectory(sequence: events_pb2.TokenSequence) -> events_pb2.Trajectory:
    return events_pb2.Trajectory(
        header=codecs.header("run", ids.event_id("Trajectory", "r")), sequences=[sequence]
    )


def test_arrays_are_views_at_the_right_places() -> None:
    sequence = _sequence()
    assert codecs.token_array(sequence).tolist() == [5, 6, 7, 8, 9]
    assert codecs.token_array(sequence).base is not None
    assert codecs.sampled_mask(sequence).tolist() == [False, True, True, False, True]
    assert codecs.full_logprobs(sequence).tolist() == [0.0, -0.5, -1.0, 0.0, -1.5]
    assert codecs.version_array(sequence).tolist() == [-1, 3, 3, -1, 4]


def test_round_trip() -> None:
    event = _trajectory(_sequence())
    assert codecs.decode(topics.TRAJECTORIES, codecs.encode(event)) == event


def _broken(**changes: object) -> events_pb2.TokenSequence:
    sequence = _sequence()
    for name, value in changes.items():
        if isinstance(value, bytes):
            setattr(sequence, name, value)
        else:
            sequence.ClearField(name)  # type: ignore[arg-type]
            getattr(sequence, name).extend(value)
    return sequence


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (_broken(token_ids=b"123"), "whole number"),
        (_broken(logprobs=np.zeros(2, np.float32).tobytes()), "2 logprobs for 3 sampled"),
        (_broken(logprobs=np.array([0, np.nan, 0], np.float32).tobytes()), "not finite"),
        (_broken(sampled=[events_pb2.Span(start=4, length=2)]), "does not fit 5 tokens"),
        (_broken(versions=[]), "do not cover"),
        # As many as were sampled, but elsewhere.
        (
            _broken(versions=[events_pb2.VersionSpan(policy_version=3, start=0, length=3)]),
            "do not cover the 3 sampled tokens, and them alone",
        ),
    ],
)
def test_contradictions_are_contract_errors(
    sequence: events_pb2.TokenSequence, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        codecs.decode(topics.TRAJECTORIES, codecs.encode(_trajectory(sequence)))


def test_undecodable_bytes_name_the_topic() -> None:
    with pytest.raises(ContractError, match="trajectories: 4 bytes are not a Trajectory"):
        codecs.decode(topics.TRAJECTORIES, b"\xff\xff\xff\xff")


def test_a_newer_schema_is_refused() -> None:
    event = _trajectory(_sequence())
    event.header.schema_version = codecs.SCHEMA_VERSION + 1
    with pytest.raises(ContractError, match="upgrade this service"):
        codecs.decode(topics.TRAJECTORIES, codecs.encode(event))


def test_a_nan_reward_is_never_an_event() -> None:
    scored = events_pb2.ScoredTrajectory(header=codecs.header("run", "e"), raw=float("nan"))
    with pytest.raises(ContractError, match="raw of e is nan"):
        codecs.decode(topics.REWARDS, codecs.encode(scored))


def _group(**changes: float) -> events_pb2.TrainingGroup:
    one_span = codecs.make_sequence(
        np.arange(5, dtype=np.int32),
        np.array([-0.5, -1.0, -1.5], dtype=np.float32),
        sampled=[(1, 3)],
        versions=[(3, 1, 3)],
    )
    sample = {k: v for k, v in changes.items() if k in ("reward", "advantage")}
    group = {k: v for k, v in changes.items() if k not in sample}
    return events_pb2.TrainingGroup(
        header=codecs.header("run", "e"),
        samples=[
            events_pb2.TrainingSample(tokens=one_span, reward=1.0),
            events_pb2.TrainingSample(tokens=_sequence(), **sample),
            events_pb2.TrainingSample(drop_reason="missing"),
        ],
        **group,
    )


@pytest.mark.parametrize(
    "name", ["reward", "advantage", "loss_weight", "reward_mean", "reward_std"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_number_of_a_group_is_finite(name: str, value: float) -> None:
    with pytest.raises(ContractError, match=f"{name} of e is {value}"):
        codecs.decode(topics.REPLAY, codecs.encode(_group(**{name: value})))


def test_huge_numbers_are_still_numbers() -> None:
    # Their sums, and the sums of their squares, are not.
    group = _group(reward=1.7e308, advantage=1.7e308)
    group.samples[0].tokens.logprobs = np.full(3, -3e38, np.float32).tobytes()
    assert codecs.decode(topics.REPLAY, codecs.encode(group)) == group


def test_a_broken_logprob_among_sound_samples_is_found() -> None:
    group = _group()
    del group.samples[1:]
    group.samples[0].tokens.logprobs = np.array([-1, np.inf, -1], np.float32).tobytes()
    with pytest.raises(ContractError, match="a logprob is not finite"):
        codecs.decode(topics.REPLAY, codecs.encode(group))


def test_components_of_a_score_are_finite() -> None:
    scored = events_pb2.ScoredTrajectory(header=codecs.header("run", "e"))
    scored.components.add(name="result", value=float("inf"), weight=1.0)
    with pytest.raises(ContractError, match="component 'result' of e is inf"):
        codecs.decode(topics.REWARDS, codecs.encode(scored))


def test_ids_depend_on_every_part_and_on_nothing_else() -> None:
    assert ids.task_id("run", "source", 1, 0) == ids.task_id("run", "source", 1, 0)
    # Parts do not run into each other.
    assert ids.task_id("run", "a", 11, 0) != ids.task_id("run", "a1", 1, 0)
    assert len({ids.rollout_id("t", k) for k in range(1000)}) == 1000
