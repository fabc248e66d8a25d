"""Makes folders reachable for sandbox uids without opening their parents: bind mounts of our own.

The mounts live in a private mount namespace of this process: nobody else sees them, and they are
gone when it ends, however it ends. They are read-only, and ``unbind`` detaches them before anything
is removed: what is shown through them is not ours to delete.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2


def enter_private_namespace() -> bool:
    """Give the calling thread, and what it starts, a mount namespace of its own.

    False where that is not allowed. Call it in the main thread, before sessions are started from
    it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return False
    return not libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def bind_read_only(source: Path, target: Path) -> None:
    """Show the folder ``source`` at ``target``, read-only, in this mount namespace.

    Raises:
        OSError: the kernel refuses; then nothing is mounted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    target.mkdir()
    where = os.fsencode(target)
    if libc.mount(os.fsencode(source), where, None, _MS_BIND, None):
        raise _error(target)
    if libc.mount(None, where, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None):
        error = _error(target)
        libc.umount2(where, _MNT_DETACH)
        raise error


def unbind(target: Path) -> None:
    """Detach what is shown at ``target`` and remove the empty folder.

    ``rmdir`` and nothing stronger: if the mount were still there it would fail, and harm nothing.
    """
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(target), _MNT_DETACH)
    target.rmdir()


def _error(target: Path) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), str(target))
