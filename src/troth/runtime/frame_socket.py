"""A ZeroMQ socket on an asyncio loop: frames in by callback, frames out without waiting.

Refuses to know what is in a frame. Each engine step is a frame, so sending must not need a coroutine; a frame costs
70 % of what it does through zmq.asyncio (2 cores, loopback). Read next: ``isolate.py`` and ``engine_process.py``, its
two users.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

_FRAMES_PER_TURN: Final = 64
"""Frames taken before other work of the loop gets its turn."""
MAX_FRAME_BYTES: Final = 256 * 2**20


class FrameSocket:
    """Owns ``socket``: it is read until ``close``, on the running loop.

    Args:
        socket: a bound or connected socket; its high-water marks are lifted, as volume is bounded by credit.
        on_parts: called with the parts of each message.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_parts: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.FD
        self._loop.add_reader(self._fd, self._read)
        # The descriptor signals changes, not states: what arrived before this line is found only by looking.
        self._loop.call_soon(self._read)

    def send(self, *parts: bytes) -> None:
        """Send one message. A message to a peer that is gone is dropped; nothing is sent after ``close``."""
        if self._socket.closed:
            return
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        # Sending can use up the signal of a message that came in meanwhile.
        if self._socket.poll(0, zmq.POLLIN):
            self._loop.call_soon(self._read)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop reading and close; unsent messages get ``linger_s`` in the background. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=int(linger_s * 1000))

    def _read(self) -> None:
        for _ in range(_FRAMES_PER_TURN):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_parts(parts)
            except BaseException:
                # The signal for messages behind this one is spent; without another look they would lie there.
                self._loop.call_soon(self._read)
                raise
        self._loop.call_soon(self._read)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket whose volume is bounded by its users and whose messages are bounded in size."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
