"""``troth models``: which models are found, what is told of them, and what is said of broken ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.artifact_files import (
    ARRAY,
    SMALL_KEYS,
    STRING,
    U32,
    gguf_bytes,
    safetensors_bytes,
    small_model_files,
    tensor_entry,
    write_folder,
)
from troth.artifact import resolve
from troth.cli import catalogue
from troth.cli.main import main


@pytest.fixture(autouse=True)
def _nothing_else_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resolve, "DEMO_PACKAGE", "no_such_package")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("TROTH_MODEL", raising=False)


def listed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    assert main(["models", "--json", *map(str, arguments)]) == code
    value: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return value


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(keys=[*SMALL_KEYS, ("llama.context_length", U32, 2048)]))
    return path


@pytest.mark.parametrize(
    ("kind", "file_type", "shown"),
    [
        (U32, 15, "gguf Q4_K_M"),
        (U32, 1, "gguf F16"),
        (U32, 999, "gguf F32"),
        (ARRAY, (U32, [15]), "gguf F32"),
        (STRING, "15", "gguf F32"),
    ],
)
def test_models_tells_the_mixture_that_a_gguf_declares(
    kind: int, file_type: Any, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People look for the name the file was published under, not for the type of its embedding."""
    path = tmp_path / "pebble.gguf"
    path.write_bytes(gguf_bytes(keys=[*SMALL_KEYS, ("general.file_type", kind, file_type)]))
    assert listed(capsys, path)[0]["format"] == shown


def test_models_describes_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path / "pebble.gguf")
    assert listed(capsys, path) == [
        {
            "source": "given",
            "path": str(path),
            "name": "pebble",
            "family": "llama",
            "num_parameters": 3 * 32 + 32,
            "format": "gguf F32",
            "size_bytes": path.stat().st_size,
            "context_tokens": 2048,
            "problem": None,
        }
    ]


def test_models_describes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = small_model_files() | {
        "config.json": {"model_type": "pebble", "text_config": {"max_position_embeddings": 64}}
    }
    write_folder(tmp_path / "pebble", files)
    (entry,) = listed(capsys, tmp_path / "pebble")
    assert (entry["family"], entry["context_tokens"], entry["num_parameters"]) == ("pebble", 64, 7)
    assert entry["format"] == "safetensors F32"


def test_models_counts_no_parameters_where_weights_are_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_model_files() | {"config.json": {"model_type": "pebble", "quantization": {"bits": 4}}}
    (entry,) = listed(capsys, write_folder(tmp_path / "packed", files))
    assert entry["num_parameters"] is None
    assert entry["context_tokens"] is None


def test_models_finds_models_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "all"
    gguf(root / "a" / "b" / "one.gguf")
    gguf(root / "a" / "two.GGUF")
    write_folder(root / "c", small_model_files())
    gguf(root / ".hidden" / "three.gguf")
    gguf(root / "1" / "2" / "3" / "4" / "5" / "deep.gguf")
    (root / "loop").symlink_to(root)
    assert [entry["path"] for entry in listed(capsys, root)] == [
        str(root / "a" / "b" / "one.gguf"),
        str(root / "a" / "two.GGUF"),
        str(root / "c"),
    ]


def test_models_lists_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path / "one.gguf")
    assert len(listed(capsys, path, tmp_path, path)) == 1


def test_models_lists_broken_ones_with_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf_bytes()[:40])
    (tmp_path / "empty").mkdir()
    lonely = {"model.safetensors": safetensors_bytes({"a": tensor_entry("F32", [1], 0, 4)}, bytes(4))}
    write_folder(tmp_path / "lonely", lonely)
    good = gguf(tmp_path / "good.gguf")
    places = [tmp_path / name for name in ("cut.gguf", "empty", "lonely", "gone")]
    entries = listed(capsys, *places, good, code=2)
    problems = [entry["problem"] for entry in entries]
    assert problems[4] is None
    for problem, told in zip(
        problems, ("cut.gguf", "holds no weights", "no config.json", "no such file"), strict=False
    ):
        assert told in problem
    assert all(entry["family"] is None and entry["size_bytes"] is None for entry in entries[:4])


def test_models_says_by_its_exit_code_that_a_place_named_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = listed(capsys, gguf(tmp_path / "fine.gguf"), tmp_path / "gone", code=2)
    assert [entry["problem"] is None for entry in entries] == [True, False]


def test_models_table_tells_the_good_and_then_the_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf(tmp_path / "pebble.gguf")
    assert main(["models", str(path), str(tmp_path / "gone")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "family", "parameters", "format", "size", "context", "path"]
    assert lines[2].split() == [
        "pebble",
        "llama",
        "128",
        "gguf",
        "F32",
        f"{path.stat().st_size}",
        "B",
        "2,048",
        str(path),
    ]
    assert lines[4] == "Cannot be read:"
    assert lines[5].startswith(f"  {tmp_path / 'gone'}: there is no such file")


def test_models_says_what_to_do_when_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("No models here. Give a folder to look in")
    assert listed(capsys) == []


def test_models_looks_at_the_variable_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROTH_MODEL", str(gguf(tmp_path / "mine.gguf")))
    snapshot = tmp_path / "hub" / "models--org--pebble" / "snapshots" / "0123abc"
    write_folder(snapshot, small_model_files())
    gguf(tmp_path / "hub" / "models--org--ggufs" / "snapshots" / "0123abc" / "q" / "x.gguf")
    write_folder(tmp_path / "hub" / "models--org--tokenizer" / "snapshots" / "0123abc", {"tokenizer.json": {}})
    entries = listed(capsys)
    assert [(entry["source"], entry["name"]) for entry in entries] == [
        ("TROTH_MODEL", "mine"),
        ("cache", "x"),
        ("cache", "org/pebble"),
        ("cache", "models--org--tokenizer"),
    ]
    assert entries[2]["path"] == str(tmp_path / "hub" / "models--org--pebble")
    assert "holds no weights" in entries[3]["problem"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_models_survives_a_folder_that_cannot_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0)
    try:
        (entry,) = listed(capsys, shut)
    finally:
        shut.chmod(0o700)
    assert "cannot be listed" in entry["problem"]


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"HF_HUB_CACHE": "/a/hub", "HF_HOME": "/b"}, "/a/hub"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
        # In a container whose user has no home: that was an error of every command that looks there.
        ({"HF_HOME": "~nobody-is-called-so/hf"}, "~nobody-is-called-so/hf/hub"),
    ],
)
def test_cache_is_where_huggingface_hub_has_it(environ: dict[str, str], place: str) -> None:
    assert str(catalogue.huggingface_cache(environ)) == place
