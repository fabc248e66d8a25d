"""Which domain the next task comes from, and the tasks of each domain in order.

The n-th choice is a function of (seed, n, weights), where n counts the tasks that were produced: a
restart goes on with the same sequence. A domain whose source fails is parked with the reason; one
whose data end begins its next epoch; the others go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from environments.base import Environment, RejectedTask, TaskSpec
from environments.tasks import TaskOrigin
from rollstream.config.model import DomainConfig
from rollstream.errors import RollstreamError

log = structlog.get_logger(__name__)

# A parked domain that is chosen is chosen again, so that parking changes no other choice; with 64
# tries the rest is reached unless it has less than a tenth of the weight (0.9^64 = 0.1 %), and then
# only among the rest.
_CHOICES = 64


@dataclass(slots=True, kw_only=True)
class DomainCursor:
    """Where one domain stands. ``parked``: why it gives no tasks any more, or empty."""

    config: DomainConfig
    environment: Environment
    index: int = 0
    epoch: int = 0
    parked: str = ""
    _iterator: Iterator[TaskSpec | RejectedTask] | None = field(default=None)
    # Whether this epoch has given a task; a resumed one has.
    _fruitful: bool = field(default=False)

    def next(self, seed: int) -> tuple[int, int, TaskSpec | RejectedTask] | None:
        """The next (index, epoch, task), or None when the domain is parked now.

        What is no task is reported in the first epoch only: it would be the same letter again.
        """
        while not self.parked:
            item = self._pull(seed)
            if item is None:
                self._end_epoch()
                continue
            self.index += 1
            if isinstance(item, TaskSpec):
                self._fruitful = True
            elif self.epoch:
                continue
            return self.index - 1, self.epoch, item
        return None

    def seek(self, *, index: int, epoch: int) -> None:
        """Go on with the task (index, epoch), if that is further than here."""
        if (epoch, index) > (self.epoch, self.index):
            self.epoch, self.index, self._iterator = epoch, index, None
            self._fruitful = True

    def _pull(self, seed: int) -> TaskSpec | RejectedTask | None:
        """The next item of the source; None at its end, or when it has failed (and is parked)."""
        try:
            if self._iterator is None:
                self._iterator = self.environment.tasks(seed=seed, split="train", start=self.index)
            return next(self._iterator, None)
        except RollstreamError as error:
            self._park(str(error))
        except Exception as error:
            log.exception("source crashed", domain=self.config.name)
            self._park(f"its source crashed: {error!r}")
        return None

    def _end_epoch(self) -> None:
        if self.parked:
            return
        if not self._fruitful:
            self._park(f"its source {self.environment.source} has no valid task")
            return
        log.info("epoch ended", domain=self.config.name, epoch=self.epoch, tasks=self.index)
        self.index, self.epoch, self._iterator = 0, self.epoch + 1, None
        self._fruitful = False

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
    """Draws tasks by the domains' weights. It keeps nothing but the cursors."""

    def __init__(self, cursors: Sequence[DomainCursor], *, run_id: str, seed: int) -> None:
        self.cursors = cursors
        self._run_id, self._seed = run_id, seed

    def draw(self, n: int) -> Drawn | None:
        """The task that follows ``n`` produced ones, or what stands in its place and is none.

        None when every domain is parked or has no weight.
        """
        rng = random.Random(f"{self._seed}-{n}")
        while (cursor := self._choose(rng)) is not None:
            found = cursor.next(self._seed)
            if found is not None:
                index, epoch, item = found
                return Drawn(cursor=cursor, origin=self._origin(cursor, index, epoch), item=item)
        return None

    @staticmethod
    def source(cursor: DomainCursor) -> str:
        """What its tasks say that they come from: two domains may use the same data."""
        return f"{cursor.config.name}/{cursor.environment.source}"

    def _choose(self, rng: random.Random) -> DomainCursor | None:
        weighed = [c for c in self.cursors if c.config.weight > 0]
        live = [c for c in weighed if not c.parked]
        if not live:
            return None
        for _ in range(_CHOICES):
            cursor = rng.choices(weighed, [c.config.weight for c in weighed])[0]
            if not cursor.parked:
                return cursor
        return rng.choices(live, [c.config.weight for c in live])[0]

    def _origin(self, cursor: DomainCursor, index: int, epoch: int) -> TaskOrigin:
        return TaskOrigin(
            run_id=self._run_id,
            source=self.source(cursor),
            index=index,
            epoch=epoch,
            seed=self._seed,
        )
