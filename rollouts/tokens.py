"""The token sequence of a rollout while it grows: what was shown and what was sampled, id for id.

Invariant: the sampled spans are sorted and disjoint, and log-probabilities and policy versions
cover exactly them; the loss mask of the trajectory is nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollouts.engines.base import Generation
from rollstream import codecs
from rollstream.v1 import events_pb2

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Append only. ``versions``: (version, start, length) in positions of the whole sequence."""

    parts: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    sampled: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    length: int = 0

    def show(self, token_ids: IntArray) -> None:
        """Append what the policy reads."""
        self.parts.append(token_ids)
        self.length += len(token_ids)

    def sample(self, generation: Generation) -> events_pb2.Span:
        """Append what the policy wrote; where it stands."""
        start, count = self.length, len(generation.token_ids)
        self.show(generation.token_ids)
        if count:
            self.logprobs.append(generation.logprobs)
            self.sampled.append((start, count))
            self.versions += [(v, start + at, n) for v, at, n in generation.versions]
        return events_pb2.Span(start=start, length=count)

    @property
    def ids(self) -> IntArray:
        return np.concatenate(self.parts)

    @property
    def sampled_count(self) -> int:
        return sum(count for _, count in self.sampled)

    def sequence(self) -> events_pb2.TokenSequence:
        """The sequence as it travels."""
        logprobs = np.concatenate(self.logprobs) if self.logprobs else np.zeros(0, np.float32)
        return codecs.make_sequence(
            self.ids, logprobs, sampled=self.sampled, versions=self.versions
        )
