"""Any dataset of the ``reasoning-gym`` package as a domain, with the dataset's own scorer as
verifier.

The splits are disjoint by the dataset's seed. Text in, text out: no tool, no sandbox.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from environments.base import Environment, RejectedTask, SandboxSession, TaskSpec
from rollstream.codecs import text_message, text_of
from rollstream.errors import ConfigError
from rollstream.v1 import events_pb2

# Items per dataset object: seeds are spread by this, so that blocks never overlap.
_BLOCK = 1000
_SEED_OF_SPLIT = {"train": 1_000_000, "held-out": 900_000_000}


class ReasoningGym(Environment):
    """One dataset. ``params`` go to it as they are (difficulty and the like)."""

    def __init__(self, *, dataset: str, params: dict[str, Any] | None = None) -> None:
        """``ConfigError`` when there is no such dataset or it refuses ``params``."""
        from reasoning_gym.factory import DATASETS

        self._dataset, self._params = dataset, params or {}
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=1)
            raise ConfigError(
                f"reasoning-gym has no dataset {dataset!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"there are {len(DATASETS)}",
            )
        try:
            self._block(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym dataset {dataset!r} refuses {self._params}: {error}",
                hint="check options.params",
            ) from error

    @property
    def source(self) -> str:
        from importlib.metadata import version

        params = sorted(self._params.items())
        return f"reasoning-gym/{version('reasoning-gym')}/{self._dataset}/{params}"

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec | RejectedTask]:
        index = start
        while True:
            block = _SEED_OF_SPLIT[split] + seed * 10_000 + index // _BLOCK
            entry = self._block(block)[index % _BLOCK]
            yield TaskSpec(
                prompt=(text_message(events_pb2.ROLE_USER, entry["question"]),),
                verifier={"block": block, "item": index % _BLOCK},
                difficulty=0.0,
            )
            index += 1

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        dataset = self._block(int(verifier["block"]))
        entry = dataset[int(verifier["item"])]
        said = text_of(turns[-1].assistant).strip() if turns else ""
        score = float(dataset.score_answer(answer=said, entry=entry))
        return events_pb2.Evidence(
            validity=events_pb2.VALIDITY_VALID,
            items=[events_pb2.EvidenceItem(name="correct", value=score)],
        )

    @lru_cache(maxsize=8)  # noqa: B019 - lives as long as the environment, which lives as long as the process
    def _block(self, seed: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(
            self._dataset, size=_BLOCK, seed=seed % 2**31, **self._params
        )
