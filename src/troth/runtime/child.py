"""One child process that runs ``engine_process``, with the socket it is spoken to through.

Owns the process, a private socket and their end; refuses to know what the messages mean beyond the first, Hello. Read
next: ``isolate.py``, which makes an EngineClient of it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import zmq

from troth.errors import StreamProtocol
from troth.runtime.engine_process import EngineSpec
from troth.runtime.frame_socket import FrameSocket, open_socket
from troth.runtime.wire import Hello, decode_to_server

_log = logging.getLogger(__name__)
_MAX_IPC_PATH: Final = 100
"""A Unix socket's path has room for about 107 bytes."""
_LAST_WORDS_S: Final = 1.0
"""How long messages of a process that has exited may still be on their way."""


class EngineChild:
    """A running engine process: started by the constructor, on the running loop, and ended by ``stop`` or by itself.

    Args:
        factory, options: see ``EngineSpec``.
        on_frame: called with each frame of the child, Hello included.
        on_exit: called once with the exit code (negative: the signal) after the process ended.

    Raises:
        OSError: no process, socket or folder could be had.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any],
        on_frame: Callable[[bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.started = time.monotonic()
        """When, in seconds of the monotonic clock."""
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._token = secrets.token_hex(16)
        self._identity: bytes | None = None
        self._unsent: list[bytes] = []
        self._exited = asyncio.Event()
        self._last_frame = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._folder = tempfile.mkdtemp(prefix="troth-")
        try:
            socket = open_socket(self._context, zmq.ROUTER)
            endpoint = _bind(socket, self._folder)
            spec = EngineSpec(endpoint=endpoint, token=self._token, factory=factory, options=dict(options))
            self._process = _spawn(spec)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._socket = FrameSocket(socket, self._receive)
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name=f"troth-wait-{self.pid}", daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send a frame; before the child has said Hello it is kept back."""
        if self._identity is None:
            self._unsent.append(frame)
        else:
            self._socket.send(self._identity, frame)

    def last_frame_came(self) -> None:
        """Tell ``stop`` that nothing more is to be expected from the child."""
        self._last_frame.set()

    async def stop(self, timeout_s: float) -> None:
        """Wait until a child that was asked to close has; after ``timeout_s`` make it end."""
        if not await _within(self._exited, timeout_s):
            _log.warning("engine process %d did not close within %g s and is ended", self.pid, timeout_s)
            self._process.kill()
            await self._exited.wait()
        elif self._process.returncode == 0:
            await _within(self._last_frame, _LAST_WORDS_S)

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()

    def dispose(self) -> None:
        """Give back the socket and its files, after the process ended. Idempotent."""
        self._socket.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _receive(self, parts: list[bytes]) -> None:
        identity, frame = parts[0], parts[-1]
        if self._identity is None:
            hello = decode_to_server(frame)
            if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self._token):
                raise StreamProtocol("a stranger spoke on the socket of an engine process; ignored")
            self._identity = identity
            # Both ends hold the connection now: nobody else needs the file, and a killed server leaves nothing.
            shutil.rmtree(self._folder, ignore_errors=True)
            for unsent in self._unsent:
                self._socket.send(identity, unsent)
            self._unsent.clear()
        if identity == self._identity:
            self._on_frame(frame)

    def _wait(self) -> None:
        exit_code = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._after_exit, exit_code)
        except RuntimeError:
            # The loop was closed before the process was; nobody is left to be told.
            pass

    def _after_exit(self, exit_code: int) -> None:
        self._exited.set()
        self._on_exit(exit_code)


def cause_of(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code < 0:
        try:
            return f"signal {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"signal {-exit_code}"
    return f"exit code {exit_code}"


def _bind(socket: zmq.Socket[bytes], folder: str) -> str:
    """Listen where only this user can connect, else on the loopback interface; return the address."""
    path = os.path.join(folder, "engine")
    if zmq.has("ipc") and len(os.fsencode(path)) <= _MAX_IPC_PATH:
        address = f"ipc://{path}"
        socket.bind(address)
        return address
    # Anyone on this machine can connect here; the token in Hello tells the child from a stranger.
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def _spawn(spec: EngineSpec) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "troth.runtime.engine_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        bufsize=0,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
    except BrokenPipeError:
        # It died before it read a byte; its exit code tells more than this error.
        pass
    return process


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
