"""``troth serve``: one model over HTTP until told to stop.

The address answers at once, with 503 while the model loads. Owns start, signals and end; read next: ``served.py``,
``serve/app.py``, ``serve/listen.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from troth import compose
from troth.cli import flags
from troth.cli.exit_code import DONE
from troth.cli.quantity import bytes_text
from troth.cli.served import engine_client, served_model
from troth.cli.terminal import Terminal
from troth.cli.warm import WarmFile
from troth.config.folders import disk_cache_folder
from troth.config.options import NO_DISK_CACHE, EngineOptions, ModelOptions, ServeOptions
from troth.contracts.bounds import INT64
from troth.contracts.counted import counted
from troth.contracts.ports import EngineInfo
from troth.contracts.progress import stages_text
from troth.errors import DeviceError, NotReady, OptionError
from troth.runtime.isolate import ProcessEngineClient
from troth.serve.app import create_app
from troth.serve.listen import bind, server_for

WATCH_S: Final = 1.0
"""How often a ready engine is checked for having failed for good."""
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def run(args: Namespace, terminal: Terminal) -> int:
    """Serve. Raises TrothError: the address is taken, the model cannot be loaded, or its engine failed for good."""
    model, engine, options = flags.model_options(args), _engine_options(args), flags.serve_options(args)
    warm_file = WarmFile(options.warm) if options.warm is not None else None
    logging.basicConfig(stream=terminal.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if options.host not in _LOOPBACK and not options.api_keys:
        terminal.note(
            f"Everyone who reaches {options.host} may use this server; TROTH_API_KEY or --api-key asks for a key."
        )
    with _noted_signals() as stop_asked:
        asyncio.run(_serve(model, engine, options, terminal, stop_asked, warm_file))
    return DONE


def _engine_options(args: Namespace) -> EngineOptions:
    """As asked for; what conversations computed outlives a server unless it is told otherwise."""
    folder = disk_cache_folder()
    options = flags.engine_options(args, disk_cache=None if folder is None else str(folder))
    if args.disk_cache not in (None, NO_DISK_CACHE):
        _require_folder(Path(args.disk_cache).expanduser())
    return options


def _require_folder(folder: Path) -> None:
    """Make the disk cache's folder, if it is not there. Raises OptionError.

    An engine does without the user's own where it cannot be used; one that was named is not left out so quietly.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise OptionError(f"--disk-cache {folder}: {reason}; name another folder, or off")


def _require_aliases(options: ServeOptions, name: str) -> None:
    for requested, served in options.model_aliases:
        if served != name:
            raise OptionError(f"--alias {requested}={served}: {served!r} is not served here; write {requested}={name}")


async def _serve(
    model: ModelOptions,
    engine: EngineOptions,
    options: ServeOptions,
    terminal: Terminal,
    stop_asked: Callable[[], bool],
    warm_file: WarmFile | None,
) -> None:
    artifact = compose.find(model)
    name = model.name or artifact.name
    _require_aliases(options, name)
    with _listener(options) as listener:
        url = _url(listener)
        client = engine_client(name, model, engine)
        client.start()
        try:
            terminal.note(f"Loading {name} ...")
            text = await asyncio.to_thread(compose.load_text, artifact, model)
            models = [served_model(name, client, text)]
            if warm_file is not None:
                await asyncio.to_thread(warm_file.check, models, text.prompts(model.context_tokens or INT64))
            server = server_for(create_app(models, options), options, [client])
            server.should_exit = stop_asked()

            def stop(watching: asyncio.Task[None]) -> None:
                server.should_exit = True

            async def warmed() -> None:
                if warm_file is not None:
                    await warm_file.warm(models, terminal)

            watching = asyncio.create_task(_watch(client, warmed, lambda info: _announce(terminal, url, info)))
            watching.add_done_callback(stop)
            await server.serve(sockets=[listener])
            if watching.done():
                watching.result()
            watching.cancel()
        finally:
            await client.aclose()


async def _watch(
    client: ProcessEngineClient,
    warmed: Callable[[], Awaitable[None]],
    announce: Callable[[EngineInfo], None],
) -> None:
    """Warm the engine when it is ready, announce it, and wait for its end; one that was started again is warmed again.

    Raises what made it fail, or the warming.
    """
    warm_process = None
    while client.state not in ("failed", "closed"):
        process = None
        try:
            info, process = await client.ready(), client.process_id
            if process != warm_process:
                await warmed()
                if warm_process is None:
                    announce(info)
                warm_process = process
        except (NotReady, DeviceError):
            # An engine that was stopped, or crashed and loads again, is waited for; one that is well was at fault.
            if client.state == "ready" and client.process_id == process:
                raise
        await asyncio.sleep(WATCH_S)
    if client.state == "failed":
        _ = client.info


def _listener(options: ServeOptions) -> socket.socket:
    try:
        return bind(options)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror or error}; "
            "choose another --host or --port"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(terminal: Terminal, url: str, info: EngineInfo) -> None:
    plan = info.plan
    rows = counted(info.max_rows, "row")
    stages = f": {stages_text(info.load_stages_s)}" if info.load_stages_s else ""
    terminal.line(f"Serving {info.model} at {url}/v1 (loaded in {info.load_s:.1f} s{stages})")
    terminal.line(
        f"{info.family} on {info.device}, computing in {info.dtype}, KV cache in {info.kv_dtype}: {rows}, "
        f"context {info.context_tokens:,} tokens, {bytes_text(plan.total_bytes)} of {bytes_text(plan.usable_bytes)}"
    )
    for decision in plan.decisions:
        terminal.line(f"- {decision}")
    terminal.line("Ctrl-C stops it.")


@contextmanager
def _noted_signals() -> Iterator[Callable[[], bool]]:
    """While open, SIGINT and SIGTERM are only noted; the function that is given tells whether one came.

    uvicorn takes them over while it serves, and raises them again afterwards: the engine must still be closed then.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
