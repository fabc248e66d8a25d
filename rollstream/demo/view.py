"""The run on a terminal: a live Rich view, or plain lines where there is no terminal.

Pure functions of the run state; they are called a few times a second and never wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollstream.demo.state import RunState

_STATE_STYLES = {
    "ready": "green",
    "not ready": "yellow",
    "starting": "yellow",
    "waiting": "dim",
    "restarting": "bold yellow",
    "stopped": "dim",
    "failed": "bold red",
    "down": "bold red",
}
_CURVE_HEIGHT = 9
_CURVE_WIDTH = 64
# Eighths of a cell, from empty to full.
_BLOCKS = " ▁▂▃▄▅▆▇█"


def render(state: RunState, *, steps_total: int, sft_total: int) -> RenderableType:
    """The whole view."""
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(
        Text.assemble(("Rollstream ", "bold"), (state.run_id, "cyan"), f"  {state.phase}"),
        Text(f"{_clock(state.elapsed_s)}   {state.memory_bytes / 2**30:.1f} GiB", style="dim"),
    )
    parts: list[RenderableType] = [
        head,
        _progress(state, steps_total=steps_total, sft_total=sft_total),
        _stages(state),
        _curve_panel(state),
        _facts(state),
    ]
    if state.last_dead_letter:
        parts.append(Text(f"dead letter: {state.last_dead_letter}"[:200], style="red"))
    return Group(*parts)


def line(state: RunState, *, steps_total: int, sft_total: int) -> str:
    """One plain line that says where the run stands."""
    trainer = state.stats.get("trainer", {})
    parts = [f"[{_clock(state.elapsed_s)}] {state.phase}"]
    if not state.versions:
        parts.append(f"warm-up {trainer.get('sft_step', 0):.0f}/{sft_total}")
    if state.steps:
        last = state.steps[-1]
        parts.append(
            f"step {len(state.steps)}/{steps_total} reward {last.reward:.2f}"
            f" staleness {last.staleness}"
        )
    parts += [
        f"{label} {state.rates[name]:.1f}/s"
        for name, label in (("rollouts", "rollouts"), ("sandboxes", "execs"), ("sink", "rows"))
        if state.rates.get(name)
    ]
    if state.dead_letters:
        parts.append(f"dead letters {state.dead_letters}")
    down = [f"{n} {s}" for n, s in state.states.items() if s in ("restarting", "failed", "down")]
    return "  ".join(parts + down)


def _progress(state: RunState, *, steps_total: int, sft_total: int) -> RenderableType:
    done_sft = sft_total if state.versions else state.stats.get("trainer", {}).get("sft_step", 0.0)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        "warm-up",
        ProgressBar(total=max(1, sft_total), completed=done_sft, width=24),
        f"{done_sft:.0f}/{sft_total}",
        "  RL",
        ProgressBar(total=max(1, steps_total), completed=len(state.steps), width=24),
        f"{len(state.steps)}/{steps_total}",
    )
    return grid


def _stages(state: RunState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage", min_width=11)
    table.add_column("state", min_width=10)
    table.add_column("rate", justify="right", min_width=15)
    table.add_column("lag", justify="right", min_width=6)
    table.add_column("")
    order = ("kafka", "producers", "rollouts", "sandboxes", "processors", "trainer", "evaluation")
    for name in (*order, "sink", "store"):
        if name not in state.states:
            continue
        stats = state.stats.get(name, {})
        shown = state.states[name]
        rate = state.rates.get(name)
        unit = _UNITS.get(name, "")
        table.add_row(
            name,
            Text(shown, style=_STATE_STYLES.get(shown, "")),
            f"{rate:.1f} {unit}/s" if rate is not None and unit else "",
            f"{stats['lag_records']:.0f}" if "lag_records" in stats else "",
            Text(_note(name, stats), style="dim"),
        )
    return table


_UNITS = {
    "producers": "tasks",
    "rollouts": "rollouts",
    "sandboxes": "execs",
    "processors": "events",
    "trainer": "samples",
    "sink": "rows",
}


def _note(name: str, stats: Mapping[str, float]) -> str:
    """What is worth saying about one service, from its numbers."""

    def show(key: str, text: str) -> str:
        # A version below 0 is none yet.
        return text.format(stats[key]) if stats.get(key, -1) >= 0 else ""

    notes = {
        "producers": [
            show("groups_in_flight", "{:.0f} groups in flight"),
            "paused" if stats.get("paused") else "",
        ],
        "rollouts": [
            show("rollouts_in_flight", "{:.0f} in flight"),
            show("tokens_per_s", "{:.0f} tokens/s"),
            show("policy_version", "policy v{:.0f}"),
        ],
        "sandboxes": [
            show("sessions_live", "{:.0f} live"),
            show("pool_ready", "{:.0f} warm"),
            show("acquire_ms_p50", "acquire {:.1f} ms"),
        ],
        "processors": [show("groups_open", "{:.0f} groups open")],
        "trainer": [
            show("groups_buffered", "{:.0f} groups buffered"),
            show("policy_version", "policy v{:.0f}"),
        ],
        "evaluation": [
            show("outstanding", "{:.0f} outstanding"),
            show("last_score", "last {:.2f}"),
        ],
    }
    return "  ".join(note for note in notes.get(name, []) if note)


def _curve_panel(state: RunState) -> Panel:
    rewards = [point.reward for point in state.steps]
    title = "mean reward by optimiser step"
    if not rewards:
        return Panel(Text("no optimiser step yet", style="dim"), title=title, title_align="left")
    return Panel(Text("\n".join(curve(rewards)), style="cyan"), title=title, title_align="left")


def curve(
    values: list[float], *, height: int = _CURVE_HEIGHT, width: int = _CURVE_WIDTH
) -> list[str]:
    """A filled chart of values in [0, 1]: ``height`` lines with an axis, newest values last."""
    step = max(1, -(-len(values) // width))
    columns = [
        sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)
    ]
    repeat = max(1, min(3, width // len(columns)))
    lines = []
    for row in range(height, 0, -1):
        cells = ""
        for value in columns:
            eighths = round((min(1.0, max(0.0, value)) * height - (row - 1)) * 8)
            cells += _BLOCKS[min(8, max(0, eighths))] * repeat
        label = {height: "1.0", (height + 1) // 2: "0.5", 1: "0.0"}.get(row, "   ")
        lines.append(f"{label} │{cells}")
    return lines


def _facts(state: RunState) -> Text:
    parts = []
    if state.baseline:
        parts.append(f"held-out before {state.baseline.score:.3f}")
    if state.final:
        parts.append(f"after {state.final.score:.3f}")
    if state.steps:
        highest = max(s.staleness for s in state.steps)
        parts.append(f"staleness last {state.steps[-1].staleness} max {highest}")
        parts.append(f"trained {sum(s.samples for s in state.steps)} samples")
    parts.append(f"{len(state.versions)} policy versions")
    return Text("  ·  ".join(parts))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
