"""docs/models.md lists the families, tensor types and tokenizers that the torch-free half of the code knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.artifact_files import gguf_bytes, safetensors_bytes, small_model_files, tensor_entry, write_folder
from tests.markdown import ROOT, Document, code, codes
from tests.portable.vocabularies import byte_level_metadata
from troth.artifact.artifact import Artifact
from troth.artifact.ggml_types import GgmlType
from troth.artifact.gguf import VERSIONS
from troth.artifact.resolve import _TEMPLATE_JINJA, _TEMPLATE_JSON, DEMO_FILE, DEMO_PACKAGE, resolve
from troth.artifact.safetensors import DTYPE_BITS, INDEX_NAME, SINGLE_NAME
from troth.artifact.template_source import GGUF_KEY, MAX_TEMPLATE_BYTES
from troth.config.families import FAMILIES, GGUF_FAMILIES
from troth.errors import ModelLoadError
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.pretokenizers import PRETOKENIZERS

DOCUMENT = Document.read("docs/models.md")


def artifacts(root: Path) -> list[Artifact]:
    """One artifact for each row of the first table but the demo model's, at the path that the row gives."""
    gguf = write_folder(root / "path", {"name.gguf": gguf_bytes()})
    folder = write_folder(root / "safetensors" / "name", small_model_files())
    entries = {"a": tensor_entry("F32", [1], 0, 4)}
    shards = {
        "config.json": {},
        INDEX_NAME: {"weight_map": {"a": "model-1.safetensors"}},
        "model-1.safetensors": safetensors_bytes(entries, bytes(4)),
    }
    sharded = write_folder(root / "sharded" / "name", shards)
    single = write_folder(root / "single" / "name", {"only.gguf": gguf_bytes()})
    cached = root / "models--org--name"
    write_folder(cached / "snapshots" / "0123abcd", small_model_files())
    return [resolve(place) for place in (gguf / "name.gguf", folder, sharded, single, cached)]


def test_models_document_gives_the_names_that_paths_are_served_under(tmp_path: Path) -> None:
    rows = DOCUMENT.table("given", "it is", "served as")
    gguf, folder, sharded, single, cached = (artifact.name for artifact in artifacts(tmp_path))
    assert [gguf, folder, f"the file's name: {single}", cached] == [
        code(rows[0]["served as"]),
        code(rows[1]["served as"]),
        f"{rows[2]['served as']}: only",
        code(rows[3]["served as"]),
    ]
    assert sharded == folder
    assert code(rows[4]["served as"]) == DEMO_FILE.removesuffix(".gguf")
    assert codes(rows[4]["it is"]) == [DEMO_PACKAGE.replace("_", "-")]
    assert {SINGLE_NAME, INDEX_NAME, "config.json", "tokenizer.json"} == set(codes(rows[1]["it is"]))
    assert f"version {' or '.join(map(str, VERSIONS))}," in rows[0]["it is"]


def test_models_document_lists_every_family_under_the_names_that_files_use() -> None:
    rows = DOCUMENT.table("family", "`model_type` in config.json", "GGUF `general.architecture`", "models")
    types = {name: code(row["family"]) for row in rows for name in codes(row["`model_type` in config.json"])}
    architectures = {name: code(row["family"]) for row in rows for name in codes(row["GGUF `general.architecture`"])}
    assert types == FAMILIES
    assert architectures == GGUF_FAMILIES
    files = {path.stem for path in (ROOT / "src/troth/models").glob("*.py")}
    assert {code(row["family"]) for row in rows} <= files


def test_models_document_lists_every_gguf_tensor_type_with_its_size() -> None:
    rows = DOCUMENT.table("type", "values per block", "bytes per block", "bits per value", "as a weight")
    listed = {
        code(row["type"]): (row["values per block"], row["bytes per block"], row["bits per value"]) for row in rows
    }
    assert listed == {
        kind.name: (str(kind.block_size), str(kind.block_bytes), f"{8 * kind.block_bytes / kind.block_size:g}")
        for kind in GgmlType
    }


def test_models_document_lists_every_dtype_of_safetensors() -> None:
    assert {code(row["dtype"]) for row in DOCUMENT.table("dtype", "as a weight")} == DTYPE_BITS.keys()


def test_models_document_lists_the_pretokenizers_by_what_they_do() -> None:
    rows = [codes(row["`tokenizer.ggml.pre`"]) for row in DOCUMENT.table("`tokenizer.ggml.pre`")]
    assert sorted(name for names in rows for name in names) == sorted(PRETOKENIZERS)
    assert all(len({id(PRETOKENIZERS[name]) for name in names}) == 1 for names in rows)
    assert len({id(PRETOKENIZERS[names[0]]) for names in rows}) == len(rows)


def test_models_document_lists_the_tokenizer_models_of_gguf() -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf(byte_level_metadata(model="rwkv"))
    section = DOCUMENT.section("Tokenizers").flat
    *names, last = ("`gpt2`", "`llama`", "`gemma4`", "`bert`")
    assert f"{', '.join(names)} and {last} are".replace("`", "") in str(caught.value)
    assert all(f"{name} (" in section for name in (*names, last))


def test_models_document_gives_the_order_and_size_of_chat_templates() -> None:
    text = DOCUMENT.section("Chat templates").flat
    places = (*_TEMPLATE_JSON, _TEMPLATE_JINJA, "tokenizer_config.json")
    assert f"The first of {', '.join(f'`{place}`' for place in places)} that has one" in text
    assert f"`{GGUF_KEY}`" in text
    assert f"{MAX_TEMPLATE_BYTES >> 20} MiB" in text
