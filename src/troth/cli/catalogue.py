"""Which models are on this machine, told from their headers alone: nothing is loaded and nothing fetched.

Owns where to look; ``artifact/resolve.py`` owns what a model is. A place that holds no readable model is reported with
the reason. Read next: ``models.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from troth.artifact.artifact import Artifact
from troth.artifact.resolve import resolve
from troth.artifact.safetensors import INDEX_NAME, SINGLE_NAME
from troth.config.families import FAMILIES, GGUF_FAMILIES
from troth.errors import ModelLoadError

MAX_DEPTH: Final = 4
"""Folders are searched this deep: publisher/model/variant and one to spare."""


_FILE_TYPES: Final[dict[int, str]] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}
"""``general.file_type`` of the GGUF specification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model, or one place where a model was expected."""

    source: str
    """demo, TROTH_MODEL, given or cache."""
    path: str
    """What ``--model`` takes."""
    name: str
    family: str | None = None
    num_parameters: int | None = None
    """None where weights are packed several to a number."""
    format: str | None = None
    size_bytes: int | None = None
    context_tokens: int | None = None
    problem: str | None = None
    """Why it cannot be read, with the fields above None, or why it cannot be computed."""


def catalogue(given: Iterable[str], model: str | None, environ: Mapping[str, str] = os.environ) -> list[Entry]:
    """Every model of the usual places, each file once.

    Args:
        given: models, or folders to search.
        model: what TROTH_MODEL says.
        environ: says where the Hugging Face cache is.
    """
    entries = [*_demo(), *([_entry("TROTH_MODEL", Path(model))] if model is not None else [])]
    for text in given:
        entries += [_entry("given", path) for path in _models_under(Path(text).absolute())]
    cache = huggingface_cache(environ)
    for repository in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        entries += [_entry("cache", path) for path in _models_of(repository)]
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry.path, entry)
    return list(found.values())


def huggingface_cache(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it fetched, by its documented variables."""
    if cache := environ.get("HF_HUB_CACHE"):
        return _expanded(cache)
    if home := environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base) / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    """A path with ~ as the user's home; as it stands where nobody knows that home, as in some containers."""
    return Path(os.path.expanduser(path))


def _demo() -> list[Entry]:
    try:
        artifact = resolve(None)
    except ModelLoadError:
        return []  # it is optional: its absence is no defect of this machine
    return [_described("demo", str(artifact.files[0].path), artifact)]


def _entry(source: str, path: Path) -> Entry:
    try:
        return _described(source, str(path), resolve(path))
    except ModelLoadError as error:
        return Entry(source=source, path=str(path), name=path.name, problem=str(error))


def _models_under(place: Path, depth: int = 0) -> Iterator[Path]:
    """The models in a folder and below it; the place itself when it is a file or is not there."""
    if not place.is_dir():
        yield place
        return
    names = _names(place)
    if "config.json" in names and (INDEX_NAME in names or SINGLE_NAME in names):
        yield place
        return
    found = False
    for name in names:
        path = place / name
        if path.is_dir():
            # A link could lead back up.
            if depth < MAX_DEPTH and not name.startswith(".") and not path.is_symlink():
                for model in _models_under(path, depth + 1):
                    found = True
                    yield model
        elif name.lower().endswith(".gguf"):
            found = True
            yield path
    if depth == 0 and not found:
        yield place


def _models_of(repository: Path) -> list[Path]:
    """The models of one repository of the cache: its GGUF files, or itself."""
    ggufs = sorted(repository.glob("snapshots/*/**/*.gguf"))
    weights = [path for name in (SINGLE_NAME, INDEX_NAME) for path in repository.glob(f"snapshots/*/{name}")]
    return ggufs if ggufs and not weights else [repository]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _described(source: str, path: str, artifact: Artifact) -> Entry:
    family, context = declared(artifact)
    return Entry(
        source=source,
        path=path,
        name=artifact.name,
        family=family,
        num_parameters=_num_parameters(artifact),
        format=_format(artifact),
        size_bytes=artifact.total_bytes,
        context_tokens=context,
        problem=_uncomputable(artifact, family),
    )


def _uncomputable(artifact: Artifact, family: str | None) -> str | None:
    """Why no family here computes the model, if none does."""
    known = GGUF_FAMILIES if artifact.gguf is not None else FAMILIES
    if family in known:
        return None
    return f"{family!r} is not an architecture Troth computes; it computes {', '.join(sorted(known))}"


def declared(artifact: Artifact) -> tuple[str | None, int | None]:
    """The architecture's name and the context it declares; None: nothing of the kind."""
    if artifact.gguf is not None:
        metadata = artifact.gguf.metadata
        name = metadata.get("general.architecture")
        return _as(str, name), _as(int, metadata.get(f"{name}.context_length"))
    config: Mapping[str, Any] = artifact.config
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    context = inner.get("max_position_embeddings", config.get("max_position_embeddings"))
    return _as(str, config.get("model_type")), _as(int, context)


def _as(kind: type, value: object) -> Any:
    """A header's value if it is what it should be."""
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _num_parameters(artifact: Artifact) -> int | None:
    if artifact.config.keys() & {"quantization", "quantization_config"}:
        return None
    return artifact.num_values


def _format(artifact: Artifact) -> str:
    """The container, and what a GGUF's header calls its mixture; else the type that holds most of the bytes."""
    declared_type = artifact.gguf.metadata.get("general.file_type") if artifact.gguf is not None else None
    if isinstance(declared_type, int) and declared_type in _FILE_TYPES:
        return f"{artifact.kind} {_FILE_TYPES[declared_type]}"
    held: Counter[str] = Counter()
    for kind, num_bytes in _tensors(artifact):
        held[kind] += num_bytes
    return " ".join([artifact.kind, *(kind for kind, _ in held.most_common(1))])


def _tensors(artifact: Artifact) -> Iterator[tuple[str, int]]:
    """(type, bytes) of every tensor."""
    if artifact.gguf is not None:
        for tensor in artifact.gguf.tensors.values():
            yield tensor.ggml_type.name, tensor.num_bytes
    for shard in artifact.safetensors.shards if artifact.safetensors is not None else ():
        for stored in shard.tensors.values():
            yield stored.dtype, stored.num_bytes
