"""What a benchmark suite reports: named figures, medians with the number of measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results.json"


@dataclass(slots=True)
class Report:
    """Figures by name."""

    figures: dict[str, dict[str, object]] = field(default_factory=dict)

    def add(self, name: str, value: float, *, unit: str, n: int) -> None:
        """One figure: ``n`` measurements stand behind it."""
        self.figures[name] = {"value": round(float(value), 4), "unit": unit, "n": n}

    def median(self, name: str, values: Sequence[float], *, unit: str) -> float:
        """The median of several measurements, which is also returned."""
        value = statistics.median(values)
        self.add(name, value, unit=unit, n=len(values))
        return value


Suite = Callable[[Report], None]


def merge(figures: dict[str, dict[str, object]], path: Path = RESULTS) -> None:
    """Write figures into the results file; the other names stay."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, **figures}, indent=1, sort_keys=True) + "\n", "utf-8")
