"""The engine contract: token ids in; token ids, log-probabilities and policy versions out.

``generate`` may be called any number of times at once; the engine batches. ``update_weights`` takes
effect between two tokens of the requests in flight: they go on with the new weights, and each
token's version is reported. Log-probabilities are those of the distribution that was sampled from
(after temperature), in float32.

A caller that is cancelled gives its request up: the engine drops it and its place is free.

Failure: ``EngineBrokenError`` when the engine is beyond use (the worker ends; its tasks come again
in a fresh process); ``ContractError`` for a request that cannot be served (prompt longer than the
window) and for weights that are not those of this model: the old ones stay in use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollstream.errors import ContractError, InfraError
from rollstream.v1 import events_pb2


class EngineBrokenError(InfraError):
    """The engine is beyond use; only a fresh process helps."""

    code = "engine_broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``prompt_ids``: int32 [n]. ``stop_ids``: a sampled id among them ends the generation and is
    kept.
    """

    prompt_ids: npt.NDArray[np.int32]
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    # Requests of one session share a prefix; an engine may use it for placement.
    session: str = ""
    # For the scripted engine and for sampling that must be repeatable; engines may ignore it.
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """``token_ids`` int32 [m], ``logprobs`` float32 [m], ``versions`` spans relative to
    ``token_ids``.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: tuple[tuple[int, int, int], ...]
    finish_reason: events_pb2.FinishReason


def token_limit(request: GenerateRequest, *, window: int) -> int:
    """How many tokens may be sampled: what was asked for, as far as the window goes.

    Raises:
        ContractError: the prompt is empty, or leaves no room for any.
    """
    if not len(request.prompt_ids):
        raise ContractError("an empty prompt", hint="a task needs at least one message")
    room = window - len(request.prompt_ids)
    if room < 1:
        raise ContractError(
            f"a prompt of {len(request.prompt_ids)} tokens does not fit a window of {window}",
            hint="raise policy.max_length or shorten the task",
        )
    return min(request.max_tokens, room)


class InferenceEngine(ABC):
    """One policy being served."""

    @abstractmethod
    async def start(self, model_dir: Path, *, version: int) -> None:
        """Load the folder (Hugging Face layout) as policy version ``version``."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation: ...

    @abstractmethod
    async def update_weights(self, model_dir: Path, *, version: int) -> None:
        """Switch to the weights in ``model_dir`` at the next token boundary; returns when they are
        in use.

        Raises:
            InfraError: the files are not there (any more).
            ContractError: they are no weights of this model. Nothing has changed.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """The version in use; -1 before ``start``."""

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """``running_requests``, ``waiting_requests``, ``generated_tokens`` (total), ``update_s``
        (last), ...
        """

    @abstractmethod
    async def stop(self) -> None: ...
