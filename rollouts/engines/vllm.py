"""Real vLLM in this process: ``LLMEngine`` stepped in a thread, weights updated between two steps.

Facts that shape it: no per-request seed on a CPU (it kills the engine when a prompt is prefilled in
chunks); ``lm_head.weight`` is always sent, also where it is tied; cached prefixes are kept apart by
version; block size a multiple of 32. Log-probabilities are those after temperature
(``processed_logprobs``).

A request in flight keeps its key-value cache over an update: its next tokens are sampled from the
new weights over what the old ones computed, and their log-probabilities say exactly that.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.engines.base import (
    EngineBrokenError,
    GenerateRequest,
    Generation,
    InferenceEngine,
    token_limit,
)
from rollouts.engines.stepping import Stepper, StepThread
from rollouts.engines.weights import Shapes, check_shapes, read_shapes, read_weights
from rollstream import vllm_needs
from rollstream.config import Config
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2

_GIB = 1 << 30
_FINISH = {
    "stop": events_pb2.FINISH_REASON_STOP,
    "length": events_pb2.FINISH_REASON_LENGTH,
}


class _VllmStepper(Stepper[Any]):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> Iterable[tuple[str, Any]]:
        return [(out.request_id, out) for out in self.engine.step() if out.finished]

    def drop(self, request_id: str) -> None:
        self.engine.abort_request([request_id])


class VllmEngine(InferenceEngine):
    """vLLM in process. One per process: its global state allows no second one."""

    def __init__(self, config: Config) -> None:
        self._settings = config.rollouts.engine
        self._max_length = config.policy.max_length
        self._dtype = config.policy.dtype
        self._seed = config.run.seed
        self._version = -1
        self._ids = itertools.count()
        self._tokens = 0
        self._update_s = 0.0
        _set_environment(self._settings.kv_cache_bytes)
        self._thread: StepThread[Any] = StepThread("vllm")
        self._stepper: _VllmStepper | None = None
        self._shapes: Shapes = {}
        # The import takes seconds: it begins before the first weights are there.
        self._importing = asyncio.ensure_future(self._thread.call(_import))

    async def start(self, model_dir: Path, *, version: int) -> None:
        await self._importing
        self._shapes = await asyncio.to_thread(read_shapes, model_dir)
        arguments = {
            "model": str(model_dir),
            "dtype": self._dtype,
            "max_model_len": self._max_length,
            "enforce_eager": True,
            "max_num_seqs": self._settings.max_sequences,
            "max_num_batched_tokens": max(self._settings.max_batched_tokens, self._max_length),
            "seed": self._seed,
            "block_size": self._settings.block_size,
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            **self._settings.extra,
        }

        def make() -> _VllmStepper:
            try:
                stepper = _VllmStepper(arguments)
            except Exception as error:
                raise EngineBrokenError(
                    f"vLLM cannot serve {model_dir}: {error!r}",
                    hint="see above what it says; rollouts.engine.extra sets its arguments",
                ) from error
            stepper.engine.set_weight_version(str(version))
            self._stepper = stepper
            return stepper

        await self._thread.attach(make)
        self._version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            max_tokens=token_limit(request, window=self._max_length),
            stop_token_ids=list(request.stop_ids),
            # Only ``stop_ids`` stop: the model's own end-of-sequence id is among them where wanted.
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(self._ids))

        def add() -> None:
            # The salt keeps prefixes apart by version: a block cached under old weights is never
            # used under new ones (the cache itself cannot be dropped while requests run). Chosen
            # in the thread, so that no update comes between the choice and its use.
            salt = f"v{self._version}"
            prompt = {"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": salt}
            try:
                self._engine.add_request(request_id, prompt, params)
            except Exception as error:
                # Its checks come before anything else and raise what they like.
                raise ContractError(f"vLLM refuses the request: {error}") from error

        output = await self._thread.ask(request_id, add)
        generation = _generation(output.outputs[0], self._version)
        self._tokens += len(generation.token_ids)
        return generation

    async def update_weights(self, model_dir: Path, *, version: int) -> None:
        weights = await asyncio.to_thread(read_weights, model_dir)
        check_shapes(weights, self._shapes, folder=model_dir)
        started = time.monotonic()

        def update() -> None:
            engine = self._engine
            try:
                engine.collective_rpc(
                    "reload_weights", kwargs={"weights_iterator": iter(list(weights.items()))}
                )
            except Exception as error:
                raise EngineBrokenError(
                    f"version {version}: the weights were taken half-way: {error!r}"
                ) from error
            engine.set_weight_version(str(version))
            self._version = version

        await self._thread.call(update)
        self._update_s = time.monotonic() - started

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> Mapping[str, float]:
        return {
            "running_requests": self._thread.waiting,
            "generated_tokens": self._tokens,
            "update_s": self._update_s,
        }

    async def stop(self) -> None:
        self._importing.cancel()
        await self._thread.stop()

    @property
    def _engine(self) -> Any:
        assert self._stepper is not None, "start() first"
        return self._stepper.engine


def _set_environment(kv_cache_bytes: int) -> None:
    """What vLLM reads from the environment when it is imported."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_bytes / _GIB))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _import() -> None:
    import torch
    import vllm  # noqa: F401
    from vllm.platforms import current_platform

    torch.set_num_threads(1)
    if current_platform.is_cpu() and not vllm_needs.can_compile():
        # Read where the sampler is imported, which is later: its functions then run as written.
        current_platform.simple_compile_backend = "eager"


def _generation(output: Any, version: int) -> Generation:
    token_ids = np.fromiter(output.token_ids, dtype=np.int32, count=len(output.token_ids))
    logprobs = np.fromiter(
        (
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ),
        dtype=np.float32,
        count=len(token_ids),
    )
    spans = getattr(output, "weight_versions", None)
    versions = (
        tuple((int(s.version), s.start, s.end - s.start) for s in spans if s.end > s.start)
        if spans
        else ((version, 0, len(token_ids)),)
    )
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=_FINISH.get(output.finish_reason, events_pb2.FINISH_REASON_ABORT),
    )
