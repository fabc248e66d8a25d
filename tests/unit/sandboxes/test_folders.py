"""Folders of dead executors are removed, those of living ones and what is mounted in them are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.folders import ISOLATED, UNSAFE, Folder, sweep


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_living_owner_keeps_its_folder() -> None:
    folder = Folder(ISOLATED)
    sweep(ISOLATED)
    assert folder.path.is_dir()
    folder.release()
    assert not folder.path.exists()


def test_dead_owner_is_swept_at_the_next_start(temporary: Path) -> None:
    code = f"""
import os, tempfile; tempfile.tempdir = {str(temporary)!r}
from sandboxes.folders import ISOLATED, Folder
folder = Folder(ISOLATED); (folder.path / "root").mkdir(); (folder.path / "filter").touch(); os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path.cwd())
    assert done.returncode == -9
    (left,) = temporary.iterdir()
    Folder(ISOLATED).release()
    assert not left.exists()


def test_a_folder_that_is_not_empty_is_never_emptied(temporary: Path) -> None:
    """It may be a mount that shows the host's files."""
    kept = temporary / f"{ISOLATED}x" / "python" / "bin"
    kept.mkdir(parents=True)
    sweep(ISOLATED)
    assert kept.is_dir()


def test_work_folders_without_isolation_are_removed_whole(temporary: Path) -> None:
    outside = temporary / "outside"
    outside.mkdir()
    work = temporary / f"{UNSAFE}x" / "work"
    work.mkdir(parents=True)
    (work / "link").symlink_to(outside)
    sweep(UNSAFE)
    assert sorted(temporary.iterdir()) == [outside]
