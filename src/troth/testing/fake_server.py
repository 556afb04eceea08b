"""A real HTTP server over a FakeEngine, for testing clients of Troth without a model.

Refuses to know anything the real server does not; only the engine is fake. Read next: ``fake_engine.py``,
``serve/app.py``.

    with FakeServer(FakeEngine("Hello there.")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

from troth.config.options import ServeOptions
from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.ports import EngineClient
from troth.serve.app import create_app
from troth.serve.listen import bind, server_for
from troth.serve.model import ServedModel
from troth.testing.byte_tokenizer import BytePrompts, ByteTokenizer
from troth.testing.fake_engine import FakeEngine
from troth.text.call_pattern import CallPattern
from troth.text.grammar import GrammarCompiler

_START_S: Final = 30.0
_Result = TypeVar("_Result")


def byte_model(
    client: EngineClient,
    *,
    name: str = "fake",
    prompts: BytePrompts | None = None,
    capabilities: TemplateCapabilities | None = None,
    calls: CallPattern | None = None,
) -> ServedModel:
    """A served model over any engine that speaks bytes."""
    grammars = GrammarCompiler(ByteTokenizer(), ByteTokenizer.vocab_size)
    return ServedModel(
        name=name,
        client=client,
        prompts=prompts or BytePrompts(),
        tokenizer=ByteTokenizer(),
        grammars=grammars,
        objects={"grammars": grammars.status},
        capabilities=capabilities or TemplateCapabilities(),
        calls=calls,
        created=0,
    )


class FakeServer:
    """Serves on 127.0.0.1 in a thread of its own while used as a context manager.

    Args:
        engine: what answers, or the models; none: a FakeEngine with its default text.
        options: how it is served; ``port`` 0 takes a free one.
    """

    def __init__(
        self,
        engine: FakeEngine | list[ServedModel] | None = None,
        options: ServeOptions | None = None,
        **app_arguments: Any,
    ) -> None:
        self._models = engine if isinstance(engine, list) else [byte_model(engine or FakeEngine())]
        self._options = options or ServeOptions(port=0)
        app = create_app(self._models, self._options, **app_arguments)
        self.server = server_for(app, self._options, [model.client for model in self._models])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="troth-fake-server")

    def __enter__(self) -> Self:
        self.listener = bind(self._options)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        """Host and port."""
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        """Without a path."""
        self._thread.start()
        if not self._running.wait(_START_S):
            raise TimeoutError(f"the server at {self.url} did not start within {_START_S:g} s")
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.should_exit = True
        self._thread.join()
        self.listener.close()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function on the server's event loop, where its engines live."""

        async def called() -> _Result:
            return function()

        return self.run(called())

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the server's event loop."""
        assert self._loop is not None, "the server runs inside its with block"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._running.set)
        await self.server.serve(sockets=[self.listener])
