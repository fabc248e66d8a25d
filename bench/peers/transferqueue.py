"""TransferQueue's key-value interface, in its own environment: groups put, batches of 256 got.

``python transferqueue.py LENGTH SAMPLES`` prints one JSON object. 8 samples a put, all of it
random; in the memory of Ray's actors.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time

import ray
import torch
import transfer_queue
from tensordict import TensorDict

GROUP, BATCH = 8, 256


def main() -> None:
    length, samples = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            _temp_dir=folder,
        )
        transfer_queue.init()
        try:
            figures = _measure(length, samples)
        finally:
            transfer_queue.close()
            ray.shutdown()
    print(json.dumps(figures))


def _measure(length: int, samples: int) -> dict[str, float]:
    groups = [_group(length) for _ in range(samples // GROUP)]
    _put(-1, _group(length))
    began = time.perf_counter()
    keys = [key for number, group in enumerate(groups) for key in _put(number, group)]
    put, got = time.perf_counter(), 0
    for first in range(0, len(keys), BATCH):
        got += transfer_queue.kv_batch_get(keys[first : first + BATCH], "train").batch_size[0]
    read = time.perf_counter()
    return {"ingest": len(keys) / (put - began), "read": got / (read - put)}


def _group(length: int) -> TensorDict:
    return TensorDict(
        {
            "input_ids": torch.randint(0, 150_000, (GROUP, length), dtype=torch.int32),
            "mask": torch.ones(GROUP, length, dtype=torch.bool),
            "logprobs": torch.randn(GROUP, length),
            "reward": torch.rand(GROUP, 1),
        },
        batch_size=[GROUP],
    )


def _put(number: int, group: TensorDict) -> list[str]:
    keys = [f"g{number}_{index}" for index in range(GROUP)]
    tags = [{"status": "finished", "v": number} for _ in keys]
    transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=group, tags=tags)
    return keys


if __name__ == "__main__":
    main()
