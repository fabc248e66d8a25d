"""Environments by name: built-in ones and plug-ins, found by the entry points
``rollstream.environments``.
"""

from __future__ import annotations

import difflib
import inspect
from importlib.metadata import entry_points
from typing import Any

from environments.base import Environment
from rollstream.config.model import DomainConfig
from rollstream.errors import ConfigError

GROUP = "rollstream.environments"


def names() -> list[str]:
    """The environments that can be named in the configuration."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def make(domain: DomainConfig) -> Environment:
    """The environment of a domain.

    Raises:
        ConfigError: no environment has this name, or it does not take the given options.
    """
    kind = _load(domain)
    known = [p for p in inspect.signature(kind).parameters if p != "self"]
    for option in domain.options:
        if option not in known:
            raise ConfigError(
                f"domain {domain.name!r}: environment {domain.environment!r} has no option"
                f" {option!r}",
                hint=_nearest(option, known),
            )
    try:
        environment: Environment = kind(**domain.options)
    except TypeError as error:
        raise ConfigError(f"domain {domain.name!r}: options {domain.options}: {error}") from error
    return environment


def _load(domain: DomainConfig) -> Any:
    for point in entry_points(group=GROUP):
        if point.name == domain.environment:
            try:
                return point.load()
            except ImportError as error:
                raise ConfigError(
                    f"environment {point.name!r} cannot be imported: {error}",
                    hint="pip install 'rollstream[environments]', or the plug-in's needs",
                ) from error
    raise ConfigError(
        f"domain {domain.name!r} names unknown environment {domain.environment!r}",
        hint=_nearest(domain.environment, names()),
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
