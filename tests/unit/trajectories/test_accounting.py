"""The books: every contradiction is found, and every sample is in one column."""

from __future__ import annotations

import pytest

from trajectories.accounting import Ledger, balance

PRODUCED = {f"r{i}": "g1" if i < 5 else "g2" for i in range(6)}
CLOSED = {"r0": "", "r1": "", "r2": "zero_variance", "r3": "missing", "r4": ""}
TRAINED = {"r0": frozenset({"e1"})}
REFUSED = {"r1": "stale"}


def _ledger(**changes: object) -> Ledger:
    fixed: dict[str, object] = {
        "produced": PRODUCED, "closed": CLOSED, "trained": TRAINED, "refused": REFUSED,
        "dead": frozenset({"r3"}),
    }  # fmt: skip
    return Ledger(**{**fixed, **changes})  # type: ignore[arg-type]


def test_every_sample_is_in_one_column() -> None:
    books = balance(_ledger())
    assert (books.produced, books.trained, books.dead_lettered) == (6, 1, 1)
    assert books.dropped == {"stale": 1, "zero_variance": 1}
    # r4 was handed to the trainer and has no record; r5 is in no closed group.
    assert books.in_flight == 2
    assert books.balanced


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trained": {"r0": frozenset({"e1", "e2"})}}, "trained in two steps"),
        ({"refused": {"r0": "stale"}}, "trained and dropped by the trainer"),
        ({"trained": {"r2": frozenset({"e"})}}, "their group had dropped them"),
        ({"closed": {**CLOSED, "x": ""}}, "finished and never produced"),
        ({"produced": dict.fromkeys(PRODUCED, "g1")}, "not listed by their closed group"),
        ({"trained": {"r5": frozenset({"e"})}}, "in no closed group"),
        ({"gaps": ("offsets 3..4 of t/0",)}, "offsets 3..4"),
    ],
)
def test_contradictions_unbalance_the_books(changes: dict[str, object], problem: str) -> None:
    books = balance(_ledger(**changes))
    assert not books.balanced
    assert any(problem in text for text in books.problems)
