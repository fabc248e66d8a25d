"""The blob store: bytes under their SHA-256, in any fsspec file system.

Writing is idempotent (same bytes, same name) and atomic (temporary name, then a rename). Reading
checks the digest.
"""

from __future__ import annotations

import hashlib
import uuid

import fsspec

from rollstream.errors import ContractError, InfraError
from rollstream.v1 import events_pb2


class BlobStore:
    """Content-addressed blobs under one URI (a directory, ``s3://...``, ``memory://...``)."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._fs, self._root = fsspec.core.url_to_fs(uri)

    def put(
        self, data: bytes, *, media_type: str = "application/octet-stream"
    ) -> events_pb2.BlobRef:
        """Store ``data`` and return its reference. ``InfraError`` when the store refuses."""
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        try:
            if not self._fs.exists(path):
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                temporary = f"{path}.{uuid.uuid4().hex}.tmp"
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, path)
        except OSError as error:
            raise InfraError(
                f"blob {digest} ({len(data)} bytes) cannot be stored in {self.uri}: {error}",
                hint="is there space, and is blob.uri writable?",
            ) from error
        return events_pb2.BlobRef(sha256=digest, size_bytes=len(data), media_type=media_type)

    def get(self, ref: events_pb2.BlobRef) -> bytes:
        """The bytes of ``ref``.

        Raises:
            InfraError: the blob is missing or cannot be read.
            ContractError: the bytes are not those that were stored.
        """
        try:
            data: bytes = self._fs.cat_file(self._path(ref.sha256))
        except OSError as error:
            raise InfraError(
                f"blob {ref.sha256} cannot be read from {self.uri}: {error}",
                hint="do all services use the same blob.uri?",
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != ref.sha256:
            raise ContractError(
                f"blob {ref.sha256} in {self.uri} has digest {found}: it was damaged"
            )
        return data

    def _path(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}"
