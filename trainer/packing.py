"""Sequences to rows: several sequences share a row, and none sees another.

``pack`` is numpy only. A row holds whole sequences, first-fit by decreasing length; position ids
start anew in each, and ``segment`` tells which sequence a position belongs to (-1: padding), from
which the block-causal mask follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to train on.

    ``token_ids`` int32 [n]; ``mask`` bool [n], True where the loss applies (never at 0: nothing
    predicts the first token); ``logprobs`` float32 [n], those of the behaviour policy where mask.
    """

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32] | None = None
    advantage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Rows [r, l] and, flat over all rows, the m tokens that the loss is about.

    ``source`` [m]: flat position (row * l + column) whose logits predict the token; ``target`` [m]
    its id; ``sequence`` [m] the index of its sequence in the input; ``logprobs`` and ``advantage``
    [m].
    """

    token_ids: IntArray
    positions: IntArray
    segment: IntArray
    source: IntArray
    target: IntArray
    sequence: IntArray
    logprobs: FloatArray
    advantage: FloatArray

    @property
    def tokens(self) -> int:
        """Tokens of the sequences, without padding."""
        return int((self.segment >= 0).sum())


def pack(sequences: Sequence[TrainSequence], *, row_tokens: int, pad_id: int) -> PackedBatch:
    """Pack sequences into rows of at most ``row_tokens`` (or of the longest, if that is longer)."""
    lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    capacity = max(row_tokens, int(lengths.max()))
    rows, starts = _place(lengths, capacity)
    width = int((starts + lengths).max())
    shape = (int(rows.max()) + 1, width)
    flat_start = rows * width + starts
    # Flat positions of all tokens of all sequences, in input order.
    owner = np.repeat(np.arange(len(sequences)), lengths)
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = flat_start[owner] + within
    token_ids = np.full(shape, pad_id, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    segment = np.full(shape, -1, dtype=np.int64)
    joined = np.concatenate([s.token_ids for s in sequences])
    token_ids.reshape(-1)[at] = joined
    positions.reshape(-1)[at] = within
    segment.reshape(-1)[at] = owner
    mask = np.concatenate([s.mask for s in sequences])
    mask &= within > 0
    return PackedBatch(
        token_ids=token_ids,
        positions=positions,
        segment=segment,
        source=at[mask] - 1,
        target=joined[mask].astype(np.int64),
        sequence=owner[mask],
        logprobs=_joined_logprobs(sequences)[mask],
        advantage=np.array([s.advantage for s in sequences], dtype=np.float32)[owner[mask]],
    )


def _joined_logprobs(sequences: Sequence[TrainSequence]) -> FloatArray:
    return np.concatenate(
        [
            np.zeros(len(s.token_ids), dtype=np.float32) if s.logprobs is None else s.logprobs
            for s in sequences
        ]
    )


def _place(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Row and start column of each sequence: first fit, longest first, stable."""
    rows = np.zeros(len(lengths), dtype=np.int64)
    starts = np.zeros(len(lengths), dtype=np.int64)
    used: list[int] = []
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        row = next((r for r, taken in enumerate(used) if taken + length <= capacity), len(used))
        if row == len(used):
            used.append(0)
        rows[index], starts[index] = row, used[row]
        used[row] += length
    return rows, starts


def micro_batches(sequences: Sequence[TrainSequence], *, limit_tokens: int) -> list[list[int]]:
    """Indices of the sequences, split so that each part has at most ``limit_tokens`` tokens.

    Shortest first, so that the rows of a part are of about one length and little is padding. A
    sequence that is longer than the limit is a part of its own.
    """
    lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    parts: list[list[int]] = []
    held = limit_tokens
    for index in np.argsort(lengths, kind="stable"):
        length = int(lengths[index])
        if held + length > limit_tokens:
            parts.append([])
            held = 0
        parts[-1].append(int(index))
        held += length
    return parts
