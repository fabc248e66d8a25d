"""Atropos' trajectory API on loopback, in its own environment: groups posted, batches got.

``python atropos.py LENGTH SAMPLES`` prints one JSON object. 8 samples a group, 16 clients, all of
it random; the server is the package's own, in memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time

import aiohttp

GROUP, CLIENTS, BATCH = 8, 16, 256
# The first that registers.
ENVIRONMENT = 0


def main() -> None:
    length, samples = int(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = ["-m", "uvicorn", "atroposlib.api.server:app", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, *app, "--log-level", "error"], cwd=folder, stdout=sys.stderr
        )
        try:
            print(json.dumps(asyncio.run(_measure(f"http://127.0.0.1:{port}", length, samples))))
        finally:
            server.terminate()
            server.wait()


async def _measure(base: str, length: int, samples: int) -> dict[str, float]:
    # Before any connection is open: the server closes those that idle.
    waiting = iter([_body(length, seed) for seed in range(samples // GROUP)])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        await _register(session, base, length)

        async def client() -> None:
            for body in waiting:
                headers = {"content-type": "application/json"}
                async with session.post(base + "/scored_data", data=body, headers=headers) as reply:
                    reply.raise_for_status()
                    await reply.read()

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        ingested, got, empty = time.perf_counter(), 0, 0
        while got < samples and empty < 5:
            async with session.get(base + "/batch") as reply:
                batch = json.loads(await reply.read())["batch"]
            empty += batch is None
            got += sum(len(group["tokens"]) for group in batch or ())
        drained = time.perf_counter()
    return {"ingest": samples / (ingested - began), "read": got / (drained - ingested)}


async def _register(session: aiohttp.ClientSession, base: str, length: int) -> None:
    trainer = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": BATCH, "max_token_len": length,
        "checkpoint_dir": ".", "save_checkpoint_interval": 1, "starting_step": 0,
        "num_steps": 1_000_000,
    }  # fmt: skip
    for attempt in range(150):
        try:
            async with session.post(base + "/register", json=trainer) as reply:
                await reply.read()
                break
        except aiohttp.ClientError:
            if attempt == 149:
                raise
            await asyncio.sleep(0.2)
    async with session.get(base + "/batch") as reply:
        await reply.read()
    wanted = {"max_token_length": length, "desired_name": "e", "weight": 1.0, "group_size": GROUP}
    async with session.post(base + "/register-env", json=wanted) as reply:
        assert (await reply.json())["env_id"] == ENVIRONMENT


def _body(length: int, seed: int) -> bytes:
    rng = random.Random(seed)
    tokens = [[rng.randrange(150_000) for _ in range(length)] for _ in range(GROUP)]
    logprobs = [[rng.gauss(-1.0, 0.5) for _ in range(length)] for _ in range(GROUP)]
    group = {
        "tokens": tokens,
        "masks": tokens,
        "scores": [float(i % 2) for i in range(GROUP)],
        "inference_logprobs": logprobs,
        "env_id": ENVIRONMENT,
    }
    return json.dumps(group).encode()


if __name__ == "__main__":
    main()
