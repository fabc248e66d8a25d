"""Which domain the next task comes from, and the tasks of each domain in order.

The n-th choice is a function of (seed, n, weights), so that a restart goes on with the same
sequence. A domain whose source fails is parked with the reason; one whose data end begins its next
epoch; the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from environments.base import Environment, RejectedTask, TaskSpec
from environments.tasks import TaskOrigin
from rollstream.config.model import DomainConfig
from rollstream.errors import RollstreamError

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class DomainCursor:
    """Where one domain stands. ``parked``: why it gives no tasks any more, or empty."""

    config: DomainConfig
    environment: Environment
    index: int = 0
    epoch: int = 0
    parked: str = ""
    _iterator: Iterator[TaskSpec | RejectedTask] | None = field(default=None)

    def next(self, seed: int) -> tuple[int, int, TaskSpec | RejectedTask] | None:
        """The next (index, epoch, task), or None when the domain is parked now."""
        # Twice: a source that has ended begins its next epoch.
        for _ in range(2):
            try:
                if self._iterator is None:
                    self._iterator = self.environment.tasks(
                        seed=seed, split="train", start=self.index
                    )
                item = next(self._iterator)
            except StopIteration:
                if self.index == 0:
                    break
                self.index, self.epoch, self._iterator = 0, self.epoch + 1, None
                continue
            except RollstreamError as error:
                self._park(str(error))
                return None
            except Exception as error:
                log.exception("source crashed", domain=self.config.name)
                self._park(f"its source crashed: {error!r}")
                return None
            self.index += 1
            return self.index - 1, self.epoch, item
        self._park("its source has no tasks")
        return None

    def seek(self, *, index: int, epoch: int) -> None:
        """Go on after the task (index, epoch), if that is further than here."""
        if (epoch, index + 1) > (self.epoch, self.index):
            self.epoch, self.index, self._iterator = epoch, index + 1, None

    def _park(self, reason: str) -> None:
        self.parked = reason
        log.warning("domain parked", domain=self.config.name, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The next task of the run: its domain, where it came from, and the task itself."""

    cursor: DomainCursor
    origin: TaskOrigin
    item: TaskSpec | RejectedTask


class Sampler:
    """Draws tasks by the domains' weights."""

    def __init__(self, cursors: list[DomainCursor], *, run_id: str, seed: int) -> None:
        self.cursors = cursors
        self.drawn = 0
        self._run_id, self._seed = run_id, seed

    def draw(self) -> Drawn | None:
        """The next task, or None when every domain is parked or has no weight."""
        while True:
            live = [c for c in self.cursors if not c.parked and c.config.weight > 0]
            if not live:
                return None
            rng = random.Random(f"{self._seed}-{self.drawn}")
            cursor = rng.choices(live, [c.config.weight for c in live])[0]
            found = cursor.next(self._seed)
            if found is None:
                continue
            self.drawn += 1
            index, epoch, item = found
            origin = TaskOrigin(
                run_id=self._run_id,
                source=f"{cursor.config.name}/{cursor.environment.source}",
                index=index,
                epoch=epoch,
                seed=self._seed,
            )
            return Drawn(cursor=cursor, origin=origin, item=item)
