"""What a run comes to: the books from ``rollstream audit``, the scores, what to look at next."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollstream.demo.state import RunState
from rollstream.errors import InfraError

_AUDIT_TIMEOUT_S = 120.0

QUERIES = (
    "select domain, count(), avg(reward) from trajectories_scored group by domain",
    (
        "select policy_version_max as version, count() as rollouts, round(avg(reward), 3) as reward"
        " from trajectories_scored where purpose = 'train' group by version order by version"
    ),
    "select state, drop_reason, count() from samples group by state, drop_reason order by 3 desc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``summary.json``, field for field.

    Rewards are held-out means (greedy), None when not measured.
    """

    run_id: str
    seed: int
    engine: str
    reward_before: float | None
    reward_after: float | None
    produced: int
    trained: int
    dropped: dict[str, int]
    dead_lettered: int
    in_flight: int
    balanced: bool
    problems: list[str]
    policy_versions: int
    max_staleness: int
    optimiser_steps: int
    wall_s: float
    peak_memory_bytes: int

    @property
    def rose(self) -> bool:
        """Whether the held-out reward after training is above the one before."""
        before, after = self.reward_before, self.reward_after
        return before is not None and after is not None and after > before

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def audit(run_dir: Path) -> dict[str, Any]:
    """The books as ``rollstream audit --json`` states them.

    Raises:
        InfraError: the command failed to state any.
    """
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", "audit", "--run", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=_AUDIT_TIMEOUT_S,
        check=False,
    )
    try:
        books: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise InfraError(
            f"the audit gave no books (status {done.returncode}): {done.stderr.strip()[-500:]}",
            hint=f"run: rollstream audit --run {run_dir}",
        ) from error
    return books


def summarise(state: RunState, books: dict[str, Any], *, engine: str) -> Summary:
    """The summary of a run from its state and its books."""
    return Summary(
        run_id=state.run_id,
        seed=state.seed,
        engine=engine,
        reward_before=state.baseline.score if state.baseline else None,
        reward_after=state.final.score if state.final else None,
        produced=int(books["produced"]),
        trained=int(books["trained"]),
        dropped={str(k): int(v) for k, v in books["dropped"].items()},
        dead_lettered=int(books["dead_lettered"]),
        in_flight=int(books["in_flight"]),
        balanced=bool(books["balanced"]),
        problems=[str(p) for p in books.get("problems", [])],
        policy_versions=len(state.versions),
        max_staleness=max((s.staleness for s in state.steps), default=0),
        optimiser_steps=len(state.steps),
        wall_s=round(state.elapsed_s, 1),
        peak_memory_bytes=state.peak_memory_bytes,
    )


def show(summary: Summary, run_dir: Path, console: Console) -> None:
    """Print the summary for a person."""
    table = Table(title=f"run {summary.run_id}", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column()
    before, after = summary.reward_before, summary.reward_after
    if before is not None and after is not None:
        style = "bold green" if summary.rose else "bold red"
        table.add_row(
            "held-out reward",
            f"{before:.3f} -> [{style}]{after:.3f}[/] ({after - before:+.3f}, greedy)",
        )
    else:
        table.add_row("held-out reward", "[red]not measured[/]")
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(summary.dropped.items())) or "none"
    table.add_row("samples produced", str(summary.produced))
    table.add_row("  trained", str(summary.trained))
    table.add_row("  dropped", f"{sum(summary.dropped.values())} ({dropped})")
    table.add_row("  dead-lettered", str(summary.dead_lettered))
    table.add_row("  in flight", str(summary.in_flight))
    table.add_row(
        "books", "[green]balanced[/]" if summary.balanced else "[bold red]NOT balanced[/]"
    )
    for problem in summary.problems[:10]:
        table.add_row("", f"[red]{problem}[/]")
    table.add_row(
        "policy",
        f"{summary.optimiser_steps} optimiser steps, {summary.policy_versions} versions, "
        f"max staleness {summary.max_staleness}",
    )
    table.add_row(
        "run", f"{summary.wall_s:.0f} s, peak memory {summary.peak_memory_bytes / 2**30:.1f} GiB"
    )
    table.add_row("folder", str(run_dir))
    console.print()
    console.print(table)
    console.print("\nAsk the data (the store starts by itself):")
    for query in QUERIES:
        console.print(f'  rollstream sql "{query}"', style="cyan", highlight=False, soft_wrap=True)
