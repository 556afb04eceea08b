"""What end-to-end tests share: one server process and one engine of the demo model for the whole run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.e2e.demo_server import DemoServer, wait_for
from troth.artifact.resolve import DEMO_PACKAGE
from troth.config.options import EngineOptions, ModelOptions
from troth.library import Engine

ENGINE_CONTEXT = 1024


@pytest.fixture(scope="session")
def demo_model() -> None:
    """Skip by name where the demo model is absent."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.skip("the demo model is not installed")


@pytest.fixture(scope="session")
def running_server(demo_model: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """``troth serve``, started on first use. When it is stopped nothing may have gone wrong unseen."""
    with DemoServer(tmp_path_factory.mktemp("serve")) as server:
        yield server
    log = server.log.read_text()
    assert "Traceback" not in log, log


@pytest.fixture
def server(running_server: DemoServer) -> Iterator[DemoServer]:
    """The server, idle before the test and again after it: no request, no block left behind."""
    running_server.wait_until_idle()
    yield running_server
    running_server.wait_until_idle()


def require_idle(engine: Engine) -> None:
    """Wait until the engine runs nothing and every block is back in the pool."""

    def is_idle() -> bool:
        status = engine.status()
        assert status.state == "ready"
        return status.num_running == status.num_waiting == 0 and not any(status.blocks_used)

    wait_for(is_idle, lambda: f"still busy: {engine.status()}")


def open_engine() -> Engine:
    """An engine of the demo model, small."""
    options = EngineOptions(threads=1, max_rows=4)
    return Engine.open(model_options=ModelOptions(context_tokens=ENGINE_CONTEXT), engine_options=options)


@pytest.fixture(scope="session")
def running_engine(demo_model: None) -> Iterator[Engine]:
    """The demo model in this process."""
    with open_engine() as engine:
        yield engine


@pytest.fixture
def engine(running_engine: Engine) -> Iterator[Engine]:
    """The engine, idle before the test and again after it."""
    require_idle(running_engine)
    yield running_engine
    require_idle(running_engine)
