"""The reward curve as a PNG."""

from __future__ import annotations

from pathlib import Path

from rollstream.demo.state import RunState

_SMOOTH_STEPS = 5


def draw(state: RunState, path: Path) -> None:
    """Reward per optimiser step, its running mean, and the held-out scores, into ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    steps = [point.step for point in state.steps]
    rewards = [point.reward for point in state.steps]
    axes.plot(steps, rewards, color="#9db8d9", linewidth=1, marker="o", markersize=3, label="step")
    axes.plot(
        steps, _smooth(rewards), color="#1f5fa8", linewidth=2.2, label=f"mean of {_SMOOTH_STEPS}"
    )
    for point in state.evaluations.values():
        axes.scatter([point.policy_version], [point.score], color="#d1495b", zorder=5, s=60)
        axes.annotate(
            f"held-out {point.score:.2f}",
            (point.policy_version, point.score),
            textcoords="offset points",
            xytext=(-8 if point.final else 8, -16),
            ha="right" if point.final else "left",
            color="#d1495b",
            fontsize=10,
        )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{state.run_id}: reward while training", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: list[float]) -> list[float]:
    out = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - _SMOOTH_STEPS) : end]
        out.append(sum(window) / len(window))
    return out
