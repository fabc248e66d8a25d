"""Reads the weights of a policy folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollstream.errors import ContractError, InfraError


def read_weights(folder: Path) -> dict[str, Any]:
    """All tensors of ``*.safetensors`` in ``folder``, the output head included.

    Raises:
        InfraError: the files are not there (any more).
        ContractError: they are not safetensors, or the output head is missing and not tied.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InfraError(f"{folder} holds no *.safetensors", hint="was the version removed?")
    weights: dict[str, Any] = {}
    try:
        for file in files:
            weights.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise ContractError(f"weights in {folder} cannot be read: {error}") from error
    if "lm_head.weight" not in weights:
        embedding = weights.get("model.embed_tokens.weight")
        if embedding is None:
            raise ContractError(f"weights in {folder} have neither lm_head nor embed_tokens")
        # Tied: without it an engine would keep its old output head.
        weights["lm_head.weight"] = embedding
    return weights
