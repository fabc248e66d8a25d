"""Reads the configuration: defaults < TOML files < environment < dotted overrides.

- Environment: ``ROLLSTREAM__BUS__BOOTSTRAP_SERVERS=host:9092`` sets ``bus.bootstrap_servers``.
- Overrides: ``trainer.threads=2``; the value is read as TOML, else taken as a string. List items
  by index: ``domains.0.weight=2``.
- An unknown key is a ``ConfigError`` that names the file and the nearest key that exists.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from rollstream.config.model import Config
from rollstream.errors import ConfigError

ENV_PREFIX = "ROLLSTREAM__"


def load(
    files: Sequence[Path | str] = (),
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The resolved configuration.

    Raises:
        ConfigError: a file is missing or not TOML, a key is unknown, a value has the wrong type
            or range.
    """
    data: dict[str, Any] = {}
    for file in files:
        _merge(data, _read(Path(file)))
    for key, value in _from_environment(os.environ if environ is None else environ):
        _assign(data, key, value, origin="the environment")
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise ConfigError(f"override {override!r} is not KEY=VALUE", hint="e.g. run.seed=1")
        _assign(data, name.strip().split("."), _value(text), origin=f"override {override!r}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def dump(config: Config) -> str:
    """The configuration as TOML that ``load`` reads back to the same value; unset paths are left
    out.
    """
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist", hint="check the path") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[list[str], Any]]:
    found = sorted(k for k in environ if k.startswith(ENV_PREFIX))
    return [(k[len(ENV_PREFIX) :].lower().split("__"), _value(environ[k])) for k in found]


def _value(text: str) -> Any:
    """``text`` as a TOML value, or as a string when it is none."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _assign(data: dict[str, Any], path: list[str], value: Any, *, origin: str) -> None:
    node: Any = data
    for position, part in enumerate(path):
        last = position == len(path) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(
                    f"{origin}: {'.'.join(path)} has no item {part!r}; there are {len(node)}"
                )
            if last:
                node[int(part)] = value
            node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                node = node.setdefault(part, {})
        else:
            raise ConfigError(f"{origin}: {'.'.join(path[:position])} is a value, not a section")


def _explain(error: ValidationError) -> str:
    return "configuration: " + "; ".join(_explain_one(e) for e in error.errors())


def _explain_one(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    where = ".".join(location)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _known(detail["loc"][:-1]), n=1, cutoff=0.5)
        known = ", ".join(sorted(_known(detail["loc"][:-1])))
        return f"unknown key {where!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known here: {known}"
        )
    shown = detail.get("input")
    value = "" if isinstance(shown, (dict, list, BaseModel)) else f" (got {shown!r})"
    return f"{where or 'config'}: {detail['msg']}{value}"


def _known(location: Sequence[str | int]) -> list[str]:
    """Keys of the section at ``location``; list indices and union tags are stepped over."""
    models: list[type[BaseModel]] = [Config]
    for part in location:
        if isinstance(part, int):
            continue
        below = [m for model in models for m in _models_of(model, part)]
        models = below or models
    return [name for model in models for name in model.model_fields]


def _models_of(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    info = model.model_fields.get(field)
    return _flatten(info.annotation) if info else []


def _flatten(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _flatten(arg)]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value
