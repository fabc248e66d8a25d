"""Running mean and deviation of a domain's rewards, as an immutable state.

Exponentially weighted (West 1979 with forgetting; the weight of the past decays by ``decay`` per
sample): with w the total weight, ``w' = decay * w + 1``, ``mean' = mean + (x - mean) / w'``,
``m2' = decay * m2 + (x - mean) * (x - mean')``. The state carries the offset it has absorbed, so
that a replayed record changes nothing.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

_FORMAT = struct.Struct("<dddQq")
# Rewards that hardly vary are not blown up: the deviation divides by at least this.
STD_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNormaliser:
    """``weight`` total, ``m2`` weighted sum of squares, ``absorbed`` last offset taken in."""

    weight: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    count: int = 0
    absorbed: int = -1

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / self.weight) if self.weight > 0 else 0.0

    def absorb(self, value: float, *, offset: int, decay: float) -> RunningNormaliser:
        """The state after one more reward; the same state when ``offset`` was absorbed before."""
        if offset <= self.absorbed:
            return self
        weight = decay * self.weight + 1.0
        mean = self.mean + (value - self.mean) / weight
        m2 = decay * self.m2 + (value - self.mean) * (value - mean)
        return RunningNormaliser(
            weight=weight, mean=mean, m2=max(0.0, m2), count=self.count + 1, absorbed=offset
        )

    def normalise(self, value: float) -> float:
        """``(value - mean) / max(std, floor)``; 0 before there are two samples."""
        if self.count < 2:
            return 0.0
        return (value - self.mean) / max(self.std, STD_FLOOR)

    def to_bytes(self) -> bytes:
        return _FORMAT.pack(self.weight, self.mean, self.m2, self.count, self.absorbed)

    @classmethod
    def from_bytes(cls, data: bytes) -> RunningNormaliser:
        """The state in ``data``; the empty one for no bytes."""
        if not data:
            return cls()
        weight, mean, m2, count, absorbed = _FORMAT.unpack(data)
        return cls(weight=weight, mean=mean, m2=m2, count=count, absorbed=absorbed)
