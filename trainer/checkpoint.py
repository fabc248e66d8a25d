"""Atomic checkpoints: everything that the next step depends on, in one folder.

A checkpoint is written under a temporary name, synced to disk and renamed: it exists whole or not
at all. What it holds: weights (in ``policy/``, the same folder that is published; once more in
float32 where the policy is published in less), optimiser, random state, stage, step and version,
positions in the replay log, the buffered groups, the ids already trained on, and the events that
were to be emitted after it. A crash between the rename and the emission loses nothing: on resume
those events are emitted again, with the same ids.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from google.protobuf.message import DecodeError

from rollstream.errors import InfraError
from rollstream.v1 import events_pb2

_STATE = "state.json"
_TENSORS = "optimiser.pt"
_GROUPS = "groups.pb"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The plain part of a checkpoint.

    ``number`` rises with every checkpoint. ``stage`` is an index into trainer.stages and
    ``stage_step`` the steps done in it; ``version`` is the policy version, which is the number of
    RL steps, -1 before the baseline. ``events``: the step records that this checkpoint makes true,
    in hex. ``publish``: whether its weights are a new version; ``baseline`` and ``final`` say
    which, ``made_by`` in which stage. ``published``: number of the newest checkpoint whose weights
    were announced (0: none), which is kept as long as that is so, ``published_version`` their
    version.
    """

    number: int = 0
    stage: int = 0
    stage_step: int = 0
    version: int = -1
    step: int = 0
    samples_trained: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    publish: bool = False
    baseline: bool = False
    final: bool = False
    made_by: str = ""
    published: int = 0
    published_version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    state: TrainerState
    groups: list[events_pb2.TrainingGroup]

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    def tensors(self) -> dict[str, Any]:
        """Optimiser state, random state, and the weights where ``policy/`` has them rounded.

        Raises:
            InfraError: they cannot be read.
        """
        try:
            loaded: dict[str, Any] = torch.load(self.folder / _TENSORS, weights_only=True)
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            raise _unreadable(self.folder, error) from error
        return loaded


class CheckpointStore:
    """The checkpoints of one run; ``keep`` newest are kept."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint.

        Raises:
            InfraError: it is there and cannot be read.
        """
        complete = self._complete()
        if not complete:
            return None
        folder = complete[-1]
        try:
            raw = json.loads((folder / _STATE).read_text("utf-8"))
            raw["positions"] = {int(k): v for k, v in raw["positions"].items()}
            packed = events_pb2.TrainingGroupList.FromString((folder / _GROUPS).read_bytes())
            state = TrainerState(**raw)
        except (OSError, ValueError, KeyError, TypeError, DecodeError) as error:
            raise _unreadable(folder, error) from error
        return Checkpoint(folder=folder, state=state, groups=list(packed.groups))

    def save(
        self,
        state: TrainerState,
        groups: list[events_pb2.TrainingGroup],
        tensors: dict[str, Any],
        write_policy: Callable[[Path], None],
    ) -> Checkpoint:
        """Write a checkpoint and return it once it is durable.

        Raises:
            InfraError: the disk refuses, or another trainer was here; earlier checkpoints are
                untouched.
        """
        final = self.path(state.number)
        if final.exists():
            # Two lineages of steps must not be mixed: the second one ends here, unrecorded.
            raise InfraError(
                f"checkpoint {final} exists already",
                hint="is another trainer at work in this run folder?",
            )
        temporary = final.with_suffix(".tmp")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write_policy(temporary / "policy")
            torch.save(tensors, temporary / _TENSORS)
            packed = events_pb2.TrainingGroupList(groups=groups)
            (temporary / _GROUPS).write_bytes(packed.SerializeToString())
            (temporary / _STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
            _sync_tree(temporary)
            temporary.replace(final)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise InfraError(
                f"checkpoint {final} cannot be written: {error}", hint="is the disk full?"
            ) from error
        self._prune(published=state.published)
        return Checkpoint(folder=final, state=state, groups=groups)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def _complete(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("[0-9]*") if p.suffix != ".tmp")

    def _prune(self, *, published: int) -> None:
        """Remove old checkpoints, but not the one that a worker which starts now will fetch."""
        for old in self._complete()[: -self._keep]:
            if old != self.path(published):
                shutil.rmtree(old, ignore_errors=True)


def _unreadable(folder: Path, error: Exception) -> InfraError:
    return InfraError(
        f"checkpoint {folder} cannot be read: {error!r}",
        hint="remove the folder to go on from the one before",
    )


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
