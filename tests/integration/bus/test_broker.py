"""The embedded broker's own start."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker, embedded
from rollstream.net import free_port


def test_any_cluster_id_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its base64 begins with "-".
    fixed = uuid.UUID(bytes=b"\xfb" + b"\x01" * 15)
    monkeypatch.setattr(embedded.uuid, "uuid4", lambda: fixed)
    broker = EmbeddedBroker(tmp_path, port=free_port())
    broker.start()
    try:
        socket.create_connection(("127.0.0.1", broker.port), 5).close()
    finally:
        broker.stop()
