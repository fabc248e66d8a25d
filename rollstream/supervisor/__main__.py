"""``python -m rollstream.supervisor``: the supervisor without a view, as ``rollstream up`` starts
it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from rollstream import logs
from rollstream.config import Config, load
from rollstream.errors import RollstreamError
from rollstream.lifecycle import ServiceContext, announce
from rollstream.supervisor.supervisor import Supervisor


async def _serve(config: Config) -> int:
    context = ServiceContext(config=config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, context.stopping.set)
    supervisor = Supervisor(config, config.supervisor.services)
    try:
        await supervisor.start()
        await supervisor.ready()
        # The file says that all is up; its port is the store's, where clients begin.
        ready = announce(config.run.dir, "supervisor", port=config.store.port)
        try:
            while not await context.stopped_within(1.0):
                supervisor.check()
        finally:
            ready.unlink(missing_ok=True)
    finally:
        await supervisor.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollstream.supervisor", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE.toml")
    config = load([parser.parse_args().config])
    logs.configure(config.log, service="supervisor")
    try:
        return asyncio.run(_serve(config))
    except RollstreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_status", 1)


if __name__ == "__main__":
    sys.exit(main())
