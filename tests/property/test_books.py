"""Any run, honestly recorded, balances; any single lie about a sample is found or moves it in plain sight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from trajectories.accounting import Ledger, balance

GROUP_SIZE = 3
# How a group may end, and how a sample of a group that reached the trainer may.
ENDS = ("open", "dropped", "dead", "handed")
FATES = ("trained", "stale", "oversize", "invalid", "missing", "lost", "waiting")


@dataclass
class Run:
    """Books kept by hand while the ledger is made."""

    produced: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    trained: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    wanted: Counter[str] = field(default_factory=Counter)

    def add_group(self, group: str, end: str, fates: list[str]) -> None:
        for index, fate in enumerate(fates):
            sample = f"{group}/{index}"
            self.produced[sample] = group
            if end == "open":
                self.wanted["in_flight"] += 1
            elif end == "dead":
                self.dead.add(sample)
                self.wanted["dead"] += 1
            elif end == "dropped":
                self.closed[sample] = "zero_variance"
                self.wanted["zero_variance"] += 1
            else:
                self._hand_over(sample, fate)

    def _hand_over(self, sample: str, fate: str) -> None:
        self.closed[sample] = ""
        if fate == "trained":
            self.trained[sample] = frozenset({"step"})
        elif fate in ("stale", "oversize"):
            self.refused[sample] = fate
        elif fate in ("invalid", "missing"):
            self.closed[sample] = fate
        elif fate == "lost":
            # Dead-lettered, so that its group closed without it.
            self.closed[sample] = "missing"
            self.dead.add(sample)
        self.wanted[{"lost": "dead", "waiting": "in_flight"}.get(fate, fate)] += 1

    def ledger(self) -> Ledger:
        return Ledger(
            produced=self.produced, closed=self.closed, trained=self.trained,
            refused=self.refused, dead=frozenset(self.dead),
        )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> Run:
    run = Run()
    for number in range(draw(st.integers(0, 8))):
        fates = draw(st.lists(st.sampled_from(FATES), min_size=GROUP_SIZE, max_size=GROUP_SIZE))
        run.add_group(f"g{number}", draw(st.sampled_from(ENDS)), fates)
    return run


@given(run=runs())
def test_an_honest_run_balances(run: Run) -> None:
    books = balance(run.ledger())
    assert books.balanced, books.problems
    parts = Counter(books.dropped) + Counter(
        trained=books.trained, dead=books.dead_lettered, in_flight=books.in_flight
    )
    assert parts == run.wanted
    assert parts.total() == books.produced


@given(run=runs(), data=st.data())
def test_a_sample_that_is_trained_twice_or_was_dropped_or_never_made_is_found(
    run: Run, data: st.DataObject
) -> None:
    lie = data.draw(st.sampled_from(["twice", "after drop", "never made", "both"]))
    samples = {
        "twice": list(run.trained),
        "both": list(run.trained),
        "after drop": [s for s, reason in run.closed.items() if reason],
        "never made": list(run.closed),
    }[lie]
    if not samples:
        return
    sample = data.draw(st.sampled_from(samples))
    if lie == "twice":
        run.trained[sample] |= {"another step"}
    elif lie == "both":
        run.refused[sample] = "stale"
    elif lie == "after drop":
        run.trained[sample] = frozenset({"step"})
    else:
        del run.produced[sample]
    assert not balance(run.ledger()).balanced
