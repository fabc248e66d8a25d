"""What the demo knows about its run: a plain value that the view draws and the summary reads.

Filled by ``feed`` from the topics and the services' ``/stats``; nothing here does I/O.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.v1 import events_pb2, policy_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimiser step as drawn: mean reward, greatest staleness, samples trained."""

    step: int
    at_s: float
    reward: float
    staleness: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    policy_version: int
    score: float
    tasks: int
    baseline: bool
    final: bool


@dataclass(slots=True, kw_only=True)
class RunState:
    """The run so far.

    ``stats``: the latest numbers of each service; ``states``: its process state.
    """

    run_id: str
    seed: int
    started_at: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    steps: list[StepPoint] = field(default_factory=list)
    evaluations: dict[int, EvaluationPoint] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    final_version: int | None = None
    dead_letters: int = 0
    last_dead_letter: str = ""
    stats: dict[str, Mapping[str, float]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def baseline(self) -> EvaluationPoint | None:
        return next((e for e in self.evaluations.values() if e.baseline), None)

    @property
    def final(self) -> EvaluationPoint | None:
        return next((e for e in self.evaluations.values() if e.final), None)

    def on_step(self, event: events_pb2.TrainingStep) -> None:
        """Take in a ``training.steps`` event; a repeat and what a drain records change nothing."""
        trained = [s for s in event.samples if not s.drop_reason]
        known = self.steps[-1].step if self.steps else -1
        if not trained or event.step <= known:
            return
        self.steps.append(
            StepPoint(
                step=event.step,
                at_s=self.elapsed_s,
                reward=event.metrics.get(
                    "reward_mean", sum(s.reward for s in trained) / len(trained)
                ),
                staleness=max(s.staleness for s in trained),
                samples=len(trained),
                loss=event.metrics.get("loss", 0.0),
            )
        )

    def on_evaluation(self, event: events_pb2.EvaluationResult) -> None:
        """Take in an ``evaluations`` event; only the totals of a suite are drawn."""
        if event.task_id:
            return
        self.evaluations[event.policy_version] = EvaluationPoint(
            policy_version=event.policy_version,
            score=event.score,
            tasks=event.tasks,
            baseline=event.baseline,
            final=event.final,
        )

    def on_version(self, event: policy_pb2.PolicyVersion) -> None:
        """Take in a ``policy.versions`` event."""
        self.versions.add(event.version)
        if event.final:
            self.final_version = event.version

    def on_dead_letter(self, event: events_pb2.DeadLetter) -> None:
        """Take in a ``dead-letters`` event."""
        self.dead_letters += 1
        self.last_dead_letter = f"{event.service}: {event.error}"
