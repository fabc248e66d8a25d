"""Values that no column can hold are broken events, not crashes."""

from __future__ import annotations

import pytest

from rollstream import ids
from rollstream.errors import ContractError
from rollstream.topics import TASKS_SHORT
from tests.golden.record import example
from trajectories.rows import COLUMNS, Origin, rows_of

ORIGIN = Origin(log="log", topic=TASKS_SHORT.name, partition=0, offset=0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(10**17, "no time"), (-(10**11), "no time"), (10**10, "out of range: 1900 to 2261")],
)
def test_times_out_of_range(seconds: int, words: str) -> None:
    task = example(TASKS_SHORT)
    task.header.occurred_at.seconds = seconds  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match=words):
        rows_of(task, ORIGIN)


def test_a_group_without_bounds() -> None:
    task = example(TASKS_SHORT)
    task.group_size = 1 << 31  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="asks for 2147483648 rollouts.*at most 65536"):
        rows_of(task, ORIGIN)


def test_a_task_names_its_rollouts() -> None:
    task = example(TASKS_SHORT)
    task.group_size = 3  # type: ignore[attr-defined]
    ((_, row),) = rows_of(task, ORIGIN)
    named = row[COLUMNS["tasks"].index("rollout_ids")]
    assert named == [ids.rollout_id(task.task_id, i) for i in range(3)]  # type: ignore[attr-defined]
