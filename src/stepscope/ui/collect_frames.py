"""Messages between two `stepscope run`s that share a token: each carries proof of it.

The server speaks first, with a random number; the client answers with another. Every frame has an
HMAC over both numbers, its direction, its place and its content, so nothing can be forged, replayed
or reordered. The token itself never travels here: the job's own store has carried it to the other
hosts (measure/collect.py), so it keeps out everybody who cannot read that store.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

PIECE_BYTES = 1 << 20
MOST_HELLO_BYTES = 4096
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct(f">I{_PROOF_BYTES}s")


class StrangerError(Exception):
    """The other side does not know the token, or does not keep to the protocol."""


class Channel:
    """One end of a connection, with a time by which all must be over."""

    def __init__(self, peer: socket.socket, token: str, *, is_server: bool, limit_s: float) -> None:
        self._peer, self._key = peer, token.encode()
        self._deadline = time.monotonic() + limit_s
        self._own, self._other = (b"S", b"C") if is_server else (b"C", b"S")
        self._sent = self._received = 0
        own = secrets.token_bytes(_NONCE_BYTES)
        if is_server:
            self._send_all(own)
            self._nonces = own + self._receive(_NONCE_BYTES)
        else:
            self._nonces = self._receive(_NONCE_BYTES) + own
            self._send_all(own)

    def extend(self, limit_s: float) -> None:
        """The other side has proved itself: it may take longer."""
        self._deadline = time.monotonic() + limit_s

    def send(self, content: bytes) -> None:
        proof = self._proof(self._own, self._sent, content)
        self._sent += 1
        self._send_all(_HEAD.pack(len(content), proof) + content)

    def send_json(self, value: Any) -> None:
        self.send(json.dumps(value).encode())

    def receive(self, most_bytes: int = PIECE_BYTES) -> bytes:
        size, proof = _HEAD.unpack(self._receive(_HEAD.size))
        if size > most_bytes:
            raise StrangerError(f"a message of {size} bytes")
        content = self._receive(size)
        if not hmac.compare_digest(proof, self._proof(self._other, self._received, content)):
            raise StrangerError("a message with a wrong token")
        self._received += 1
        return content

    def receive_json(self, most_bytes: int = MOST_HELLO_BYTES) -> dict[str, Any]:
        value = json.loads(self.receive(most_bytes))
        if not isinstance(value, dict):
            raise StrangerError("a message that is not a JSON object")
        return value

    def _proof(self, direction: bytes, place: int, content: bytes) -> bytes:
        start = self._nonces + direction + place.to_bytes(8, "big")
        return hmac.digest(self._key, start + content, "sha256")

    def _send_all(self, data: bytes) -> None:
        self._peer.settimeout(self._left_s())
        self._peer.sendall(data)

    def _receive(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            self._peer.settimeout(self._left_s())
            piece = self._peer.recv(min(left, PIECE_BYTES))
            if not piece:
                raise EOFError("the connection was closed")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        return left
