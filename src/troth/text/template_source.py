"""Owns where the source of a model's chat template lies. Knows no Jinja. Read next: ``chat_template.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troth.errors import ModelLoadError
from troth.text.tokenizer_json import read_json_object


def template_of_folder(folder: Path) -> str | None:
    """The chat template of a model folder, None when it has none.

    ``chat_template.jinja`` wins over ``chat_template.json``, that over ``tokenizer_config.json``. Of several named
    templates the one called ``default`` is taken.

    Raises:
        ModelLoadError: an unreadable file, or named templates without a default.
    """
    file = folder / "chat_template.jinja"
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot be read: {error}", path=str(file)) from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json_object(folder / name).get("chat_template")
        if value is not None:
            return _default_of(value, str(folder / name))
    return None


def template_of_gguf(metadata: Mapping[str, Any]) -> str | None:
    """The chat template in GGUF metadata, None when there is none. Raises ModelLoadError when it is no text."""
    value = metadata.get("tokenizer.chat_template")
    return None if value is None else _default_of(value, "tokenizer.chat_template")


def _default_of(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)} if isinstance(
        value, list
    ) else {}
    template = named.get("default")
    if not isinstance(template, str):
        found = ", ".join(map(str, named)) or type(value).__name__
        raise ModelLoadError(f"has no template named 'default' (found: {found})", path=path, field="chat_template")
    return template
