"""Real models after a restart: what the disk cache gives back changes nothing but the time it takes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo_server import DemoServer, wait_for
from tests.model_files import TALKERS
from troth.config.options import EngineOptions
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.speculation import Speculation
from troth.library import Engine
from troth.schedule.row_prefix import TAIL_TOKENS

pytestmark = pytest.mark.e2e

SYSTEM = "You are a helpful assistant who answers briefly. " + "Be kind and precise in every word. " * 12
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the capital of France?"}]
LONG = "Windows of 512 tokens do not reach back to the beginning of this. " * 40
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": 0}


@pytest.mark.parametrize("topology", TALKERS)
def test_turns_after_a_restart_equal_cold_ones(topology: str, tmp_path: Path) -> None:
    model_options = TALKERS[topology]()

    def opened() -> Engine:
        options = EngineOptions(threads=1, max_rows=2, disk_cache=str(tmp_path))
        return Engine.open(model_options=model_options, engine_options=options)

    system = SYSTEM + LONG if topology == "sliding windows" else SYSTEM
    opening = [{"role": "system", "content": system}, FIRST[1]]
    with opened() as engine:
        first = engine.chat(opening, **OPTIONS)
    second = [*opening, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    with opened() as engine:
        before = engine.status().prefix_cache
        assert before is not None
        assert before.disk is not None
        assert before.disk.prefill_tokens_per_s > 0, "whether reading beats computing is known from the start"
        restored = engine.chat(second, **OPTIONS)
        cold = engine.chat(second, prompt_cache=False, **OPTIONS)
        status = engine.status().prefix_cache
    assert status is not None
    assert status.disk is not None
    assert status.disk.num_restores == {"restored": 1}
    assert status.disk.read_bytes_per_s > 0
    assert [token.token_id for token in restored.tokens] == [token.token_id for token in cold.tokens]
    assert restored.usage.num_cached_tokens == status.disk.num_restored_tokens > first.usage.num_prompt_tokens - 32


def test_five_turns_of_a_hybrid_compute_what_is_new_across_a_restart(tmp_path: Path) -> None:
    """Drafts are verified all the while: no checkpoint is of a state behind a wrong one, and hardly any is missing."""
    options = EngineOptions(threads=1, max_rows=2, disk_cache=str(tmp_path))
    drafted = Speculation(sources=("ngram",), depth=3, adaptive=False)
    asked = OPTIONS | {"max_tokens": 40}
    talk = [{"role": "system", "content": SYSTEM}]
    num_known = num_drafted = 0
    for questions in (("My name is Ada. Remember it.", "What is my name?", "Say it twice."), ("Again.", "Once more.")):
        with Engine.open(model_options=TALKERS["recurrent state"](), engine_options=options) as engine:
            for question in questions:
                talk.append({"role": "user", "content": question})
                reply = engine.chat(talk, speculation=drafted, **asked)
                cold = engine.chat(talk, prompt_cache=False, **asked)
                assert [token.token_id for token in reply.tokens] == [token.token_id for token in cold.tokens]
                gap = num_known - reply.usage.num_cached_tokens
                assert gap < TAIL_TOKENS + 2 * BLOCK_TOKENS, f"{gap} tokens of earlier turns were computed again"
                num_known = reply.usage.num_prompt_tokens + reply.usage.num_completion_tokens
                talk.append({"role": "assistant", "content": reply.text})
                assert reply.speculation is not None
                num_drafted += reply.speculation.num_drafted
    assert num_drafted > 0


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
