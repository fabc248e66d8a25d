"""What isolates on this machine: makes a session with each backend and says what it enforces.

``python -m sandboxes.probe`` prints a line of JSON per backend; ``rollstream doctor`` shows them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass

from rollstream.errors import RollstreamError
from sandboxes.backends.base import Backend
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.native import NativeBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """``error``: why there is none of it here, with the remedy."""

    backend: str
    tier: str = ""
    missing: tuple[str, ...] = ()
    error: str = ""


async def ability(backend: Backend) -> Ability:
    """What ``backend`` can do, proved by a session."""
    try:
        isolation = await backend.start()
    except RollstreamError as error:
        return Ability(backend=backend.name, error=str(error))
    await backend.stop()
    return Ability(backend=backend.name, tier=isolation.tier, missing=isolation.missing)


def main() -> int:
    for backend in (NativeBackend(), BubblewrapBackend()):
        print(json.dumps(asdict(asyncio.run(ability(backend)))), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
