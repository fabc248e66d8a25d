"""Temporary folders of an executor, and the removal of those that a killed one left behind.

A folder carries a lock that its owner holds for life. Whoever can take the lock knows that the
owner is dead, whatever its pid is called now or in which container it ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

ISOLATED = "rollstream-executor-"
UNSAFE = "rollstream-unsafe-"


class Folder:
    """A folder under the temporary directory, ours until ``release``."""

    def __init__(self, prefix: str, *, mode: int = 0o700) -> None:
        """Make one, after removing the dead ones with the same ``prefix``."""
        sweep(prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                # Another executor that starts just now may have swept it before it was locked.
                self.path.chmod(mode)
                return

    def release(self) -> None:
        """Remove it."""
        remove(self.path, contents=self.path.name.startswith(UNSAFE))
        os.close(self._lock)


def sweep(prefix: str) -> None:
    """Remove the folders of dead owners. Those of other users are not ours to judge."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path, contents=prefix == UNSAFE)
            finally:
                os.close(lock)


def remove(path: Path, *, contents: bool) -> None:
    """Remove a folder, its files and its empty folders.

    Without ``contents`` nothing is removed recursively: what looks like a folder may be a mount
    that shows the host's own files.
    """
    if contents:
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()
        path.rmdir()
