"""CPU per streamed token in the server process: HTTP, SSE and the engine socket, without a model.

The engine is a FakeEngine in a process of its own, the clients are plain sockets in another; what is measured is all
CPU time of the server's process, its socket threads included. The floor is the same process writing records of the
same size straight to the same sockets. Run ``python -m benchmarks.serve``; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any, Final

from troth.config.options import ServeOptions
from troth.runtime.isolate import ProcessEngineClient
from troth.serve.app import create_app
from troth.serve.listen import bind, server_for
from troth.testing.fake_server import byte_model

TARGET_US: Final = 60.0
GATE: Final = ("tests/portable/test_serve_stream.py", "tests/portable/test_isolate.py")
_RECORD: Final = b"ea\r\n" + b"x" * 0xEA + b"\r\n"
"""As long as the record of one short token."""


def read_all(port: int, num_streams: int, body: bytes) -> int:
    """Open the streams, send ``body`` on each, read all to their ends; return the records with a token."""
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "", ""])
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        stream = socket.create_connection(("127.0.0.1", port))
        stream.sendall(head.encode() + body)
        selector.register(stream, selectors.EVENT_READ, bytearray())
    num_records = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            key.data.extend(data)
            if not data:
                num_records += key.data.count(b'"delta":{"content":"a"}')
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return num_records


async def served_us(num_streams: int, num_tokens: int, step_s: float) -> float:
    """CPU microseconds per token through the whole server."""
    client = ProcessEngineClient(
        "troth.testing.fake_engine:build_fake_engine",
        {"text": "a", "step_s": step_s, "max_rows": num_streams},
        name="fake",
    )
    client.start()
    await client.ready()
    options = ServeOptions(port=0)
    listener = bind(options)
    server = server_for(create_app([byte_model(client)], options), options, [client])
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
    spent = []
    for tokens in (8, num_tokens):
        spent.append(await _spend(listener.getsockname()[1], num_streams, body | {"max_tokens": tokens}))
    server.should_exit = True
    await serving
    listener.close()
    # What a request costs before its first token and after its last is in both runs.
    return (spent[1] - spent[0]) / (num_streams * (num_tokens - 8)) * 1e6


async def _spend(port: int, num_streams: int, body: dict[str, Any]) -> float:
    reader = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.serve",
        *("--read", str(port), "--streams", str(num_streams), "--body", json.dumps(body)),
        stdout=subprocess.PIPE,
    )
    before = time.process_time()
    out, _ = await reader.communicate()
    spent = time.process_time() - before
    if int(out) != num_streams * body["max_tokens"]:
        raise RuntimeError(f"{num_streams * body['max_tokens']} tokens were asked for, {int(out)} came")
    return spent


async def floor_us(num_streams: int, num_tokens: int, step_s: float) -> float:
    """CPU microseconds per record written to a socket by an asyncio transport, and nothing else."""
    ready = asyncio.Semaphore(0)
    writers: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
        ready.release()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reading = asyncio.create_task(asyncio.to_thread(_read_elsewhere, port, num_streams))
    for _ in range(num_streams):
        await ready.acquire()
    spent = 0.0
    for _ in range(num_tokens):
        before = time.process_time()
        for writer in writers:
            writer.write(_RECORD)
        spent += time.process_time() - before
        await asyncio.sleep(step_s)
    for writer in writers:
        writer.close()
    await reading
    server.close()
    return spent / (num_streams * num_tokens) * 1e6


def _read_elsewhere(port: int, num_streams: int) -> None:
    command = [sys.executable, "-m", "benchmarks.serve", "--read", str(port), "--streams", str(num_streams)]
    subprocess.run([*command, "--body", "{}"], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-s", type=float, default=0.005)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--body", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(read_all(arguments.read, arguments.streams, arguments.body.encode()))
        return
    if not arguments.skip_tests and subprocess.run([sys.executable, "-m", "pytest", "-q", *GATE]).returncode:
        sys.exit("the matching tests fail; nothing was measured")
    shape = (arguments.streams, arguments.tokens, arguments.step_s)
    floors, values = [], []
    for _ in range(arguments.repeats):
        floors.append(asyncio.run(floor_us(*shape)))
        values.append(asyncio.run(served_us(*shape)))
    floor, value = statistics.median(floors), statistics.median(values)
    print(f"{arguments.streams} streams, {arguments.tokens} tokens each, a step every {arguments.step_s * 1e3:g} ms")
    print(f"floor   {floor:6.1f} us per token (socket writes alone)")
    print(f"server  {value:6.1f} us per token, {value / floor:.2f} x the floor; target {TARGET_US:g}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(
        json.dumps(
            {
                "benchmark": "serve",
                "commit": commit.stdout.strip(),
                "machine": platform.processor() or platform.machine(),
                "python": platform.python_version(),
                "uvicorn": version("uvicorn"),
                "options": {"streams": shape[0], "tokens": shape[1], "step_s": shape[2]},
                "floor_us": [round(one, 2) for one in floors],
                "server_us": [round(one, 2) for one in values],
                "ratio": round(value / floor, 3),
                "target_us": TARGET_US,
            }
        )
    )


if __name__ == "__main__":
    main()
