"""Events to bytes and back, and token sequences as numpy views.

Decoding copies nothing: ``token_array`` and ``logprob_array`` are read-only views over the
message's bytes. ``decode`` checks what the types cannot: array lengths, spans, finite numbers. A
broken event is a ``ContractError``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from rollstream.errors import ContractError
from rollstream.topics import Topic
from rollstream.v1 import events_pb2

SCHEMA_VERSION = 1

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
Headers = Sequence[tuple[str, bytes]]


def header(
    run_id: str, event_id: str, *, occurred_at: Timestamp | None = None
) -> events_pb2.Header:
    """The header of a new event; ``occurred_at`` is now, unless it is derived from another."""
    if occurred_at is None:
        occurred_at = now()
    return events_pb2.Header(
        event_id=event_id, schema_version=SCHEMA_VERSION, run_id=run_id, occurred_at=occurred_at
    )


def now() -> Timestamp:
    """The wall clock."""
    at = Timestamp()
    at.FromNanoseconds(time.time_ns())
    return at


def encode(message: Message) -> bytes:
    """The bytes of an event: the same message always gives the same bytes."""
    return message.SerializeToString(deterministic=True)


def decode(topic: Topic, value: bytes) -> Message:
    """The event in ``value``.

    Raises:
        ContractError: the bytes are not this message, its schema is newer than this program, or
            what it says is inconsistent (array lengths, spans, numbers that are not finite).
    """
    message = topic.message()
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise ContractError(
            f"{topic.name}: {len(value)} bytes are not a {topic.message.__name__}: {error}",
            hint="find out what wrote to this topic; the bytes are in the dead letters",
        ) from error
    _check(topic, message)
    return message


def _check(topic: Topic, message: Message) -> None:
    head = message.header  # type: ignore[attr-defined]
    if not head.event_id:
        raise ContractError(f"{topic.name}: the event has no header.event_id")
    if head.schema_version > SCHEMA_VERSION:
        raise ContractError(
            f"{topic.name}: schema version {head.schema_version} of {head.event_id} is newer than "
            f"{SCHEMA_VERSION}",
            hint="upgrade this service",
        )
    if isinstance(message, events_pb2.TrainingGroup) and _is_sound_group(message):
        return
    check_sequences(topic.name, head.event_id, _sequences(message))
    for name, number in _numbers(message):
        if not math.isfinite(number):
            raise ContractError(
                f"{topic.name}: {name} of {head.event_id} is {number}, not a number"
            )


def _is_sound_group(group: events_pb2.TrainingGroup) -> bool:
    """The common case in one pass, at half the cost: each sample is one turn by one version, and
    all is well. False says nothing but that a closer look is due.
    """
    numbers = group.loss_weight + group.reward_mean + group.reward_std
    logprobs = []
    for sample in group.samples:
        numbers += sample.reward + sample.advantage
        sequence = sample.tokens
        sampled, versions = sequence.sampled, sequence.versions
        if len(sampled) != 1 or len(versions) != 1:
            return False
        span, version = sampled[0], versions[0]
        start, length = span.start, span.length
        # Once each: every access of a bytes field makes a new object.
        tokens, behaviour = len(sequence.token_ids), sequence.logprobs
        fits = 4 * (start + length) <= tokens and not tokens % 4
        covered = version.start == start and version.length == length
        if not (length and fits and covered and len(behaviour) == 4 * length):
            return False
        logprobs.append(behaviour)
    return math.isfinite(numbers) and _are_finite(logprobs)


def _are_finite(logprobs: Iterable[bytes]) -> bool:
    joined = np.frombuffer(b"".join(logprobs), _FLOAT)
    # A sum of squares is finite only if all terms are; the reverse fails for huge ones alone.
    with np.errstate(all="ignore"):
        quick = math.isfinite(np.dot(joined, joined))
    return quick or bool(np.isfinite(joined).all())


def _sequences(message: Message) -> Iterable[events_pb2.TokenSequence]:
    if isinstance(message, (events_pb2.Trajectory, events_pb2.ScoredTrajectory)):
        return message.sequences
    if isinstance(message, events_pb2.TrainingGroup):
        return (s.tokens for s in message.samples if s.HasField("tokens"))
    return ()


def _numbers(message: Message) -> Iterable[tuple[str, float]]:
    """The numbers that rewards and losses are made of, by name."""
    if isinstance(message, events_pb2.Trajectory):
        return ((f"evidence {item.name!r}", item.value) for item in message.evidence.items)
    if isinstance(message, events_pb2.ScoredTrajectory):
        return _score_numbers(message)
    if isinstance(message, events_pb2.TrainingGroup):
        return _group_numbers(message)
    if isinstance(message, events_pb2.EvaluationResult):
        return (("score", message.score),)
    return ()


def _score_numbers(scored: events_pb2.ScoredTrajectory) -> Iterable[tuple[str, float]]:
    yield from (("raw", scored.raw), ("normalised", scored.normalised))
    yield "loss_weight", scored.loss_weight
    for component in scored.components:
        yield f"component {component.name!r}", component.value
        yield f"weight of component {component.name!r}", component.weight


def _group_numbers(group: events_pb2.TrainingGroup) -> Iterable[tuple[str, float]]:
    yield "loss_weight", group.loss_weight
    yield from (("reward_mean", group.reward_mean), ("reward_std", group.reward_std))
    for sample in group.samples:
        yield from (("reward", sample.reward), ("advantage", sample.advantage))


def check_sequences(
    where: str, event_id: str, sequences: Iterable[events_pb2.TokenSequence]
) -> None:
    """``ContractError`` when a sequence contradicts itself."""
    logprobs = []
    for sequence in sequences:
        behaviour = sequence.logprobs
        if problem := _problem(sequence, len(sequence.token_ids), len(behaviour)):
            raise ContractError(f"{where}: token sequence of {event_id}: {problem}")
        logprobs.append(behaviour)
    if not _are_finite(logprobs):
        raise ContractError(f"{where}: token sequence of {event_id}: a logprob is not finite")


def _problem(sequence: events_pb2.TokenSequence, token_bytes: int, logprob_bytes: int) -> str:
    if token_bytes % 4 or logprob_bytes % 4:
        return "arrays are not a whole number of 4-byte values"
    tokens, sampled, end = token_bytes // 4, 0, 0
    for span in sequence.sampled:
        start, length = span.start, span.length
        if start < end or not length or start + length > tokens:
            return f"sampled span [{start}, +{length}) does not fit {tokens} tokens"
        end = start + length
        sampled += length
    if logprob_bytes // 4 != sampled:
        return f"{logprob_bytes // 4} logprobs for {sampled} sampled tokens"
    if _runs(sequence.versions) != _runs(sequence.sampled):
        return f"policy versions do not cover the {sampled} sampled tokens, and them alone"
    return ""


def _runs(spans: Iterable[events_pb2.Span | events_pb2.VersionSpan]) -> list[tuple[int, int]]:
    """The positions that spans cover, as (start, end); spans that touch are one run."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        start, end = span.start, span.start + span.length
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    return runs


def token_array(sequence: events_pb2.TokenSequence) -> IntArray:
    """Token ids, int32 [n]: a read-only view."""
    return np.frombuffer(sequence.token_ids, _INT)


def logprob_array(sequence: events_pb2.TokenSequence) -> FloatArray:
    """Log-probabilities of the sampled tokens, float32 [m]: a read-only view."""
    return np.frombuffer(sequence.logprobs, _FLOAT)


def sampled_mask(sequence: events_pb2.TokenSequence) -> BoolArray:
    """True where the token was sampled, bool [n]: the loss mask."""
    mask = np.zeros(len(sequence.token_ids) // 4, dtype=np.bool_)
    for span in sequence.sampled:
        mask[span.start : span.start + span.length] = True
    return mask


def full_logprobs(sequence: events_pb2.TokenSequence) -> FloatArray:
    """Log-probabilities at their positions, float32 [n]; 0 where nothing was sampled."""
    full = np.zeros(len(sequence.token_ids) // 4, dtype=np.float32)
    full[sampled_mask(sequence)] = logprob_array(sequence)
    return full


def version_array(sequence: events_pb2.TokenSequence) -> npt.NDArray[np.int64]:
    """Policy version at each position, int64 [n]; -1 where nothing was sampled."""
    versions = np.full(len(sequence.token_ids) // 4, -1, dtype=np.int64)
    for span in sequence.versions:
        versions[span.start : span.start + span.length] = span.policy_version
    return versions


def make_sequence(
    token_ids: IntArray,
    logprobs: FloatArray,
    *,
    sampled: Iterable[tuple[int, int]],
    versions: Iterable[tuple[int, int, int]],
) -> events_pb2.TokenSequence:
    """A token sequence from arrays; ``sampled`` (start, length), ``versions`` (version, start,
    length).
    """
    return events_pb2.TokenSequence(
        token_ids=np.ascontiguousarray(token_ids, dtype=_INT).tobytes(),
        logprobs=np.ascontiguousarray(logprobs, dtype=_FLOAT).tobytes(),
        sampled=[events_pb2.Span(start=start, length=length) for start, length in sampled],
        versions=[
            events_pb2.VersionSpan(policy_version=version, start=start, length=length)
            for version, start, length in versions
        ],
    )


def text_message(role: events_pb2.Role, text: str) -> events_pb2.Message:
    """A chat message of one text part."""
    return events_pb2.Message(role=role, content=[events_pb2.ContentPart(text=text)])


def text_of(message: events_pb2.Message) -> str:
    """The text parts of a message, joined."""
    return "".join(part.text for part in message.content if part.WhichOneof("part") == "text")
