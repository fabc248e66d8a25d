"""No isolation at all: the guest as a plain process in a folder of its own, for machines without
namespaces.

Limits of one command still hold (time, output, files); nothing is hidden and nothing is refused. It
must be asked for.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

from rollstream.errors import ConfigError
from sandboxes.backends.base import Backend, Isolation, SessionLimits
from sandboxes.backends.launch import GUEST, launch
from sandboxes.channel import Channel
from sandboxes.folders import UNSAFE, Folder
from sandboxes.layers import Layer


class ProcessBackend(Backend):
    """``unsafe`` must be true: the configuration has to say so."""

    name = "process"

    def __init__(self, *, unsafe: bool) -> None:
        if not unsafe:
            raise ConfigError(
                "sandboxes.backend=process isolates nothing",
                hint="use bubblewrap, or say sandboxes.unsafe=true if that is what you want",
            )
        self._root: Folder | None = None

    async def start(self) -> Isolation:
        self._root = Folder(UNSAFE)
        return Isolation(tier="none", missing=("every kind of isolation",))

    @property
    def toolchains(self) -> tuple[str, ...]:
        return ("python",)

    async def create(
        self, toolchain: str, limits: SessionLimits, below: Sequence[Layer] = ()
    ) -> Channel:
        if toolchain != "python":
            raise ConfigError(f"unknown toolchain {toolchain!r}", hint="known: python")
        assert self._root is not None, "start() first"
        work = tempfile.mkdtemp(dir=self._root.path)
        return await launch(
            lambda fd: [sys.executable, "-I", "-S", "-E", str(GUEST), str(fd), work]
        )

    async def stop(self) -> None:
        if self._root is not None:
            self._root.release()
            self._root = None
