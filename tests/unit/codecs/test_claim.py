"""Values and what travels beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.blobs import BlobStore
from rollstream.bus.claim import DIGEST, REFERENCE, ClaimCheck
from rollstream.errors import ContractError


@pytest.fixture
def claim(tmp_path: Path) -> ClaimCheck:
    return ClaimCheck(BlobStore(tmp_path.as_uri()), max_inline_bytes=100)


@pytest.mark.parametrize(("size", "header"), [(0, DIGEST), (100, DIGEST), (101, REFERENCE)])
def test_a_value_comes_back(claim: ClaimCheck, size: int, header: str) -> None:
    value, headers = claim.check_in(b"x" * size)
    assert [key for key, _ in headers] == [header]
    assert len(value) == (size if header == DIGEST else 0)
    assert claim.redeem(value, [("traceparent", b"t"), *headers]) == b"x" * size


def test_a_changed_value_is_refused(claim: ClaimCheck) -> None:
    value, headers = claim.check_in(bytes(range(100)))
    for position in (0, 50, 99):
        changed = bytearray(value)
        changed[position] ^= 1
        with pytest.raises(ContractError, match="100 bytes are not those that were sent"):
            claim.redeem(bytes(changed), headers)


def test_bytes_of_another_producer_have_no_digest(claim: ClaimCheck) -> None:
    assert claim.redeem(b"theirs", ()) == b"theirs"
