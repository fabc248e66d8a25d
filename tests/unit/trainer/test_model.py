"""Where the policy starts, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollstream.errors import ConfigError
from tests.conftest import MakeConfig
from trainer.model import load_model, prepare_start, write_policy

SMALL = (
    'domains=[{name="d", environment="demo-arithmetic"}]',
    'policy.model={tokenizer_domain="d", hidden_size=32, intermediate_size=64, layers=1, heads=2,'
    " kv_heads=1, head_dim=16}",
)


def _start(make_config: MakeConfig, folder: Path, *overrides: str) -> Path:
    return prepare_start(make_config("127.0.0.1:1", *SMALL, *overrides), folder)


def test_a_fresh_policy_is_a_function_of_the_seed(make_config: MakeConfig, tmp_path: Path) -> None:
    one, same, other = (
        load_file(_start(make_config, tmp_path / name, f"run.seed={seed}") / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_tied_output_heads_are_written_all_the_same(tmp_path: Path) -> None:
    """An engine that is updated without ``lm_head.weight`` goes on with the old one."""
    config = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    write_policy(model, tmp_path, tmp_path / "policy", dtype="bfloat16")
    written = load_file(tmp_path / "policy" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert {t.dtype for t in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_written_loads_as_it_was(make_config: MakeConfig, tmp_path: Path) -> None:
    start = _start(make_config, tmp_path / "start")
    model = load_model(start, torch.device("cpu"))
    write_policy(model, start, tmp_path / "policy", dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=0, rtol=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "policy" / name).read_bytes() == (start / name).read_bytes()


def test_a_folder_without_a_model_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("127.0.0.1:1", f'policy.model.path="{tmp_path}"')
    with pytest.raises(ConfigError, match=r"policy\.model\.path .* holds no config\.json"):
        prepare_start(config, tmp_path / "start")


def test_a_vocabulary_that_is_too_small_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model\.vocab_size=8 is less than"):
        _start(make_config, tmp_path / "start", "policy.model.vocab_size=8")


def test_no_model_at_all_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set policy\.model\.path"):
        prepare_start(make_config("127.0.0.1:1"), tmp_path / "start")
