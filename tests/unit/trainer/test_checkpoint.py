"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollstream.errors import InfraError
from rollstream.v1 import events_pb2
from trainer.checkpoint import CheckpointStore, TrainerState


def _policy(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")


def _save(store: CheckpointStore, state: TrainerState) -> None:
    groups = [events_pb2.TrainingGroup(group_id="g")]
    store.save(state, groups, {"rng": torch.zeros(3)}, _policy)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    state = TrainerState(number=1, step=3, positions={0: 7, 11: 2}, finished=["a"], events=["00"])
    _save(store, state)
    found = store.latest()
    assert found is not None
    assert found.state == state
    assert [g.group_id for g in found.groups] == ["g"]
    assert found.tensors()["rng"].tolist() == [0, 0, 0]
    assert (found.policy / "model.safetensors").read_bytes() == b"weights"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for number in range(1, 12):
        _save(store, TrainerState(number=number))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000010", "00000011"]


def test_a_write_that_fails_leaves_the_earlier_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, TrainerState(number=1))

    def refuse(folder: Path) -> None:
        _policy(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(InfraError, match=r"00000002 cannot be written.*is the disk full\?"):
        store.save(TrainerState(number=2), [], {}, refuse)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


@pytest.mark.parametrize("name", ["state.json", "groups.pb", "optimiser.pt"])
@pytest.mark.parametrize("content", [None, b"", b"\xff{", b'{"positions": {}, "colour": 1}'])
def test_a_damaged_one_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, TrainerState(number=1))
    path = tmp_path / "00000001" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    if name == "groups.pb" and content == b"":
        # No groups: a sound message.
        return
    with pytest.raises(InfraError, match=r"00000001 cannot be read.*remove the folder"):
        latest = store.latest()
        assert latest is not None
        latest.tensors()
