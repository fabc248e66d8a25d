"""What the store says against itself beyond the books: staleness and lineages of steps.

A finding is counted in the store, so that an audit holds a few examples and not the ids of a run.
It is a ``problem`` when it contradicts a promise; otherwise it is there to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.config import Config
from rollstream.config.model import RlStage

_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``count`` of ids that ``sql`` lists in full; ``worst`` is the largest measure among them."""

    name: str
    what: str
    count: int
    worst: int
    examples: tuple[str, ...]
    sql: str
    problem: bool

    @property
    def words(self) -> str:
        return (
            f"{self.count} {self.what} (worst {self.worst}): {', '.join(self.examples)}\n"
            f'  all: rollstream sql "{self.sql}"'
        )


def staleness_sql(run: str, bounds: Mapping[str, int]) -> str:
    """Samples that were trained beyond the bound of their stage: (id, staleness)."""
    beyond = " OR ".join(
        f"(t.stage = {_text(stage)} AND s.staleness > {bound})" for stage, bound in bounds.items()
    )
    return (
        "SELECT s.rollout_id AS id, max(s.staleness) AS measure FROM training_samples AS s FINAL"
        " INNER JOIN training_steps AS t FINAL ON t.run_id = s.run_id AND t.event_id = s.event_id"
        f" WHERE s.run_id = {_text(run)} AND s.drop_reason = '' AND ({beyond or '0'}) GROUP BY id"
    )


def groups_sql(run: str) -> str:
    """Groups that more than one step event trained: (id, events)."""
    return (
        "SELECT group_id AS id, uniqExact(event_id) AS measure FROM training_samples FINAL"
        f" WHERE run_id = {_text(run)} AND drop_reason = '' GROUP BY id HAVING measure > 1"
    )


def lineages_sql(run: str) -> str:
    """Step events under whose id more samples stand than any one of them said: (id, surplus).

    The id of a step is its number, so that a second lineage says the same id with other samples.
    Their rows stay, while the step's own row is replaced.
    """
    return (
        "SELECT s.event_id AS id, toInt64(s.uses) - toInt64(t.samples) AS measure FROM"
        " (SELECT event_id, count() AS uses FROM training_samples FINAL"
        f" WHERE run_id = {_text(run)} GROUP BY event_id) AS s INNER JOIN"
        f" (SELECT event_id, samples FROM training_steps FINAL WHERE run_id = {_text(run)}) AS t"
        " ON t.event_id = s.event_id WHERE measure > 0"
    )


def read_findings(client: Any, config: Config) -> tuple[Finding, ...]:
    """The findings of a run, from the store; those that count nothing are left out."""
    run = config.run.id
    bounds: dict[str, int] = {}
    for stage in config.trainer.stages:
        if isinstance(stage, RlStage):
            bounds[stage.name] = max(bounds.get(stage.name, 0), stage.max_staleness)
    asked = [
        ("stale", "samples trained beyond max_staleness", staleness_sql(run, bounds)),
        ("group_in_two_steps", "groups trained by two step events", groups_sql(run)),
        ("lineages", "steps said by two lineages, with other samples", lineages_sql(run)),
    ]
    found = [_ask(client, name, what, sql) for name, what, sql in asked]
    return tuple(finding for finding in found if finding.count)


def _ask(client: Any, name: str, what: str, sql: str) -> Finding:
    query = (
        "SELECT count(), max(toInt64(measure)),"
        f" arraySlice(arraySort(groupArraySorted({_EXAMPLES})(id)), 1, {_EXAMPLES}) FROM ({sql})"
    )
    ((count, worst, examples),) = client.query(query).result_rows
    return Finding(
        name=name, what=what, count=count, worst=worst, examples=tuple(examples), sql=sql,
        problem=True,
    )  # fmt: skip


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
