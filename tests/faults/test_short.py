"""A short campaign: every part is killed once while the pipeline runs, and the books balance.

``make faults`` is the long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.supervisor.services import SERVICES
from tests.faults.campaign import campaign, config_of
from tests.faults.strikes import BROKER


@pytest.mark.timeout(900)
async def test_whatever_is_killed_the_books_balance(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", seed=1)
    targets = (*SERVICES, BROKER)
    outcome = await campaign(config, targets=targets, strikes=len(targets))
    assert outcome.problems == ()
    assert (outcome.lost, outcome.doubled) == (0, 0)
    # Every part was struck, before the last optimiser step.
    assert outcome.strikes == len(targets)
    assert outcome.trained > 0
    assert outcome.max_staleness <= 2
