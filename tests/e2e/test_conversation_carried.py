"""A real model's conversation as a file: it goes on where its state was carried to, and nowhere else."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared
from troth.cli.main import main
from troth.cli.terminal import Terminal
from troth.config.options import EngineOptions, ModelOptions
from troth.library import Engine

pytestmark = pytest.mark.e2e

SYSTEM = "You keep notes. " + "Every word counts, and none is lost on the way. " * 12
FIRST = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "My name is Ada. Remember it."}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 0}


def asked(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["cache", *arguments], Terminal(stdin=io.StringIO(), stdout=out, stderr=out))
    return code, out.getvalue()


def opened(model: Path, cache: Path) -> Engine:
    options = EngineOptions(threads=1, max_rows=2, disk_cache=str(cache))
    return Engine.open(
        str(model), model_options=ModelOptions(context_tokens=1024, kv_dtype="float32"), engine_options=options
    )


def test_conversation_goes_on_with_a_copy_of_its_model_and_another_cache(tmp_path: Path) -> None:
    model, copy = shared("troth-tiny-hybrid"), tmp_path / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    with opened(model, tmp_path / "here") as engine:
        first = engine.chat(FIRST, **OPTIONS)
    turn = [*FIRST, {"role": "assistant", "content": first.text}]
    prompt, file = tmp_path / "turn.json", tmp_path / "file"
    prompt.write_text(json.dumps({"messages": turn}))
    common = ("--kv-dtype", "float32", "--disk-cache")
    code, text = asked("export", str(prompt), str(file), "-m", str(model), *common, str(tmp_path / "here"))
    assert code == 0, text
    told = re.fullmatch(
        r"Exported the state of (\d+) of (\d+) tokens to (.+), .+\.\nIt is for (.+), float32; .+\n", text
    )
    assert told is not None, text
    assert (told[3], told[4], int(told[2]) - int(told[1]) < 32) == (str(file), model.name, True)
    code, text = asked("import", str(file), "-m", str(copy), *common, str(tmp_path / "there"))
    assert code == 0, text
    assert text.startswith(f"Imported the state of {told[1]} tokens of copy, float32 from {file}, "), text
    code, text = asked("import", str(file), "-m", str(copy), *common, str(tmp_path / "there"), "--json")
    assert code == 0, text
    assert (told_again := json.loads(text))["num_known"] == told_again["num_members"] > 0
    second = [*turn, {"role": "user", "content": "What is my name?"}]
    with opened(copy, tmp_path / "there") as engine:
        carried = engine.chat(second, **OPTIONS)
        cold = engine.chat(second, prompt_cache=False, **OPTIONS)
    assert carried.usage.num_cached_tokens > first.usage.num_prompt_tokens - 32
    assert [token.token_id for token in carried.tokens] == [token.token_id for token in cold.tokens]
