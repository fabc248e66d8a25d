"""From evidence to a reward: a pure function of the evidence and the domain's reward specification.

Components -> weighted sum -> gates -> clip. Validity is apart from value: evidence that is INVALID
(sandbox lost, verifier crashed) gives no reward at all, never 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from rollstream.config.model import RewardConfig
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``raw`` is meaningless unless ``valid``. ``components``: (name, value, weight)."""

    valid: bool
    raw: float
    components: tuple[tuple[str, float, float], ...]
    flags: tuple[str, ...]
    invalid_reason: str = ""


def digest(spec: RewardConfig) -> str:
    """SHA-256 of the specification in canonical JSON: the same rules have the same digest."""
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def score(evidence: events_pb2.Evidence, spec: RewardConfig) -> Score:
    """The score of one rollout.

    Raises:
        ContractError: an evidence value that counts is missing or not finite.
    """
    if evidence.validity != events_pb2.VALIDITY_VALID:
        reason = evidence.invalid_reason or "no evidence"
        return Score(valid=False, raw=0.0, components=(), flags=(), invalid_reason=reason)
    values = {item.name: item.value for item in evidence.items}
    components = tuple(
        (c.name, _value(values, c.evidence, f"component {c.name!r}"), c.weight)
        for c in spec.components
    )
    raw = math.fsum(value * weight for _, value, weight in components)
    flags = []
    for gate in spec.gates:
        if _value(values, gate.evidence, "a gate") < gate.at_least:
            raw = gate.value
            flags.append(f"gate:{gate.evidence}")
    clipped = min(spec.clip_max, max(spec.clip_min, raw))
    if clipped != raw:
        flags.append("clipped")
    return Score(valid=True, raw=clipped, components=components, flags=tuple(flags))


def _value(values: dict[str, float], name: str, user: str) -> float:
    if name not in values:
        raise ContractError(
            f"{user} needs the evidence {name!r}, which the verifier did not give",
            hint=f"evidence given: {', '.join(sorted(values)) or 'none'}; correct the reward spec",
        )
    if not math.isfinite(values[name]):
        raise ContractError(f"evidence {name!r} is {values[name]}, not a number")
    return values[name]
