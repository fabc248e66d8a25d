"""Training tokens per second: one optimiser step on 128 sequences of about 75 tokens, the demo's
model, one thread.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np

from bench.report import Report
from rollstream.config import load
from trainer.packing import TrainSequence

NAMES = ("trainer.tokens_per_s",)
RUNS, SEQUENCES = 7, 128


def run(report: Report) -> None:
    from importlib.resources import files

    from trainer.session import TrainerSession

    with tempfile.TemporaryDirectory() as folder:
        demo = str(files("rollstream.demo") / "demo.toml")
        config = load([demo], overrides=[f'run.dir="{folder}"'], environ={})
        session = TrainerSession(config)
        session.open()
        learner = session._learner
        learner.begin_stage(config.rl.optimiser)  # type: ignore[union-attr]
        rng = np.random.default_rng(0)
        rates = []
        for _ in range(RUNS + 1):
            sequences = [_sequence(rng) for _ in range(SEQUENCES)]
            tokens = sum(len(s.token_ids) for s in sequences)
            began = time.perf_counter()
            learner.rl_step(sequences, lr=1e-5, tis_clip=2.0)
            rates.append(tokens / (time.perf_counter() - began))
    # The first step allocates.
    report.median("trainer.tokens_per_s", rates[1:], unit="tokens/s")


def _sequence(rng: np.random.Generator) -> TrainSequence:
    length = int(rng.integers(55, 95))
    return TrainSequence(
        token_ids=rng.integers(7, 57, length).astype(np.int32),
        mask=np.arange(length) >= length * 0.4,
        logprobs=np.full(length, -1.0, dtype=np.float32),
        advantage=float(rng.normal()),
    )
