"""Reads the weights of a policy folder, and checks them before an engine sees them.

An engine that is given half of what it expects would go on with a mixture of two policies, so that
names and shapes are compared with those it was started on first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rollstream.errors import ContractError, InfraError

Shapes = Mapping[str, tuple[int, ...]]
Entry = TypeVar("Entry")

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_weights(folder: Path) -> dict[str, Any]:
    """All tensors of ``*.safetensors`` in ``folder``, the output head included.

    Raises:
        InfraError: the files are not there (any more).
        ContractError: they are not safetensors, or the output head is missing and not tied.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    try:
        for file in _files(folder):
            weights.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise ContractError(f"weights in {folder} cannot be read: {error}") from error
    return _with_head(weights, folder)


def read_shapes(folder: Path) -> Shapes:
    """The shape of each tensor that ``read_weights`` would give; reads no tensor."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in _files(folder):
            with safe_open(file, framework="pt") as opened:
                shapes.update((n, tuple(opened.get_slice(n).get_shape())) for n in opened.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ContractError(f"weights in {folder} cannot be read: {error}") from error
    return _with_head(shapes, folder)


def check_shapes(weights: Mapping[str, Any], expected: Shapes, *, folder: Path) -> None:
    """``ContractError`` when ``weights`` are not those of the model that was started."""
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found == expected:
        return
    names = found.keys() | expected.keys()
    different = sorted(name for name in names if found.get(name) != expected.get(name))
    name = different[0]
    raise ContractError(
        f"weights in {folder} are not those of the model in use: {len(different)} tensors differ,"
        f" first {name}: {found.get(name, 'none')} instead of {expected.get(name, 'none')}",
        hint="a policy keeps its architecture for the whole run",
    )


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InfraError(f"{folder} holds no *.safetensors", hint="was the version removed?")
    return files


def _with_head(entries: dict[str, Entry], folder: Path) -> dict[str, Entry]:
    """Tied: the head is the embedding. Without it an engine would keep its old output head."""
    if _HEAD not in entries:
        if _EMBEDDING not in entries:
            raise ContractError(f"weights in {folder} have neither {_HEAD} nor {_EMBEDDING}")
        entries[_HEAD] = entries[_EMBEDDING]
    return entries
