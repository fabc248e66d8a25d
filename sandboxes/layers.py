"""Layers: what sessions wrote, as immutable trees that snapshots are stacks of.

A layer is a file system that is mounted nowhere; a descriptor keeps it, and it is gone when the
last owner (a session, a snapshot) is. Layers hold what hostile code wrote: every step is taken by
descriptor, without following a link, and counts are bounded. As overlayfs keeps it, a name that was
removed is a device 0/0 or a file with the attribute ``user.overlay.whiteout``, and a folder that
hides what is below it has ``user.overlay.opaque``.

A stack is a tuple of layers, uppermost first.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollstream.errors import ContractError, InfraError

_ROOTS = ("work", "tmp")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A path is opened folder by folder, with one descriptor per level.
_MAX_DEPTH = 200
MAX_LAYERS = 16


class Layer:
    """Owns the descriptor of one layer."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


Stack: TypeAlias = Sequence[Layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of a merged tree: where its uppermost version is."""

    path: str
    folder: int
    name: str
    status: os.stat_result


def changes(above: Stack, below: Stack, limit: int) -> Iterator[tuple[str, str]]:
    """(path under the work folder, "added" | "changed" | "removed") of ``above + below`` against
    ``below``; at most ``limit``.
    """
    old = {entry.path: entry.status for entry in walk(below, limit)}
    new = {entry.path: entry.status for entry in walk([*above, *below], limit)}
    for path in sorted(old.keys() | new.keys()):
        if not path.startswith("work/"):
            continue
        if path not in new:
            yield path[5:], "removed"
        elif path not in old:
            yield path[5:], "added"
        elif _differs(old[path], new[path]):
            yield path[5:], "changed"


def walk(layers: Stack, limit: int) -> Iterator[Entry]:
    """The merged tree, folders before what is in them. The descriptors are only good meanwhile.

    Raises:
        ContractError: more than ``limit`` names, or deeper than can be walked.
    """
    count = 0
    with contextlib.ExitStack() as held:
        for root in _ROOTS:
            folders = []
            for layer in layers:
                top = os.open("files/" + root, _FOLDER, dir_fd=layer.fd)
                held.callback(os.close, top)
                folders.append(top)
            for entry in _merged(folders, root, 0):
                count += 1
                if count > limit:
                    raise ContractError(f"the tree has more than {limit} files")
                yield entry


def pack(layers: Stack, *, limit: int) -> bytes:
    """The merged tree as a tar: contents, modes, times, links, extended attributes.

    The same tree gives the same bytes.
    """
    out = io.BytesIO()
    seen: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in walk(layers, limit):
            _add(archive, entry, seen)
    return out.getvalue()


def unpack(data: bytes, layer: Layer) -> None:
    """The tree of ``pack`` into an empty layer.

    Raises:
        InfraError: the layer is too small for it.
        ContractError: it is no such tree.
    """
    owner = os.stat("files", dir_fd=layer.fd).st_uid
    times: list[tuple[str, float, int]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                with _parent(layer, member.name) as (folder, name):
                    _extract(archive, member, layer, folder, name)
                    if member.isdir():
                        times.append((member.name, member.mtime, member.mode))
                    if os.getuid() == 0:
                        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
        for path, mtime, mode in reversed(times):
            with _parent(layer, path) as (folder, name):
                os.chmod(name, mode, dir_fd=folder)
                os.utime(name, (mtime, mtime), dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise InfraError(
            f"the snapshot ({len(data)} bytes) cannot be laid out: {error.strerror}",
            hint="raise sandboxes.limits.disk_bytes",
        ) from error
    except tarfile.TarError as error:
        raise ContractError(f"the snapshot is damaged: {error}") from error


def _merged(folders: Sequence[int], path: str, depth: int) -> Iterator[Entry]:
    """Entries under ``path``, which is there in each of ``folders``, uppermost first."""
    if depth > _MAX_DEPTH:
        raise ContractError(f"the tree is deeper than {_MAX_DEPTH} folders")
    versions: dict[str, list[tuple[int, os.stat_result]]] = {}
    closed: set[str] = set()
    for folder in folders:
        for name in os.listdir(folder):
            if name in closed:
                continue
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if _whiteout(folder, name, status):
                closed.add(name)
                continue
            known = versions.setdefault(name, [])
            if known and not stat.S_ISDIR(status.st_mode):
                closed.add(name)
                continue
            known.append((folder, status))
            if not stat.S_ISDIR(status.st_mode) or _attribute(folder, name, "opaque"):
                closed.add(name)
    for name in sorted(versions):
        found = versions[name]
        if not found:
            continue
        folder, status = found[0]
        below = f"{path}/{name}"
        yield Entry(path=below, folder=folder, name=name, status=status)
        if stat.S_ISDIR(status.st_mode):
            with contextlib.ExitStack() as held:
                inner = []
                for parent, _ in found:
                    inner.append(os.open(name, _FOLDER, dir_fd=parent))
                    held.callback(os.close, inner[-1])
                yield from _merged(inner, below, depth + 1)


def _whiteout(folder: int, name: str, status: os.stat_result) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return (
        stat.S_ISREG(status.st_mode) and not status.st_size and _attribute(folder, name, "whiteout")
    )


def _attribute(folder: int, name: str, what: str) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            os.getxattr(fd, f"user.overlay.{what}")
        finally:
            os.close(fd)
        return True
    return False


def _differs(one: os.stat_result, other: os.stat_result) -> bool:
    """A folder's own times and size change with what is in it, and that is told apart."""
    if stat.S_ISDIR(one.st_mode) and stat.S_ISDIR(other.st_mode):
        return one.st_mode != other.st_mode
    return _state(one) != _state(other)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def _add(archive: tarfile.TarFile, entry: Entry, seen: dict[tuple[int, int], str]) -> None:
    status = entry.status
    member = tarfile.TarInfo(entry.path)
    member.mode = stat.S_IMODE(status.st_mode)
    member.mtime = status.st_mtime_ns / 1e9
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(entry.name, dir_fd=entry.folder)
    elif stat.S_ISFIFO(status.st_mode):
        member.type = tarfile.FIFOTYPE
    elif not stat.S_ISREG(status.st_mode):
        return  # a socket: nobody listens on it any more
    elif (first := seen.get((status.st_dev, status.st_ino))) is not None:
        member.type = tarfile.LNKTYPE
        member.linkname = first
    else:
        _add_file(archive, member, entry)
        seen[status.st_dev, status.st_ino] = entry.path
        return
    archive.addfile(member)


def _add_file(archive: tarfile.TarFile, member: tarfile.TarInfo, entry: Entry) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(entry.name, flags, dir_fd=entry.folder)
    except PermissionError as error:
        raise ContractError(
            f"{entry.path} cannot be read (mode {member.mode:o})", hint="give its owner read access"
        ) from error
    with os.fdopen(fd, "rb") as source:
        member.size = os.fstat(fd).st_size
        member.pax_headers = {
            f"SCHILY.xattr.{name}": os.getxattr(fd, name).decode("utf-8", "surrogateescape")
            for name in sorted(os.listxattr(fd))
            if name.startswith("user.") and not name.startswith("user.overlay.")
        }
        archive.addfile(member, source)


@contextlib.contextmanager
def _parent(layer: Layer, path: str) -> Iterator[tuple[int, str]]:
    """The folder of ``path`` in a layer, opened level by level, and the last name."""
    parts = path.split("/")
    if parts[0] not in _ROOTS or ".." in parts or "" in parts:
        raise ContractError(f"the snapshot is damaged: it has the path {path!r}")
    folder = os.open("files", _FOLDER, dir_fd=layer.fd)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder, parts[-1]
    finally:
        os.close(folder)


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, layer: Layer, folder: int, name: str
) -> None:
    if member.isdir():
        os.mkdir(name, 0o700, dir_fd=folder)
        return
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=folder)
    elif member.isfifo():
        os.mkfifo(name, member.mode, dir_fd=folder)
    elif member.islnk():
        with _parent(layer, member.linkname) as (source, old):
            os.link(old, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        return
    elif member.isreg():
        _extract_file(archive, member, folder, name)
    else:
        raise ContractError(f"the snapshot is damaged: {member.name!r} is no file")
    os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)


def _extract_file(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str
) -> None:
    source = archive.extractfile(member)
    assert source is not None, "a regular member has content"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    with os.fdopen(fd, "wb") as out:
        while piece := source.read(1 << 20):
            out.write(piece)
        for key, value in member.pax_headers.items():
            if key.startswith("SCHILY.xattr.user."):
                os.setxattr(fd, key[13:], value.encode("utf-8", "surrogateescape"))
        os.fchmod(fd, member.mode)
