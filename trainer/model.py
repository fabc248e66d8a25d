"""The policy as a torch module: where it starts, and how it is written for the rollout workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from environments.registry import make
from rollstream.chat import ChatFormat
from rollstream.config import Config
from rollstream.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def prepare_start(config: Config, folder: Path) -> Path:
    """The folder (Hugging Face layout) that the policy starts from.

    ``policy.model.path``, or a fresh Qwen3 written to ``folder``: its weights are a function of
    ``run.seed``. Done once; a folder that is complete is taken as it is.
    """
    if config.policy.model.path:
        path = Path(config.policy.model.path)
        if not (path / "config.json").exists():
            raise ConfigError(
                f"policy.model.path {path} holds no config.json",
                hint="name a folder in Hugging Face layout",
            )
        return path
    if not (folder / "config.json").exists():
        _make_fresh(config, folder)
    return folder


def _make_fresh(config: Config, folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    wanted = config.policy.model
    files = (
        make(config.domain(wanted.tokenizer_domain)).tokenizer()
        if wanted.tokenizer_domain
        else None
    )
    if files is None:
        raise ConfigError(
            "policy.model has neither a path nor a tokenizer_domain that brings a tokenizer",
            hint="set policy.model.path to a model folder",
        )
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, data in files.items():
        (temporary / name).write_bytes(data)
    chat = ChatFormat(temporary)
    if chat.vocab_size > wanted.vocab_size:
        raise ConfigError(
            f"policy.model.vocab_size={wanted.vocab_size} is less than the tokenizer's"
            f" {chat.vocab_size}"
        )
    torch.manual_seed(config.run.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=wanted.vocab_size,
            hidden_size=wanted.hidden_size,
            intermediate_size=wanted.intermediate_size,
            num_hidden_layers=wanted.layers,
            num_attention_heads=wanted.heads,
            num_key_value_heads=wanted.kv_heads,
            head_dim=wanted.head_dim,
            max_position_embeddings=wanted.max_positions,
            tie_word_embeddings=False,
            eos_token_id=chat.stop_ids[0],
            pad_token_id=chat.pad_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(temporary)
    temporary.replace(folder)


def load_model(folder: Path, device: torch.device) -> Any:
    """The policy in float32 for training, attention by SDPA."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    return model.to(device).train()  # type: ignore[arg-type]


def write_policy(model: Any, source: Path, folder: Path, *, dtype: str) -> None:
    """Write the weights and the files beside them into ``folder``, complete in itself.

    ``lm_head.weight`` is written even when it is tied: an engine that is updated from a stream
    without it goes on with the old output head (measured; reference/engines.md, wart c).
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", _DTYPES[dtype]).contiguous().clone()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings["dtype"] = dtype
    # Where this process happened to load it from: the same weights are the same files.
    settings.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
