"""How many tasks may be produced now: a pure function of what the topics say.

The staleness bound is kept where it costs nothing: a group that could only be trained on too late
is not begun. With at most ``(max_staleness + 1) * groups_per_step`` usable groups on their way, a
group that starts now is used at most ``max_staleness`` versions later (first in, first out); the
same rule is equation 3 of AReaL (arXiv:2505.24298). What comes later all the same is dropped by the
trainer.

Invariant: a group leaves ``usable`` when it is used or can never be used, and ``open`` when nothing
more will come of its rollouts. Each leaves once, so that repeated events change nothing; events of
groups that are not ours are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream import ids
from rollstream.v1 import events_pb2, policy_pb2


@dataclass(slots=True, kw_only=True)
class Progress:
    """What is known of the run ``run_id``.

    ``produced``: ids of all groups ever produced. ``open``: those that are not closed, with the
    number of their samples. ``usable``: those that the trainer may still use. ``lost``: of open
    groups, the rollouts that ended as dead letters.
    """

    run_id: str
    produced: set[str] = field(default_factory=set)
    open: dict[str, int] = field(default_factory=dict)
    usable: set[str] = field(default_factory=set)
    lost: dict[str, set[str]] = field(default_factory=dict)
    final: bool = False
    baseline_evaluated: bool = False

    def on_task(self, task: events_pb2.Task) -> bool:
        """A training task was produced. False when it is known already."""
        if task.group_id in self.produced:
            return False
        self.produced.add(task.group_id)
        self.open[task.group_id] = task.group_size
        self.usable.add(task.group_id)
        return True

    def on_group(self, group: events_pb2.TrainingGroup) -> None:
        """A group was closed; one that was dropped will never reach the trainer."""
        self._close(group.group_id)
        if group.drop_reason or all(s.drop_reason for s in group.samples):
            self.usable.discard(group.group_id)

    def on_step(self, step: events_pb2.TrainingStep) -> None:
        """The trainer used groups, or dropped them."""
        self.usable.difference_update(use.group_id for use in step.samples)

    def on_dead_letter(self, letter: events_pb2.DeadLetter) -> None:
        """A task was given up, or one of its rollouts: with the last one the group is gone."""
        group = ids.group_id(letter.task_id)
        if group not in self.open:
            return
        if letter.rollout_id:
            lost = self.lost.setdefault(group, set())
            lost.add(letter.rollout_id)
            if len(lost) < self.open[group]:
                return
        self.give_up(group)

    def give_up(self, group: str) -> None:
        """Nothing will come of this group."""
        self._close(group)
        self.usable.discard(group)

    def on_version(self, version: policy_pb2.PolicyVersion) -> None:
        """A policy version was published; nothing comes after the final one."""
        self.final = self.final or version.final

    def on_result(self, result: events_pb2.EvaluationResult) -> None:
        """An evaluation result; the total of the baseline lets training begin."""
        self.baseline_evaluated |= result.baseline and not result.task_id

    def absorb(self, event: object) -> None:
        """Take note of any event of a topic that producers follow; of other runs nothing."""
        if getattr(event, "header", events_pb2.Header()).run_id != self.run_id:
            return
        match event:
            case events_pb2.TrainingGroup():
                self.on_group(event)
            case events_pb2.TrainingStep():
                self.on_step(event)
            case events_pb2.DeadLetter():
                self.on_dead_letter(event)
            case policy_pb2.PolicyVersion():
                self.on_version(event)
            case events_pb2.EvaluationResult():
                self.on_result(event)

    def numbers(self) -> Mapping[str, float]:
        return {"tasks_produced": len(self.produced), "groups_in_flight": len(self.open)}

    def _close(self, group: str) -> None:
        self.open.pop(group, None)
        self.lost.pop(group, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The limits: usable groups on their way, groups not yet closed, and tasks altogether (0 = no
    limit). ``after_baseline``: none before the baseline evaluation.
    """

    usable: int
    open: int
    tasks: int = 0
    after_baseline: bool = False


def allowance(progress: Progress, pace: Pace) -> int:
    """Tasks that may be produced now (0 or more)."""
    if progress.final or (pace.after_baseline and not progress.baseline_evaluated):
        return 0
    room = min(pace.usable - len(progress.usable), pace.open - len(progress.open))
    if pace.tasks:
        room = min(room, pace.tasks - len(progress.produced))
    return max(0, room)
