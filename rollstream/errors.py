"""The error tree: four kinds, because there are four things a service can do about an error.

- ``ConfigError``: the user must change something; the process exits with status 2.
- ``ContractError``: an event is malformed; it goes to the dead letters and is never retried.
- ``InfraError``: bus, store, sandbox or engine is unavailable; retried with a budget.
- ``EpisodeError``: model, tool, environment or scoring failed; recorded on the trajectory,
  siblings go on.

Every message says what failed, with which value, and what to do: ``hint`` carries the remedy.
"""

from __future__ import annotations


class RollstreamError(Exception):
    """Base of all errors that Rollstream raises on purpose."""

    code = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} -- {self.hint}" if self.hint else self.message


class ConfigError(RollstreamError):
    """The configuration, the command line or the machine does not allow what was asked for."""

    code = "config"
    exit_status = 2


class ContractError(RollstreamError):
    """An event breaks the wire contract: undecodable, inconsistent, NaN, wrong digest."""

    code = "contract"


class InfraError(RollstreamError):
    """A part of the platform is unavailable; trying again may help."""

    code = "infra"


class SandboxLostError(InfraError):
    """The session died under its user (out of memory, killed executor): its state is gone."""

    code = "sandbox_lost"


class EpisodeError(RollstreamError):
    """This rollout failed by its own doing or by its environment's; it is data."""

    code = "episode"
