"""Which engine a machine gets: vLLM where it can run, and a word about it where it cannot."""

from __future__ import annotations

import pytest

from rollouts.engines.factory import resolve_kind
from rollstream import vllm_needs
from rollstream.errors import ConfigError


@pytest.fixture
def without_libnuma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_needs, "LIBRARY", "libnothing.so.1")
    monkeypatch.setattr(vllm_needs.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_needs, "_is_for_cpus", lambda: True)


def test_without_libnuma_the_light_engine_is_chosen(without_libnuma: None) -> None:
    assert resolve_kind("auto") == "light"


def test_vllm_asked_for_without_libnuma_is_refused_with_the_remedy(without_libnuma: None) -> None:
    with pytest.raises(
        ConfigError, match=r"kind=vllm: .*libnothing.so.1.*apt-get install libnuma1"
    ):
        resolve_kind("vllm")


def test_with_all_it_needs_vllm_is_chosen(
    without_libnuma: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_needs, "LIBRARY", "libc.so.6")
    assert resolve_kind("auto") == "vllm"


def test_neither_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_needs.importlib.util, "find_spec", lambda name: None)
    for kind in ("auto", "vllm", "light"):
        with pytest.raises(ConfigError, match="installed.*pip install"):
            resolve_kind(kind)


def test_no_compiler_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not vllm_needs.can_compile()
