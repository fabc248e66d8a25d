"""No isolation at all: the guest as a plain process in a folder of its own, for machines without
namespaces.

Limits of one command still hold (time, output, files); nothing is hidden and nothing is refused. It
must be asked for.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from rollstream.errors import ConfigError
from sandboxes.backends.base import Backend, Isolation, SessionLimits
from sandboxes.backends.launch import GUEST, launch
from sandboxes.channel import Channel


class ProcessBackend(Backend):
    """``unsafe`` must be true: the configuration has to say so."""

    name = "process"

    def __init__(self, *, unsafe: bool) -> None:
        if not unsafe:
            raise ConfigError(
                "sandboxes.backend=process isolates nothing",
                hint="use bubblewrap, or say sandboxes.unsafe=true if that is what you want",
            )
        self._root: Path | None = None

    async def start(self) -> Isolation:
        self._root = Path(tempfile.mkdtemp(prefix="rollstream-unsafe-"))
        return Isolation(tier="none", missing=("every kind of isolation",))

    async def create(self, toolchain: str, limits: SessionLimits) -> Channel:
        if toolchain != "python":
            raise ConfigError(f"unknown toolchain {toolchain!r}", hint="known: python")
        assert self._root is not None, "start() first"
        work = tempfile.mkdtemp(dir=self._root)
        return await launch(
            lambda fd: [sys.executable, "-I", "-S", "-E", str(GUEST), str(fd), work]
        )

    async def stop(self) -> None:
        if self._root is not None and os.path.isdir(self._root):
            shutil.rmtree(self._root, ignore_errors=True)
