"""The backend contract: make an isolated session, talk to it, destroy it.

A backend starts one guest (``sandboxes/guest.py``) per session and hands out a ``Channel`` to it.
The channel is the lease: when this end closes, the guest ends and the kernel kills all that it
started.

Failure: ``InfraError`` when a session cannot be made; ``SandboxLostError`` when it died.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sandboxes.channel import Channel
from sandboxes.layers import Layer

# A file of a kilobyte per inode on average: more inodes than bytes for them would be pointless.
_BYTES_PER_INODE = 1024


def inodes(disk_bytes: int) -> int:
    """How many files and folders a session may have."""
    return max(1024, disk_bytes // _BYTES_PER_INODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session and of each command in it. Sizes in bytes, times in seconds."""

    memory_bytes: int
    pids: int
    disk_bytes: int
    wall_s: float
    output_bytes: int
    cpus: float = 1.0

    def rlimits(self, *, counted: Collection[str] = ()) -> dict[str, int]:
        """The limits that the guest sets for each command.

        ``counted``: what a control group counts over all processes ("memory", "pids"), so that
        address space, which is not memory, and the user's processes need no limit.
        """
        limits = {"FSIZE": max(self.disk_bytes, 1 << 20), "NOFILE": 1024, "CORE": 0}
        if "memory" not in counted:
            limits["AS"] = self.memory_bytes
        if "pids" not in counted:
            limits["NPROC"] = self.pids
        return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What a backend really enforces on this machine: reported with every session.

    ``tier``: "ns" (namespaces) or "none". ``missing``: what it would enforce and cannot here.
    """

    tier: str
    missing: tuple[str, ...] = ()


class Backend(ABC):
    """Makes sessions of one kind of isolation."""

    name: str
    # Whether sessions write to layers, which snapshots are made of.
    layered = False

    @abstractmethod
    async def start(self) -> Isolation:
        """Prove that a session can be made here. ``ConfigError`` with the remedy when not."""

    @abstractmethod
    async def create(
        self, toolchain: str, limits: SessionLimits, below: Sequence[Layer] = ()
    ) -> Channel:
        """A fresh session over the layers ``below``, proved alive by an answer.

        ``ConfigError`` for an unknown toolchain.
        """

    @property
    @abstractmethod
    def toolchains(self) -> tuple[str, ...]:
        """The labels that ``create`` knows."""

    @abstractmethod
    async def stop(self) -> None:
        """Remove what the backend itself holds; sessions are closed by their owners."""


def counts_processes_per_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of one user namespace apart (Linux 5.14).

    Before, it counts all processes of the host's user, and a limit per session means nothing.
    """
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (5, 14)
