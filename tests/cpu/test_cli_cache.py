"""``troth cache`` on folders that a disk tier wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.disk_blocks import NAMESPACE, chain, tensors_of
from troth.cache.disk_tier import DiskTier
from troth.cli.main import main
from troth.cli.terminal import Terminal


def asked(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["cache", *arguments], Terminal(stdin=io.StringIO(), stdout=out, stderr=out))
    return code, out.getvalue()


def told(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(asked(*arguments, "--json")[1])
    return values


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> str:
    tier = DiskTier(tmp_path / "cache", NAMESPACE, quota_bytes=10**9, label="pebble, float16")
    tier.offer("kv0", chain(1), tensors_of(chain(1)))
    tier.offer("state", chain(1)[-1:], tensors_of(chain(1)[-1:]))
    tier.close()
    return str(tmp_path / "cache")


def test_cache_sums_up_and_lists_what_is_kept(folder: str) -> None:
    code, text = asked("--disk-cache", folder)
    assert code == 0
    assert "in 2 files of 1 model" in text
    code, text = asked("list", "--disk-cache", folder)
    assert code == 0
    assert "pebble, float16" in text
    contents = told("list", "--disk-cache", folder)["contents"]
    assert [(one["kind"], one["num_files"], one["num_blocks"]) for one in contents] == [("kv0", 1, 8), ("state", 1, 1)]
    assert {one["namespace"] for one in contents} == {NAMESPACE}


def test_cache_verify_removes_what_is_damaged_and_fails_once(folder: str) -> None:
    assert asked("verify", "--disk-cache", folder)[0] == 0
    hurt = next(Path(folder).rglob("*.safetensors"))
    hurt.write_bytes(hurt.read_bytes()[:-1])
    code, text = asked("verify", "--disk-cache", folder)
    assert (code, text) == (1, "2 files read, 1 damaged and removed.\n")
    assert asked("verify", "--disk-cache", folder) == (0, "1 file read, 0 damaged and removed.\n")


def test_cache_flush_removes_everything(folder: str) -> None:
    assert told("flush", "--disk-cache", folder)["num_removed"] == 2
    assert not list(Path(folder).rglob("*.safetensors"))
    assert told("--disk-cache", folder)["num_bytes"] == 0


def test_cache_says_where_there_is_none(tmp_path: Path) -> None:
    assert asked("--disk-cache", str(tmp_path / "no")) == (2, f"No disk cache at {tmp_path / 'no'}.\n")
    assert not (tmp_path / "no").exists()
    assert asked("--disk-cache", "off")[0] == 2
    code, text = asked("eat")
    assert code == 2
    assert "stats, list, verify, flush, export, import, not 'eat'" in text


def test_cache_looks_at_the_files_it_is_given_before_it_looks_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("[]")
    gone, model = str(tmp_path / "gone"), ("-m", str(tmp_path / "no model"), "--disk-cache", str(tmp_path))
    assert asked("export", gone, "x", *model) == (2, f"troth: {gone}: there is no such file\n")
    assert asked("import", gone, *model) == (2, f"troth: {gone}: there is no such file\n")
    code, text = asked("export", str(tmp_path / "list"), "x", *model)
    assert (code, text.partition("list: ")[2]) == (2, "must be an object with messages or a prompt, not an array\n")
    assert asked("import", *model) == (2, "troth: cache import takes FILE, not 0 operands\n")


def test_cache_tells_of_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").mkdir()
    code, text = asked("list", "--disk-cache", str(tmp_path))
    assert code == 1
    assert "cannot be used" in text
