"""Fetching a version: whole and as announced, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rollouts.policy import fetch
from rollstream.errors import ContractError, InfraError
from rollstream.v1 import policy_pb2

FILES = {"config.json": b"{}", "model.safetensors": b"x" * 1000, "extra/notes.txt": b"n"}


def published(folder: Path, version: int = 3) -> policy_pb2.PolicyVersion:
    entries = []
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append(policy_pb2.WeightFile(path=name, sha256=digest, size_bytes=len(data)))
    return policy_pb2.PolicyVersion(policy="p", version=version, uri=str(folder), files=entries)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_arrive_as_they_were_announced(tmp_path: Path, scheme: str) -> None:
    event = published(tmp_path / "source")
    event.uri = scheme + event.uri
    folder = fetch(event, tmp_path / "cache")
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    # Again: the same folder, whole.
    assert fetch(event, tmp_path / "cache") == folder


def test_a_damaged_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    event = published(tmp_path / "source")
    (tmp_path / "source/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ContractError, match=r"version 3: model.safetensors is not what"):
        fetch(event, tmp_path / "cache")
    assert not (tmp_path / "cache/00000003").exists()


def test_a_version_that_is_gone_says_what_to_look_at(tmp_path: Path) -> None:
    event = published(tmp_path / "source")
    (tmp_path / "source/config.json").unlink()
    with pytest.raises(InfraError, match=r"cannot be fetched from .*reach the trainer"):
        fetch(event, tmp_path / "cache")


def test_an_unknown_protocol_is_named(tmp_path: Path) -> None:
    event = published(tmp_path / "source")
    event.uri = "nosuch://bucket/3"
    with pytest.raises(InfraError, match="nosuch"):
        fetch(event, tmp_path / "cache")


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", ""])
def test_no_file_lands_outside_the_cache(tmp_path: Path, name: str) -> None:
    event = published(tmp_path / "source")
    event.files[0].path = name
    with pytest.raises(ContractError, match="no path inside"):
        fetch(event, tmp_path / "cache")
    assert not (tmp_path / "outside").exists()
