"""The real model path: a pretrained chat model, served by vLLM and trained one step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def _said(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.rollouts.smollm2", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_served_sampled_trained_and_served_again(tmp_path: Path) -> None:
    said = _said(tmp_path)
    assert "Paris" in said["answer"]
    assert said["call"] == ["python", {"code": "print(6*7)"}]
    assert said["ends_with_opening"]
    assert said["applied"]
    # Float32 in both: what the engine sampled with is what the trainer computes.
    assert said["before"] < 1e-3
    # The step changed the policy, and the engine serves the changed one.
    assert said["moved"] > 10 * said["before"]
    assert said["after"] < 1e-3
    assert [version for version, _, _ in said["versions"]] == [1]


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_the_same_on_a_gpu(tmp_path: Path) -> None:
    import torch

    assert torch.cuda.is_available(), "no NVIDIA GPU here: install the extra `vllm` on one with"
    said = _said(tmp_path)
    assert "Paris" in said["answer"]
    assert said["call"] == ["python", {"code": "print(6*7)"}]
    assert said["applied"]
    # Other kernels than the trainer's, whose sums are rounded in another order.
    assert said["before"] < 5e-2
    assert said["after"] < 5e-2
    assert [version for version, _, _ in said["versions"]] == [1]
