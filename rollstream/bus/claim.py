"""Claim check: a value over ``bus.max_inline_bytes`` travels by reference.

The blob store holds the bytes; the record carries an empty value and the reference in a header.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollstream.blobs import BlobStore
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2

HEADER = "rollstream-blob"


class ClaimCheck:
    """Exchanges large values for references, and back."""

    def __init__(self, blobs: BlobStore, *, max_inline_bytes: int) -> None:
        self._blobs = blobs
        self._max_inline_bytes = max_inline_bytes

    def check_in(self, value: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
        """The value to send and the headers to add."""
        if len(value) <= self._max_inline_bytes:
            return value, []
        return b"", [(HEADER, self._blobs.put(value).SerializeToString())]

    def redeem(self, value: bytes, headers: Sequence[tuple[str, bytes]]) -> bytes:
        """The value that was sent.

        Raises:
            ContractError: the reference is broken, or the bytes are not those that were stored.
            InfraError: the blob store cannot be read.
        """
        for key, data in headers:
            if key == HEADER:
                return self._blobs.get(_reference(data))
        return value


def _reference(data: bytes) -> events_pb2.BlobRef:
    try:
        return events_pb2.BlobRef.FromString(data)
    except Exception as error:
        raise ContractError(f"header {HEADER} is not a blob reference: {error}") from error
