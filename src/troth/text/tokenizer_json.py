"""Owns the Hugging Face form of a tokenizer: ``tokenizer.json`` and the small JSON files beside it.

Knows no GGUF and no chat template syntax. Format: the ``tokenizers`` library's own serialisation.
Read next: ``tokenizer.py`` (what comes out), ``gguf_tokenizer.py`` (the other source).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from troth.errors import ModelLoadError
from troth.text.tokenizer import Tokenizer
from troth.text.vocabulary import (
    WORD_MARK,
    Vocabulary,
    byte_level_bytes,
    end_ids,
    sentencepiece_bytes,
    wordpiece_bytes,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

MAX_IDS: Final = 2**24
"""Every id is looked at; the largest vocabularies in use have 2**18."""
_FILE = "tokenizer.json"


def load_tokenizer(folder: Path, *, template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: Holds ``tokenizer.json`` and, where they exist, ``tokenizer_config.json``,
            ``special_tokens_map.json``, ``generation_config.json`` and ``config.json``.
        template: Source of the chat template, which decides which end-of-turn tokens end an answer.

    Raises:
        ModelLoadError: no ``tokenizer.json``, a damaged file, or a decoder this package does not know.
    """
    path = folder / _FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"cannot be read ({error.strerror}); a model folder needs it, other tokenizer files are not read",
            path=str(path),
        ) from error
    names = _read_json_object(folder / "special_tokens_map.json") | _read_json_object(folder / "tokenizer_config.json")
    declared = [
        token_id
        for name in ("generation_config.json", "config.json")
        for token_id in _declared_eos_ids(_read_json_object(folder / name))
    ]
    return tokenizer_from_json(data, names=names, eos_ids=declared, template=template, path=str(path))


def tokenizer_from_json(
    data: bytes,
    *,
    names: Mapping[str, Any] | None = None,
    eos_ids: list[int] | None = None,
    template: str | None = None,
    path: str = _FILE,
) -> Tokenizer:
    """The tokenizer in the bytes of a ``tokenizer.json``.

    Args:
        data: The file.
        names: ``bos_token``, ``eos_token`` and ``unk_token`` as in ``tokenizer_config.json``.
        eos_ids: Ids that the model's configuration calls end of text.
        template: Source of the chat template.
        path: Where the bytes come from, for errors.

    Raises:
        ModelLoadError: a damaged file, or a decoder this package does not know.
    """
    from tokenizers import Tokenizer as Encoder

    try:
        encoder = Encoder.from_buffer(data)
    except Exception as error:  # the library raises plain Exception for every fault in the file
        raise ModelLoadError(f"is not a tokenizer this package reads: {error}", path=path) from error
    to_bytes, drops_first_space = _decoding(encoder, path)
    added = encoder.get_added_tokens_decoder()
    num_ids = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 1 <= num_ids <= MAX_IDS:
        raise ModelLoadError(f"has ids up to {num_ids - 1}; 0 to {MAX_IDS - 1} are possible", path=path, field="model")
    bos, eos, unknown = (encoder.token_to_id(_content(names, name)) for name in ("bos_token", "eos_token", "unk_token"))
    control = {entry.content: token_id for token_id, entry in added.items() if entry.special}
    declared = [*(eos_ids or ()), *([] if eos is None else [eos])]
    vocabulary = Vocabulary(
        num_ids=num_ids,
        text_of=encoder.id_to_token,
        to_bytes=to_bytes,
        special_ids=frozenset(control.values()),
        unknown_id=unknown,
        bos_id=bos,
        eos_id=eos,
        eos_ids=end_ids(declared, control, template, num_ids),
        drops_first_space=drops_first_space,
    )
    return Tokenizer(encoder, vocabulary)


def _read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises ModelLoadError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"is not readable JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"holds a {type(value).__name__}, not an object", path=str(path))
    return value


def _content(names: Mapping[str, Any] | None, name: str) -> str:
    """The text of a named token: a string, or an object with ``content``. Empty when there is none."""
    value = (names or {}).get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _declared_eos_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """``eos_token_id`` of a configuration, one id or a list, also that of the text part of a multimodal model."""
    for part in (config, config.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                yield token_id


def _decoding(encoder: Encoder, path: str) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text becomes bytes, and whether a first space is dropped, from the file's decoder.

    The library's own decoder is not used: it needs all ids at once. Two of its habits differ from reading bytes as
    UTF-8 and are not followed: a run of byte tokens that is not wholly valid loses its valid characters too, and
    WordPiece text is tidied around punctuation.
    """
    state = None if encoder.decoder is None else json.loads(encoder.decoder.__getstate__())
    steps = list(_flat(state)) if state else []
    kinds = {step["type"] for step in steps} - {"Fuse"}
    for step in steps:
        if not _is_known(step):
            shown = json.dumps(step, ensure_ascii=False)
            raise ModelLoadError(f"decoder {shown} is not known; this tokenizer cannot be streamed", path=path)
    if kinds == {"ByteLevel"}:
        return byte_level_bytes, False
    if kinds == {"WordPiece"}:
        return wordpiece_bytes, True
    if kinds and kinds <= {"Replace", "ByteFallback", "Strip", "Metaspace"}:
        return sentencepiece_bytes, any(_strips_first(step) for step in steps)
    named = " + ".join(sorted(kinds)) or "none"
    raise ModelLoadError(f"decoder {named} is not known; this tokenizer cannot be streamed", path=path)


def _flat(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step["decoders"]:
            yield from _flat(inner)
    else:
        yield step


def _is_known(step: Mapping[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel" | "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return bool(step["pattern"] == {"String": WORD_MARK} and step["content"] == " ")
        case "Strip":
            return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
        case "Metaspace":
            return bool(step["replacement"] == WORD_MARK)
        case "WordPiece":
            return bool(step["prefix"] == "##")
        case _:
            return False


def _strips_first(step: Mapping[str, Any]) -> bool:
    return step.get("start") == 1 or step.get("prepend_scheme", "never") != "never"
