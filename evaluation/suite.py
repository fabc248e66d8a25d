"""One suite at one policy version: which tasks, what has come back, what it comes to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream import codecs, ids
from rollstream.v1 import events_pb2


@dataclass(slots=True, kw_only=True)
class SuiteRun:
    """``outstanding``: task id -> domain of the tasks without a result."""

    run_id: str
    suite: str
    version: int
    baseline: bool
    final: bool
    outstanding: dict[str, str] = field(default_factory=dict)
    results: dict[str, events_pb2.EvaluationResult] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.outstanding

    def take(self, scored: events_pb2.ScoredTrajectory) -> events_pb2.EvaluationResult | None:
        """The result of one task, when it is one of ours and new."""
        if scored.task_id not in self.outstanding:
            return None
        del self.outstanding[scored.task_id]
        result = self._result(
            task_id=scored.task_id,
            domain=scored.domain,
            rollout_id=scored.rollout_id,
            score=scored.raw if scored.validity == events_pb2.VALIDITY_VALID else 0.0,
            validity=scored.validity,
            invalid_reason=scored.invalid_reason,
        )
        self.results[scored.task_id] = result
        return result

    def give_up(self) -> list[events_pb2.EvaluationResult]:
        """The time is up: what has not come back is invalid."""
        missing = [
            self._result(
                task_id=task_id,
                domain=domain,
                validity=events_pb2.VALIDITY_INVALID,
                invalid_reason="no result within evaluation.timeout_s",
            )
            for task_id, domain in self.outstanding.items()
        ]
        self.outstanding.clear()
        self.results.update({result.task_id: result for result in missing})
        return missing

    def total(self) -> events_pb2.EvaluationResult:
        """The mean over the valid results; INVALID with the reason when there are none."""
        scores = [r.score for r in valid(self.results.values())]
        total = self._result(
            task_id="",
            domain="",
            score=sum(scores) / len(scores) if scores else 0.0,
            validity=events_pb2.VALIDITY_VALID if scores else events_pb2.VALIDITY_INVALID,
            invalid_reason="" if scores else "no valid result",
        )
        total.tasks, total.baseline, total.final = len(scores), self.baseline, self.final
        return total

    def _result(
        self,
        *,
        task_id: str,
        domain: str,
        rollout_id: str = "",
        score: float = 0.0,
        validity: events_pb2.Validity,
        invalid_reason: str = "",
    ) -> events_pb2.EvaluationResult:
        event_id = ids.event_id("EvaluationResult", self.suite, self.version, task_id)
        return events_pb2.EvaluationResult(
            header=codecs.header(self.run_id, event_id),
            suite=self.suite,
            domain=domain,
            task_id=task_id,
            rollout_id=rollout_id,
            policy_version=self.version,
            score=score,
            validity=validity,
            invalid_reason=invalid_reason,
        )


def valid(
    results: Iterable[events_pb2.EvaluationResult],
) -> list[events_pb2.EvaluationResult]:
    """The results that count."""
    return [r for r in results if r.validity == events_pb2.VALIDITY_VALID]
