"""Environments by name: built-in ones and plug-ins, found by the entry points
``rollstream.environments``.

Whatever is wrong with a domain's section, its environment or its options is a ``ConfigError`` that
names the domain, the option and its value.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from environments.base import Environment
from rollstream.config.model import DomainConfig
from rollstream.errors import ConfigError, RollstreamError

GROUP = "rollstream.environments"


def names() -> list[str]:
    """The environments that can be named in the configuration."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def make(domain: DomainConfig) -> Environment:
    """The environment of a domain.

    Raises:
        ConfigError: no environment has this name, or it does not take the given options.
    """
    where = f"domain {domain.name!r}: "
    kind = _load(where, domain.environment)
    options = _checked(f"{where}environment {domain.environment!r}", kind, domain.options)
    try:
        return kind(**options)
    except RollstreamError as error:
        raise ConfigError(f"{where}{error.message}", hint=error.hint) from error
    except ImportError as error:
        raise _not_installed(where, domain.environment, error) from error
    except Exception as error:  # a plug-in may raise anything
        raise ConfigError(
            f"{where}environment {domain.environment!r} cannot be made with options {options}:"
            f" {error!r}"
        ) from error


def _load(where: str, name: str) -> type[Environment]:
    point = _find(where, name)
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise _not_installed(where, name, error) from error
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{where}entry point {point.value!r} of environment {name!r} is no Environment",
            hint="it must name a class derived from environments.base.Environment",
        )
    return kind


def _find(where: str, name: str) -> EntryPoint:
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point
    raise ConfigError(f"{where}unknown environment {name!r}", hint=_nearest(name, names()))


def _checked(where: str, kind: type[Environment], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the annotated types of ``kind.__init__``."""
    parameters = {n: p for n, p in inspect.signature(kind).parameters.items() if n != "self"}
    known = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    types = get_type_hints(kind.__init__)
    if len(known) == len(parameters):
        for unknown in set(options) - set(known):
            raise ConfigError(f"{where} has no option {unknown!r}", hint=_nearest(unknown, known))
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ConfigError(f"{where} needs option {name!r}", hint=f"set options.{name}")
    return {n: _as_type(where, n, value, types.get(n, Any)) for n, value in options.items()}


def _as_type(where: str, name: str, value: Any, wanted: Any) -> Any:
    try:
        return TypeAdapter(wanted).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: option {name} = {value!r}: {problem}") from error


def _not_installed(where: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{where}environment {name!r} cannot be imported: {error}",
        hint="pip install 'rollstream[environments]', or the plug-in's needs",
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    shown = f"known: {', '.join(known) or 'none'}"
    return f"did you mean {near[0]!r}? {shown}" if near else shown
