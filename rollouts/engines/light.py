"""A light engine in torch: continuous batching over a slot cache, for Qwen3 and Llama
architectures.

One forward pass per step for all running requests, whatever their lengths; prompts of one length
are prefilled together. Weights are replaced between two steps. Float32; faster than vLLM on a CPU
for models of about a million parameters, and nothing to start.

Memory: the cache has as many slots as ``max_sequences`` and ``kv_cache_bytes`` allow; requests
beyond them wait. One prefill computes at most ``max_batched_tokens`` (one prompt at least).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rollouts.engines.base import GenerateRequest, Generation, InferenceEngine, token_limit
from rollouts.engines.stepping import Stepper, StepThread
from rollouts.engines.weights import Shapes, check_shapes, read_shapes, read_weights
from rollstream.config import Config
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

_ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The sizes that the forward pass needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def read(cls, model_dir: Path) -> _Shape:
        raw = json.loads((model_dir / "config.json").read_text("utf-8"))
        architecture = (raw.get("architectures") or ["none"])[0]
        if architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"the light engine does not serve {architecture}",
                hint=f"it serves {', '.join(_ARCHITECTURES)}; use rollouts.engine.kind=vllm",
            )
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _refuse(raw, rope)
        heads = raw["num_attention_heads"]
        return cls(
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        )

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, float32."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


def _refuse(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """``ConfigError`` for what the forward pass here does not compute."""
    found = {
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "hidden_act": raw.get("hidden_act", "silu"),
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
    }
    served = {
        "rope_type": "default",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    for name, value in found.items():
        if value != served[name]:
            raise ConfigError(
                f"the light engine does not serve a model with {name}={value!r}",
                hint="use rollouts.engine.kind=vllm",
            )


class _Model:
    """Weights, laid out for few large matrix products, and the forward pass over a slot cache."""

    def __init__(
        self, shape: _Shape, weights: Mapping[str, Tensor], *, slots: int, length: int
    ) -> None:
        self.shape = shape
        self.load(weights)
        angles = torch.outer(
            torch.arange(length).float(),
            1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim),
        )
        angles = torch.cat([angles, angles], -1)
        self._cos, self._sin = angles.cos(), angles.sin()
        cache = (shape.layers, slots, shape.kv_heads, length, shape.head_dim)
        self._keys, self._values = torch.zeros(cache), torch.zeros(cache)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        def get(name: str) -> Tensor:
            return weights[name].float().contiguous()

        layers: list[dict[str, Any]] = []
        for i in range(self.shape.layers):
            prefix = f"model.layers.{i}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            has_norm = attention + "q_norm.weight" in weights
            layers.append(
                {
                    "norm1": get(prefix + "input_layernorm.weight"),
                    "norm2": get(prefix + "post_attention_layernorm.weight"),
                    "qkv": torch.cat([get(f"{attention}{x}_proj.weight") for x in "qkv"]),
                    "out": get(attention + "o_proj.weight"),
                    "up": torch.cat([get(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]),
                    "down": get(mlp + "down_proj.weight"),
                    "q_norm": get(attention + "q_norm.weight") if has_norm else None,
                    "k_norm": get(attention + "k_norm.weight") if has_norm else None,
                }
            )
        self._layers = layers
        self._embedding = get("model.embed_tokens.weight")
        self._norm, self._head = get("model.norm.weight"), get("lm_head.weight")

    def forward(self, slots: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [b, v] of the last of ``ids`` [b, t] at ``positions`` [b, t] in ``slots`` [b]."""
        shape = self.shape
        b, t = ids.shape
        seen = int(positions.max()) + 1
        hidden = F.embedding(ids, self._embedding)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        mask = (torch.arange(seen)[None, None] <= positions[:, :, None])[:, None]
        where = slots[:, None].expand(b, t)
        split = [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
        for layer, w in enumerate(self._layers):
            q, k, v = F.linear(self._rms(hidden, w["norm1"]), w["qkv"]).split(split, -1)
            q = q.view(b, t, shape.heads, shape.head_dim)
            k = k.view(b, t, shape.kv_heads, shape.head_dim)
            v = v.view(b, t, shape.kv_heads, shape.head_dim)
            if w["q_norm"] is not None:
                q, k = self._rms(q, w["q_norm"]), self._rms(k, w["k_norm"])
            q, k = _rotate(q.transpose(1, 2), cos, sin), _rotate(k.transpose(1, 2), cos, sin)
            self._keys[layer][where, :, positions] = k.transpose(1, 2)
            self._values[layer][where, :, positions] = v
            attended = F.scaled_dot_product_attention(
                q,
                self._keys[layer][slots, :, :seen],
                self._values[layer][slots, :, :seen],
                attn_mask=mask,
                enable_gqa=shape.heads != shape.kv_heads,
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).reshape(b, t, -1), w["out"])
            gate, up = F.linear(self._rms(hidden, w["norm2"]), w["up"]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(self._rms(hidden[:, -1], self._norm), self._head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in the batch."""

    request_id: str
    request: GenerateRequest
    limit: int
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, token: int, logprob: float, version: int) -> None:
        at = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        last = self.versions[-1] if self.versions else None
        if last is not None and last[0] == version:
            self.versions[-1] = (version, last[1], last[2] + 1)
        else:
            self.versions.append((version, at, 1))

    @property
    def stopped(self) -> bool:
        return self.ids[-1] in self.request.stop_ids

    @property
    def done(self) -> bool:
        return self.stopped or len(self.ids) >= self.limit

    def answer(self) -> Generation:
        return Generation(
            token_ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=tuple(self.versions),
            finish_reason=(
                events_pb2.FINISH_REASON_STOP if self.stopped else events_pb2.FINISH_REASON_LENGTH
            ),
        )


class _Sampler(Stepper[Generation]):
    """Continuous batching: every step admits what fits, then adds one token to every request."""

    def __init__(
        self, model: _Model, *, slots: int, prefill_tokens: int, seed: int, version: int
    ) -> None:
        self.model = model
        self.version = version
        self._prefill_tokens = prefill_tokens
        self._free = list(range(slots))
        self._running: dict[int, _Running] = {}
        self._queue: deque[_Running] = deque()
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, running: _Running) -> None:
        self._queue.append(running)

    def drop(self, request_id: str) -> None:
        self._queue = deque(r for r in self._queue if r.request_id != request_id)
        for slot, running in list(self._running.items()):
            if running.request_id == request_id:
                self._release(slot)

    def busy(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self._running), len(self._queue)

    @torch.inference_mode()
    def step(self) -> Iterable[tuple[str, Generation]]:
        decoding = sorted(self._running.values(), key=lambda r: r.slot)
        self._prefill()
        if decoding:
            ids = torch.tensor([[r.ids[-1]] for r in decoding])
            lengths = [[len(r.request.prompt_ids) + len(r.ids) - 1] for r in decoding]
            self._sample(decoding, ids, torch.tensor(lengths))
        finished = [r for r in self._running.values() if r.done]
        for running in finished:
            self._release(running.slot)
        return [(r.request_id, r.answer()) for r in finished]

    def _release(self, slot: int) -> None:
        del self._running[slot]
        self._free.append(slot)

    def _prefill(self) -> None:
        by_length: dict[int, list[_Running]] = defaultdict(list)
        while self._queue and self._free:
            running = self._queue.popleft()
            running.slot = self._free.pop()
            self._running[running.slot] = running
            by_length[len(running.request.prompt_ids)].append(running)
        for length, admitted in by_length.items():
            size = max(1, self._prefill_tokens // length)
            for start in range(0, len(admitted), size):
                batch = admitted[start : start + size]
                ids = torch.from_numpy(np.stack([r.request.prompt_ids for r in batch])).long()
                self._sample(batch, ids, torch.arange(length).expand(len(batch), length))

    def _sample(self, batch: list[_Running], ids: Tensor, positions: Tensor) -> None:
        logits = self.model.forward(torch.tensor([r.slot for r in batch]), ids, positions)
        temperature = torch.tensor([r.request.temperature or 1.0 for r in batch])
        greedy = torch.tensor([r.request.temperature == 0 for r in batch])
        logprobs = (logits / temperature[:, None]).log_softmax(-1)
        if any(r.request.top_p < 1 or r.request.top_k for r in batch):
            logprobs = _truncate(logprobs, batch)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=self._generator)[:, 0]
        tokens = torch.where(greedy, logits.argmax(-1), drawn)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        for running, token, logprob in zip(batch, tokens.tolist(), chosen.tolist(), strict=True):
            running.add(token, logprob, self.version)


def _truncate(logprobs: Tensor, batch: list[_Running]) -> Tensor:
    """Renormalised over the top-k ids and over the smallest set with mass top-p."""
    ordered, order = logprobs.sort(-1, descending=True)
    rank = torch.arange(logprobs.shape[-1])[None]
    top_k = torch.tensor([r.request.top_k or logprobs.shape[-1] for r in batch])[:, None]
    top_p = torch.tensor([r.request.top_p for r in batch])[:, None]
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = ordered.masked_fill((rank >= top_k) | (before >= top_p), float("-inf"))
    return torch.empty_like(logprobs).scatter_(1, order, kept.log_softmax(-1))


class LightEngine(InferenceEngine):
    """The sampler behind the engine contract."""

    def __init__(self, config: Config) -> None:
        self._settings = config.rollouts.engine
        self._length = config.policy.max_length
        self._seed = config.run.seed
        self._ids = itertools.count()
        self._thread: StepThread[Generation] = StepThread("light-engine")
        self._sampler: _Sampler | None = None
        self._shapes: Shapes = {}
        self._tokens = 0
        self._update_s = 0.0

    async def start(self, model_dir: Path, *, version: int) -> None:
        shape = _Shape.read(model_dir)
        slots = self._slots(shape)
        self._shapes = read_shapes(model_dir)
        weights = await asyncio.to_thread(read_weights, model_dir)

        def make() -> _Sampler:
            torch.set_num_threads(1)
            model = _Model(shape, weights, slots=slots, length=self._length)
            self._sampler = _Sampler(
                model,
                slots=slots,
                prefill_tokens=self._settings.max_batched_tokens,
                seed=self._seed,
                version=version,
            )
            return self._sampler

        await self._thread.attach(make)

    def _slots(self, shape: _Shape) -> int:
        """How many sequences the cache holds."""
        one = shape.token_bytes * self._length
        slots = min(self._settings.max_sequences, self._settings.kv_cache_bytes // one)
        if slots < 1:
            raise ConfigError(
                f"rollouts.engine.kv_cache_bytes={self._settings.kv_cache_bytes} holds no sequence"
                f" of policy.max_length={self._length} tokens, which takes {one}",
                hint="raise the one or lower the other",
            )
        return slots

    async def generate(self, request: GenerateRequest) -> Generation:
        limit = token_limit(request, window=self._length)
        vocabulary = self._shapes["model.embed_tokens.weight"][0]
        if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < vocabulary:
            raise ContractError(
                f"a prompt with token id {request.prompt_ids.max()}; the model knows {vocabulary}",
                hint="does the tokenizer belong to this model?",
            )
        request_id = str(next(self._ids))
        running = _Running(request_id=request_id, request=request, limit=limit)
        sampler = self._started
        generation = await self._thread.ask(request_id, lambda: sampler.add(running))
        self._tokens += len(generation.token_ids)
        return generation

    async def update_weights(self, model_dir: Path, *, version: int) -> None:
        weights = await asyncio.to_thread(read_weights, model_dir)
        check_shapes(weights, self._shapes, folder=model_dir)
        started = time.monotonic()
        sampler = self._started

        def update() -> None:
            sampler.model.load(weights)
            sampler.version = version

        await self._thread.call(update)
        self._update_s = time.monotonic() - started

    @property
    def version(self) -> int:
        return self._sampler.version if self._sampler else -1

    def stats(self) -> Mapping[str, float]:
        running, waiting = self._sampler.sizes if self._sampler else (0, 0)
        return {
            "running_requests": running,
            "waiting_requests": waiting,
            "generated_tokens": self._tokens,
            "update_s": self._update_s,
        }

    async def stop(self) -> None:
        await self._thread.stop()

    @property
    def _started(self) -> Any:
        assert self._sampler is not None, "start() first"
        return self._sampler
