"""The low watermark never passes a record that is not done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollstream.bus.watermark import Watermark


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
    stop=st.integers(0, 40),
)
def test_what_is_not_done_is_read_again(gaps: list[int], order, stop: int) -> None:  # type: ignore[no-untyped-def]
    offsets = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    mark = Watermark(offsets[0])
    for offset in offsets:
        mark.fetched(offset)
    shuffled = offsets[:]
    order.shuffle(shuffled)
    done = shuffled[:stop]
    for offset in done:
        mark.done(offset)
        mark.done(offset)
    pending = [offset for offset in offsets if offset not in done]
    assert mark.position == (pending[0] if pending else offsets[-1] + 1)
    assert mark.outstanding == len(pending)


def test_unknown_offsets_change_nothing() -> None:
    mark = Watermark(5)
    mark.done(4)
    mark.done(99)
    mark.fetched(5)
    assert (mark.position, mark.outstanding) == (5, 1)
