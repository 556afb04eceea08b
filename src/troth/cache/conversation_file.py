"""One conversation's state as a file, to carry it to another folder, another copy of its model or another machine.

Refuses to know messages and models: tokens and a namespace that means the same everywhere come in. A file is a zip
archive of stored members: ``manifest.json``, which says what the others hold and their SHA-256, and one safetensors for
each stretch of blocks. It holds what was said, as token ids. Next: ``disk_folder.py``, where it comes from and goes to.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load, save

from troth.cache.disk_bundle import NO_TENSORS, Bundle
from troth.cache.disk_folder import DiskFolder
from troth.cache.disk_index import IndexTrouble
from troth.cache.disk_names import STATE, BundleKind, block_names
from troth.cache.disk_reach import DiskReach, runs
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import DeviceError, OptionError

_FORMAT: Final = "troth-conversation-1"
_MANIFEST: Final = "manifest.json"
_MAX_MANIFEST_BYTES: Final = 2**26
_NO_ARCHIVE: Final = (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, struct.error)
"""What reading a damaged archive may raise: it asks for passwords, for later versions and for other encodings, too."""
_SHOWN: Final = 12
"""Digits of a namespace that tell it from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where one model's blocks lie.

    Args:
        folder: the disk cache.
        namespace: of its files there.
        common: what stands for model, numbers and layout on every machine, hex.
        label: what people call that.
        reach: what a request needs of a chain of blocks.
    """

    folder: DiskFolder
    namespace: str
    common: str
    label: str
    reach: DiskReach


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What went into or came out of a file."""

    num_tokens: int
    num_bytes: int
    num_members: int
    """Stretches of blocks, and states."""
    num_known: int = 0
    """Members that were there already."""


def export_conversation(place: CachePlace, token_ids: Sequence[int], path: Path) -> Carried:
    """Write what a request that begins with these tokens needs, as far as it is on disk.

    Raises:
        OptionError: nothing of it is there, or the file exists or cannot be written.
        DeviceError: a file of the cache was damaged; it is removed, and asking again gives what is left.
    """
    names = block_names(place.namespace, "", token_ids)
    held = {kind: place.folder.find(kind, names) for kind in place.reach.kinds}
    found = {kind: {at for at, name in enumerate(names) if name in held[kind]} for kind in held}
    num_blocks = place.reach.deepest(found, len(names))
    if not num_blocks:
        raise OptionError(
            f"nothing of this conversation is in {place.folder.path}: {len(token_ids)} tokens were looked for; "
            "troth serve keeps whole blocks of 16 of what it answered"
        )
    members: list[dict[str, Any]] = []
    num_bytes = 0
    with _new_archive(path) as archive:
        for kind in place.reach.kinds:
            for bundle, first in _bundles(place, kind, names, place.reach.needed(kind, num_blocks)):
                content = save({name: tensor.contiguous() for name, tensor in bundle.tensors.items()})
                member = f"{len(members):04}.safetensors"
                archive.writestr(member, content)
                digest = sha256(content).hexdigest()
                count = len(bundle.names)
                members.append({"file": member, "sha256": digest, "kind": kind, "first": first, "count": count})
                num_bytes += len(content)
        ids = list(token_ids[: num_blocks * BLOCK_TOKENS])
        manifest = {"format": _FORMAT, "namespace": place.common, "label": place.label, "token_ids": ids}
        archive.writestr(_MANIFEST, json.dumps({**manifest, "members": members}))
    return Carried(num_tokens=len(ids), num_bytes=num_bytes, num_members=len(members))


def import_conversation(place: CachePlace, path: Path) -> Carried:
    """Read a file, prove all of it, and put it into the folder.

    Raises:
        OptionError: it cannot be read, is damaged (with the place), or is of another model or other numbers. Nothing
            of it is in the folder then.
        DeviceError: the folder cannot be written.
    """
    try:
        # A device may have no end, and a pipe no beginning to go back to.
        if path.exists() and not path.is_file():
            raise OptionError(f"{path}: is a folder or a device, not what troth cache export writes")
        with zipfile.ZipFile(path) as archive:
            manifest = _read_manifest(archive, path)
            if manifest["namespace"] != place.common:
                theirs, ours = manifest["namespace"][:_SHOWN], place.common[:_SHOWN]
                raise OptionError(
                    f"{path}: is the state of {manifest['label']!r} (namespace {theirs}), not of {place.label!r} as it "
                    f"is computed here ({ours}): model files, numbers, device and op providers must be the same"
                )
            token_ids: list[int] = manifest["token_ids"]
            names = block_names(place.namespace, "", token_ids)
            members: list[dict[str, Any]] = manifest["members"]
            # Twice: the folder gets all of it or nothing, and memory holds one member at a time.
            for member in members:
                _read_member(archive, path, member, place, names)
            num_known = num_bytes = 0
            for member in members:
                bundle = _read_member(archive, path, member, place, names)
                held = place.folder.find(bundle.kind, bundle.names)
                known = {at for at, name in enumerate(bundle.names) if name in held}
                num_known += len(known) == len(bundle.names)
                num_bytes += bundle.num_bytes
                _keep(place, bundle, known)
    except FileNotFoundError:
        raise OptionError(f"{path}: there is no such file") from None
    except _NO_ARCHIVE as error:
        raise OptionError(f"{path}: is not what troth cache export writes, or is cut off: {error}") from error
    place.folder.label(place.namespace, place.label)
    return Carried(num_tokens=len(token_ids), num_bytes=num_bytes, num_members=len(members), num_known=num_known)


def _bundles(place: CachePlace, kind: BundleKind, names: list[bytes], needed: range) -> Iterator[tuple[Bundle, int]]:
    """What the folder has of some blocks, file by file, without the blocks beside them; each with its first place."""
    at = needed.start
    while at < needed.stop:
        where = place.folder.find(kind, names[at : at + 1]).get(names[at])
        whole = place.folder.read(where.file) if where is not None else None
        if where is None or whole is None:
            raise DeviceError(
                f"block {at} of {kind} was damaged or is gone, and was removed; export again for what is left"
            )
        position = where.position
        count = 0
        while at + count < needed.stop and whole.names[position + count : position + count + 1] == (names[at + count],):
            count += 1
        if not count or whole.namespace != place.namespace:
            place.folder.remove_damaged(where.file, "the index names the wrong file for a block")
            raise DeviceError(
                f"block {at} of {kind} was not in its file, which was removed; export again for what is left"
            )
        tensors = {name: tensor[position : position + count] for name, tensor in whole.tensors.items()}
        yield Bundle(kind=kind, namespace=place.namespace, names=tuple(names[at : at + count]), tensors=tensors), at
        at += count


@contextmanager
def _new_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A file that appears whole or not at all, for its owner alone: it says what was talked about."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    if path.exists():
        raise OptionError(f"{path} exists; name another file")
    try:
        unfinished.touch(mode=0o600)
        with zipfile.ZipFile(unfinished, "w") as archive:
            yield archive
        unfinished.rename(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _read_manifest(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(_content(archive, path, _MANIFEST, _MAX_MANIFEST_BYTES))
        is_ours = manifest["format"] == _FORMAT and all(
            isinstance(manifest[name], kind)
            for name, kind in (("namespace", str), ("label", str), ("token_ids", list), ("members", list))
        )
        ids, num_blocks = manifest["token_ids"], len(manifest["token_ids"]) // BLOCK_TOKENS
        is_ours = is_ours and all(isinstance(one, int) and 0 <= one < 2**31 for one in ids)
        is_ours = is_ours and _are_members(manifest["members"], num_blocks)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(f"{path}: {_MANIFEST} is damaged: {error!r}") from error
    if not is_ours:
        raise OptionError(f"{path}: {_MANIFEST} is not that of a {_FORMAT}")
    return manifest


def _are_members(members: list[Any], num_blocks: int) -> bool:
    """Whether each says what it holds, and no block is held twice: a small file could else ask for days of reading."""
    told: set[tuple[str, int]] = set()
    for member in members:
        first, count = member["first"], member["count"]
        if not all(isinstance(member[name], str) for name in ("file", "kind", "sha256")):
            return False
        if not (isinstance(first, int) and isinstance(count, int) and 0 <= first < first + count <= num_blocks):
            return False
        places = {(member["kind"], place) for place in range(first, first + count)}
        if not told.isdisjoint(places):
            return False
        told |= places
    return True


def _read_member(
    archive: zipfile.ZipFile, path: Path, member: dict[str, Any], place: CachePlace, names: list[bytes]
) -> Bundle:
    """One stretch of blocks, proved. Raises OptionError, naming it."""
    last = member["first"] + member["count"] - 1
    where = f"{path}: {member['file']} ({member['kind']}, blocks {member['first']} to {last})"
    content = _content(archive, path, member["file"], 2**40)
    if sha256(content).hexdigest() != member["sha256"]:
        raise OptionError(f"{where} is damaged: its content has another SHA-256 than the manifest says")
    try:
        tensors = load(content)
    except NO_TENSORS as error:
        raise OptionError(f"{where} is damaged: its tensors cannot be read: {error}") from error
    first, count, kind = member["first"], member["count"], member["kind"]
    if kind not in place.reach.kinds or not tensors or any(one.shape[:1] != (count,) for one in tensors.values()):
        raise OptionError(f"{where} is damaged: it does not hold {count} blocks of a kind that this model keeps")
    return Bundle(kind=kind, namespace=place.namespace, names=tuple(names[first : first + count]), tensors=tensors)


def _content(archive: zipfile.ZipFile, path: Path, member: str, most: int) -> bytes:
    try:
        about = archive.getinfo(member)
        if about.compress_type != zipfile.ZIP_STORED or about.file_size > min(most, path.stat().st_size):
            raise OptionError(f"{path}: {member} is compressed or larger than it can be; it was not written by troth")
        return archive.read(member)
    except KeyError:
        raise OptionError(f"{path}: {member} is missing") from None
    except _NO_ARCHIVE as error:
        raise OptionError(f"{path}: {member} is damaged: {error}") from error


def _keep(place: CachePlace, bundle: Bundle, known: Collection[int]) -> None:
    """Write what is not known of a stretch, a state each block, as the disk tier would."""
    lacking = [at for at in range(len(bundle.names)) if at not in known]
    try:
        for run in runs(lacking, 1 if bundle.kind == STATE else len(bundle.names)):
            part = {name: tensor[run.start : run.stop].contiguous() for name, tensor in bundle.tensors.items()}
            names = bundle.names[run.start : run.stop]
            place.folder.write(Bundle(kind=bundle.kind, namespace=bundle.namespace, names=names, tensors=part))
    except (OSError, *IndexTrouble) as error:
        raise DeviceError(f"the cache folder {place.folder.path} cannot be written: {error}") from error
    if place.folder.trouble:
        raise DeviceError(place.folder.trouble)
