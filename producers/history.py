"""Where each domain goes on after a restart: a pure function of the tasks that are on the topics.

A batch of tasks goes to several partitions, and a kill may keep some of it and lose the rest. So a
domain does not go on after its last task: with ``batch`` tasks in flight at most, whatever is
missing comes after the ``batch``-th from the end. The tasks from there on are made again, and those
that are known are not sent twice.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from rollstream.v1 import events_pb2


@dataclass(slots=True, kw_only=True)
class History:
    """The last ``batch`` positions of each source, as (epoch, index)."""

    batch: int
    _last: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def on_task(self, task: events_pb2.Task) -> None:
        """A task was produced; each is told once."""
        last = self._last.setdefault(task.source, [])
        heapq.heappush(last, (task.epoch, task.index))
        if len(last) > self.batch:
            heapq.heappop(last)

    def resume_at(self, source: str) -> tuple[int, int]:
        """(epoch, index) from which the tasks of ``source`` are to be made again."""
        last = self._last.get(source, [])
        return last[0] if len(last) == self.batch else (0, 0)
