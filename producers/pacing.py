"""How many tasks may be produced now: a pure function of what the topics say.

The staleness bound is kept where it costs nothing: a group that could only be trained on too late
is not begun. With at most ``(max_staleness + 1) * groups_per_step`` usable groups on their way, a
group that starts now is used at most ``max_staleness`` versions later (first in, first out); the
same rule is equation 3 of AReaL (arXiv:2505.24298). What comes later all the same is dropped by the
trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollstream.v1 import events_pb2


@dataclass(slots=True, kw_only=True)
class Progress:
    """What is known of the run's groups; sets of ids, so that repeats change nothing."""

    produced: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    unusable: set[str] = field(default_factory=set)
    consumed: set[str] = field(default_factory=set)
    final: bool = False
    baseline_evaluated: bool = False

    def on_group(self, group: events_pb2.TrainingGroup) -> None:
        """A group was closed; one that was dropped will never reach the trainer."""
        self.closed.add(group.group_id)
        if group.drop_reason or all(s.drop_reason for s in group.samples):
            self.unusable.add(group.group_id)

    def on_step(self, step: events_pb2.TrainingStep) -> None:
        """The trainer used groups, or dropped them."""
        self.consumed.update(use.group_id for use in step.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The limits: usable groups on their way, and groups not yet closed."""

    usable: int
    open: int


def allowance(progress: Progress, pace: Pace) -> int:
    """Tasks that may be produced now (0 or more)."""
    if progress.final:
        return 0
    produced = progress.produced
    usable = len(produced) - len(produced & (progress.unusable | progress.consumed))
    still_open = len(produced) - len(produced & progress.closed)
    return max(0, min(pace.usable - usable, pace.open - still_open))
