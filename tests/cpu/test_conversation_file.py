"""A conversation's state as a file: what a request needs, nothing of others, refused by name where it is damaged."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.disk_blocks import QUOTA
from troth.cache.conversation_file import CachePlace, export_conversation, import_conversation
from troth.cache.disk_bundle import Bundle
from troth.cache.disk_folder import DiskFolder
from troth.cache.disk_names import block_names
from troth.cache.disk_reach import DiskReach
from troth.contracts.cache_spec import AttentionSpec
from troth.errors import DeviceError, OptionError

FULL = AttentionSpec(layers=(0,), num_kv_heads=1, head_dim=4, value_dim=4, element_bytes=4)
WINDOW = AttentionSpec(layers=(1,), num_kv_heads=1, head_dim=4, value_dim=4, element_bytes=4, window=40)
COMMON = "c0" * 32
IDS = [at * 7 % 1000 for at in range(16 * 8 + 5)]


def blocks(text: Sequence[int], places: range, layer: int) -> dict[str, Tensor]:
    """Contents that tell which tokens they stand for."""
    rows = torch.tensor([text[place * 16 : place * 16 + 16] for place in places], dtype=torch.float32)
    return {f"{layer}.k": rows + layer, f"{layer}.v": -rows}


def put(place: CachePlace, text: Sequence[int], kind: str, places: range) -> None:
    names = block_names(place.namespace, "", text)[places.start : places.stop]
    layer = place.reach.kinds.index(kind)
    tensors = blocks(text, places, layer)
    place.folder.write(Bundle(kind=kind, namespace=place.namespace, names=tuple(names), tensors=tensors))


def content(place: CachePlace, text: Sequence[int], kind: str) -> dict[int, Tensor]:
    """What the folder holds of a text, by block."""
    names = block_names(place.namespace, "", text)
    found = {}
    for at, name in enumerate(names):
        where = place.folder.find(kind, [name]).get(name)
        if where is not None:
            bundle = place.folder.read(where.file)
            assert bundle is not None
            assert bundle.names[where.position] == name
            found[at] = bundle.tensors[f"{place.reach.kinds.index(kind)}.k"][where.position]
    return found


@pytest.fixture(name="place_at")
def _place_at(tmp_path: Path) -> Iterator[Callable[..., CachePlace]]:
    opened: list[DiskFolder] = []

    def place_at(name: str, common: str = COMMON, label: str = "pebble, float16") -> CachePlace:
        folder = DiskFolder(tmp_path / name, quota_bytes=QUOTA)
        opened.append(folder)
        reach = DiskReach((FULL, WINDOW), has_states=True)
        return CachePlace(folder=folder, namespace=f"of {name}", common=common, label=label, reach=reach)

    yield place_at
    for folder in opened:
        folder.close()


def fill(place: CachePlace) -> None:
    """A text of eight blocks that a request can begin with after seven, and another one's blocks in its files."""
    other = [*IDS[: 16 * 6], *range(16 * 4)]
    put(place, IDS, "kv0", range(4))
    put(place, IDS, "kv0", range(4, 8))
    put(place, other, "kv0", range(6, 9))
    put(place, IDS, "kv1", range(3, 7))
    put(place, IDS, "state", range(6, 7))


def test_conversation_goes_to_another_folder_where_its_model_has_another_name(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    here, there = place_at("here"), place_at("there")
    fill(here)
    carried = export_conversation(here, IDS, tmp_path / "file")
    assert carried.num_tokens == 16 * 7
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0, "it says what was talked about"
    came = import_conversation(there, tmp_path / "file")
    assert (came.num_tokens, came.num_known) == (16 * 7, 0)
    expected = {"kv0": range(7), "kv1": range(4, 7), "state": range(6, 7)}
    for layer, (kind, places) in enumerate(expected.items()):
        held = content(there, IDS, kind)
        assert sorted(held) == list(places), kind
        assert all(torch.equal(held[at], blocks(IDS, range(at, at + 1), layer)[f"{layer}.k"][0]) for at in places)
    assert [one.label for one in there.folder.contents()] == ["pebble, float16"] * 3
    assert import_conversation(there, tmp_path / "file").num_known == 4, "again changes nothing"


def test_conversation_of_which_nothing_is_kept_is_not_exported(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    here = place_at("here")
    with pytest.raises(OptionError, match="nothing of this conversation is in"):
        export_conversation(here, IDS, tmp_path / "file")
    put(here, IDS, "kv0", range(8))
    with pytest.raises(OptionError, match="nothing of this conversation"):
        export_conversation(here, IDS, tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []


def test_conversation_is_never_written_over_a_file(place_at: Callable[..., CachePlace], tmp_path: Path) -> None:
    here = place_at("here")
    fill(here)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OptionError, match="exists; name another"):
        export_conversation(here, IDS, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_conversation_whose_file_in_the_cache_is_damaged_says_so_and_leaves_nothing(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    here = place_at("here")
    fill(here)
    (file,) = {where.file for where in here.folder.find("state", block_names(here.namespace, "", IDS)).values()}
    (here.folder.path / file).write_bytes(b"damage")
    with pytest.raises(DeviceError, match="block 6 of state was damaged"):
        export_conversation(here, IDS, tmp_path / "file")
    assert list(tmp_path.glob("file*")) == []


def test_conversation_of_another_model_is_refused_by_name(place_at: Callable[..., CachePlace], tmp_path: Path) -> None:
    here, there = place_at("here"), place_at("there", "dd" * 32, "pebble, float32")
    fill(here)
    export_conversation(here, IDS, tmp_path / "file")
    with pytest.raises(OptionError) as caught:
        import_conversation(there, tmp_path / "file")
    said = str(caught.value)
    assert "'pebble, float16' (namespace c0c0c0c0c0c0)" in said
    assert "not of 'pebble, float32' as it is computed here (dddddddddddd)" in said
    assert there.folder.files() == []


def edited(path: Path, change: Callable[[dict[str, Any]], object], first_member: bytes | None = None) -> None:
    """Rewrite the manifest, and perhaps the first member."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(held["manifest.json"])
    change(manifest)
    if first_member is not None:
        held[manifest["members"][0]["file"]] = first_member
    held["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(format="troth-conversation-9"), "manifest.json is not that of a troth-conversation-1"),
        (lambda m: m.pop("token_ids"), "manifest.json is damaged"),
        (lambda m: m["token_ids"].__setitem__(0, "x"), "manifest.json is not that of"),
        (lambda m: m["members"][1].update(sha256="00"), "0001.safetensors (kv0, blocks 4 to 6) is damaged"),
        (lambda m: m["members"][0].update(kind="kv9"), "(kv9, blocks 0 to 3) is damaged: it does not hold 4 blocks"),
        (lambda m: m["members"][0].update(count=99), "manifest.json is not that of"),
        (lambda m: m["members"][0].update(count=2), "it does not hold 2 blocks"),
        (lambda m: m["members"][0].update(file="gone"), "gone is missing"),
        (lambda m: m["members"][0].pop("sha256"), "manifest.json is damaged"),
        (lambda m: m["members"][0].pop("kind"), "manifest.json is damaged"),
        (lambda m: m["members"][0].update(kind=["kv0"]), "manifest.json is not that of"),
        (lambda m: m["members"].append(m["members"][0]), "manifest.json is not that of"),
    ],
)
def test_conversation_file_that_does_not_agree_with_itself_names_the_place(
    place_at: Callable[..., CachePlace], tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    here, there = place_at("here"), place_at("there")
    fill(here)
    export_conversation(here, IDS, tmp_path / "file")
    edited(tmp_path / "file", change)
    with pytest.raises(OptionError) as caught:
        import_conversation(there, tmp_path / "file")
    assert said in str(caught.value)
    assert str(tmp_path / "file") in str(caught.value)
    assert there.folder.files() == []


def nothing(path: Path) -> None:
    """No file."""


def test_conversation_file_with_shapes_that_no_tensor_has_names_the_place(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    """Its digest was right, and torch's error came out as a traceback."""
    here, there = place_at("here"), place_at("there")
    fill(here)
    export_conversation(here, IDS, tmp_path / "file")
    header = json.dumps({"0.k": {"dtype": "F32", "shape": [4, 0, 2**62, 2**62], "data_offsets": [0, 0]}}).encode()
    hostile = len(header).to_bytes(8, "little") + header
    edited(tmp_path / "file", lambda m: m["members"][0].update(sha256=sha256(hostile).hexdigest()), hostile)
    with pytest.raises(OptionError, match="its tensors cannot be read"):
        import_conversation(there, tmp_path / "file")
    assert there.folder.files() == []


def endless(path: Path) -> None:
    """What reads as zeros for ever took all memory."""
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (endless, "is a folder or a device, not what troth cache export writes"),
        (nothing, "there is no such file"),
        (Path.mkdir, "is a folder or a device, not what troth cache export writes"),
        (lambda path: path.write_text("hello"), "is not what troth cache export writes, or is cut off"),
    ],
)
def test_conversation_file_that_is_none_is_refused_in_words(
    place_at: Callable[..., CachePlace], tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OptionError) as caught:
        import_conversation(place_at("there"), tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: {said}")


def test_conversation_of_which_a_part_is_known_is_imported_without_writing_that_again(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    here, there = place_at("here"), place_at("there")
    fill(here)
    export_conversation(here, IDS, tmp_path / "file")
    put(there, IDS, "kv0", range(2))
    came = import_conversation(there, tmp_path / "file")
    assert (came.num_members, came.num_known) == (4, 0)
    contents = {one.kind: one.num_blocks for one in there.folder.contents()}
    assert contents == {"kv0": 7, "kv1": 3, "state": 1}, "blocks lie there twice"
    assert sorted(content(there, IDS, "kv0")) == list(range(7))


def test_conversation_file_with_any_byte_changed_or_cut_off_is_refused_or_the_same(
    place_at: Callable[..., CachePlace], tmp_path: Path
) -> None:
    here, there = place_at("here"), place_at("there")
    fill(here)
    export_conversation(here, IDS, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    refused = 0
    for at in range(0, len(whole), 37):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            (tmp_path / "file").write_bytes(damaged)
            with suppress(OptionError):
                import_conversation(there, tmp_path / "file")
                refused -= 1
            refused += 1
    assert refused > 1.8 * len(whole) / 37, "few bytes of an archive mean nothing"
    for layer, kind in enumerate(there.reach.kinds):
        for at, held in content(there, IDS, kind).items():
            assert torch.equal(held, blocks(IDS, range(at, at + 1), layer)[f"{layer}.k"][0])
