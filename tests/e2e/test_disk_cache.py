"""Real models after a restart: what the disk cache gives back changes nothing but the time it takes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo_server import DemoServer, wait_for
from tests.shared_data import shared
from troth.config.options import EngineOptions, ModelOptions
from troth.library import Engine

pytestmark = pytest.mark.e2e

SYSTEM = "You are a helpful assistant who answers briefly. " + "Be kind and precise in every word. " * 12
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the capital of France?"}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": 0}


@pytest.mark.parametrize("model", ["demo", "hybrid"])
def test_turns_after_a_restart_equal_cold_ones(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if model == "demo":
        request.getfixturevalue("demo_model")
    path = None if model == "demo" else str(shared("troth-tiny-hybrid"))

    def opened() -> Engine:
        options = EngineOptions(threads=1, max_rows=2, disk_cache=str(tmp_path))
        return Engine.open(
            path, model_options=ModelOptions(context_tokens=1024, kv_dtype="float32"), engine_options=options
        )

    with opened() as engine:
        first = engine.chat(FIRST, **OPTIONS)
    second = [*FIRST, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    with opened() as engine:
        restored = engine.chat(second, **OPTIONS)
        cold = engine.chat(second, prompt_cache=False, **OPTIONS)
        status = engine.status().prefix_cache
    assert status is not None
    assert status.disk is not None
    assert status.disk.num_restores == {"restored": 1}
    assert [token.token_id for token in restored.tokens] == [token.token_id for token in cold.tokens]
    assert restored.usage.num_cached_tokens == status.disk.num_restored_tokens > first.usage.num_prompt_tokens - 32


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine's process in /proc")
def test_killed_engine_finds_its_conversations_again(demo_model: None, tmp_path: Path) -> None:
    with DemoServer(tmp_path, "--disk-cache", str(tmp_path / "cache")) as server:
        fields = {"messages": FIRST, "max_tokens": 16}
        before = server.chat(**fields).json()
        wait_for(lambda: disk(server)["num_written"] > 0, lambda: f"nothing is written: {disk(server)}")
        killed = server.engine_process_id
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: server.http.get("/health").status_code != 200, lambda: "the engine is not missed")
        server.wait_until_ready()
        assert server.engine_process_id != killed
        after = server.chat(**fields).json()
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > before["usage"]["prompt_tokens"] - 32
        assert disk(server)["num_restores"] == {"restored": 1}
        metrics = server.http.get("/metrics").text
        assert f'troth_engine_restores_total{{model="{before["model"]}",outcome="restored"}} 1.0' in metrics


def disk(server: DemoServer) -> dict[str, Any]:
    """What the server tells of its disk cache."""
    return dict(server.status()["prefix_cache"]["disk"])
