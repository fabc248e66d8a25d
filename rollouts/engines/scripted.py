"""An engine without a model: a script says what the policy writes. For tests, load and fixed
policies.

``rollouts.engine.script = "module:function"``; the function, or coroutine function where it takes
its time, gets the ``GenerateRequest`` and returns token ids (int32). Log-probabilities are made up
and fixed: -0.5 each. Weights are not read: a policy folder need only hold the chat format.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollouts.engines.base import GenerateRequest, Generation, InferenceEngine, token_limit
from rollstream.config import Config
from rollstream.errors import ConfigError
from rollstream.v1 import events_pb2

TokenIds = npt.NDArray[np.int32]
Script = Callable[[GenerateRequest], TokenIds | Awaitable[TokenIds]]
_LOGPROB = -0.5


class ScriptedEngine(InferenceEngine):
    """Writes what the script says, cut at ``max_tokens`` and after the first stop id."""

    def __init__(self, config: Config) -> None:
        self._script = _load(config.rollouts.engine.script)
        self._max_length = config.policy.max_length
        self._version = -1
        self._tokens = 0
        self._running = 0

    async def start(self, model_dir: Path, *, version: int) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        limit = token_limit(request, window=self._max_length)
        self._running += 1
        try:
            said = self._script(request)
            if inspect.isawaitable(said):
                said = await said
        finally:
            self._running -= 1
        ids = np.asarray(said, dtype=np.int32)[:limit]
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
        return {"running_requests": self._running, "generated_tokens": self._tokens}

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
