"""An engine without a model: a script says what the policy writes. For tests, load and fixed
policies.

``rollouts.engine.script = "module:function"``; the function gets the ``GenerateRequest`` and
returns token ids (int32). Log-probabilities are made up and fixed: -0.5 each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollouts.engines.base import GenerateRequest, Generation, InferenceEngine
from rollstream.config import Config
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

Script = Callable[[GenerateRequest], npt.NDArray[np.int32]]
_LOGPROB = -0.5


class ScriptedEngine(InferenceEngine):
    """Writes what the script says, cut at ``max_tokens`` and after the first stop id."""

    def __init__(self, config: Config) -> None:
        self._script = _load(config.rollouts.engine.script)
        self._max_length = config.policy.max_length
        self._version = -1
        self._tokens = 0

    async def start(self, model_dir: Path, *, version: int) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        room = self._max_length - len(request.prompt_ids)
        if room < 1:
            raise ContractError(
                f"a prompt of {len(request.prompt_ids)} tokens does not fit a window of "
                f"{self._max_length}"
            )
        ids = np.asarray(self._script(request), dtype=np.int32)[: min(room, request.max_tokens)]
        stops = np.flatnonzero(np.isin(ids, request.stop_ids))
        stopped = len(stops) > 0
        if stopped:
            ids = ids[: stops[0] + 1]
        self._tokens += len(ids)
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), _LOGPROB, dtype=np.float32),
            versions=((self._version, 0, len(ids)),) if len(ids) else (),
            finish_reason=(
                events_pb2.FINISH_REASON_STOP if stopped else events_pb2.FINISH_REASON_LENGTH
            ),
        )

    async def update_weights(self, model_dir: Path, *, version: int) -> None:
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> Mapping[str, float]:
        return {"generated_tokens": self._tokens}

    async def stop(self) -> None:
        return None


def _load(script: str) -> Script:
    module, _, name = script.partition(":")
    try:
        found: Script = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollouts.engine.script={script!r} cannot be loaded: {error}",
            hint='give "module:function"',
        ) from error
    return found
