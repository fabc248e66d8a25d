"""Events to bytes and back, and token sequences as numpy views.

Decoding copies nothing: ``token_array`` and ``logprob_array`` are read-only views over the
message's bytes. ``decode`` checks what the types cannot: array lengths, spans, finite numbers. A
broken event is a ``ContractError``.
"""

from __future__ import annotations

import math
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
        occurred_at = Timestamp()
        occurred_at.GetCurrentTime()
    return events_pb2.Header(
        event_id=event_id, schema_version=SCHEMA_VERSION, run_id=run_id, occurred_at=occurred_at
    )


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
    check_sequences(topic.name, head.event_id, _sequences(message))
    if _all_finite(message):
        return
    for name, number in _numbers(message):
        if not math.isfinite(number):
            raise ContractError(
                f"{topic.name}: {name} of {head.event_id} is {number}, not a number"
            )


def _sequences(message: Message) -> Iterable[events_pb2.TokenSequence]:
    if isinstance(message, (events_pb2.Trajectory, events_pb2.ScoredTrajectory)):
        return message.sequences
    if isinstance(message, events_pb2.TrainingGroup):
        return (s.tokens for s in message.samples if s.HasField("tokens"))
    return ()


def _numbers(message: Message) -> Iterable[tuple[str, float]]:
    if isinstance(message, events_pb2.Trajectory):
        return ((f"evidence {item.name!r}", item.value) for item in message.evidence.items)
    if isinstance(message, events_pb2.ScoredTrajectory):
        return (("raw", message.raw), ("normalised", message.normalised))
    if isinstance(message, events_pb2.TrainingGroup):
        return (
            pair
            for sample in message.samples
            for pair in (("reward", sample.reward), ("advantage", sample.advantage))
        )
    return ()


def _all_finite(message: Message) -> bool:
    """A quick look at the many numbers of a group; False sends for a closer one."""
    if not isinstance(message, events_pb2.TrainingGroup):
        return False
    return math.isfinite(sum([s.reward + s.advantage for s in message.samples]))


def check_sequences(
    where: str, event_id: str, sequences: Iterable[events_pb2.TokenSequence]
) -> None:
    """``ContractError`` when a sequence contradicts itself."""
    logprobs = []
    for sequence in sequences:
        # Once each: every access of a bytes field makes a new object.
        token_bytes, behaviour = len(sequence.token_ids), sequence.logprobs
        logprobs.append(behaviour)
        if _is_one_sound_span(sequence, token_bytes, len(behaviour)):
            continue
        if problem := _problem(sequence, token_bytes, len(behaviour)):
            raise ContractError(f"{where}: token sequence of {event_id}: {problem}")
    # A sum is finite exactly when all its terms are (float32 terms cannot overflow a float64 sum).
    joined = np.frombuffer(b"".join(logprobs), dtype=_FLOAT)
    if not np.isfinite(joined.sum(dtype=np.float64)):
        raise ContractError(f"{where}: token sequence of {event_id}: a logprob is not finite")


def _is_one_sound_span(
    sequence: events_pb2.TokenSequence, token_bytes: int, logprob_bytes: int
) -> bool:
    """The common case at a third of the cost: one turn, sampled by one version, and all is well."""
    sampled, versions = sequence.sampled, sequence.versions
    if len(sampled) != 1 or len(versions) != 1:
        return False
    span, length = sampled[0], versions[0].length
    sound = length and span.length == length and logprob_bytes == 4 * length
    return bool(sound and not token_bytes % 4 and 4 * (span.start + length) <= token_bytes)


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
    if sum([span.length for span in sequence.versions]) != sampled:
        return f"policy versions do not cover the {sampled} sampled tokens"
    return ""


def token_array(sequence: events_pb2.TokenSequence) -> IntArray:
    """Token ids, int32 [n]: a read-only view."""
    return np.frombuffer(sequence.token_ids, dtype=_INT)


def logprob_array(sequence: events_pb2.TokenSequence) -> FloatArray:
    """Log-probabilities of the sampled tokens, float32 [m]: a read-only view."""
    return np.frombuffer(sequence.logprobs, dtype=_FLOAT)


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
