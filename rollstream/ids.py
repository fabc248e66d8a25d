"""Deterministic ids: the same inputs give the same id, so that a repeat is recognised as one.

An id is a prefix and 80 bits of BLAKE2b over the length-prefixed parts: parts cannot run into each
other, and among 10^9 ids the chance of one collision is below 10^-6.
"""

from __future__ import annotations

import hashlib
import struct

_DIGEST_BYTES = 10


def _derive(prefix: str, *parts: str | int) -> str:
    h = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=prefix.encode()[:16])
    for part in parts:
        raw = str(part).encode()
        h.update(struct.pack("<I", len(raw)) + raw)
    return f"{prefix}-{h.hexdigest()}"


def task_id(run_id: str, source: str, index: int, epoch: int) -> str:
    """Id of the ``index``-th task of ``source`` in ``epoch``."""
    return _derive("t", run_id, source, index, epoch)


def group_id(task: str) -> str:
    """Id of the group of rollouts of one task."""
    return _derive("g", task)


def rollout_id(task: str, sample_index: int) -> str:
    """Id of the ``sample_index``-th rollout of a task; a retry has the same id and a higher
    attempt.
    """
    return _derive("r", task, sample_index)


def event_id(kind: str, *parts: str | int) -> str:
    """Id of an event of message type ``kind`` that is fully determined by ``parts``."""
    return _derive("e", kind, *parts)
