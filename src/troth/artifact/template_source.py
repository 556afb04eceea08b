"""Which chat template a model ships, and in which of the places where one may lie.

Owns the precedence of places; refuses to know what a template does (``text/``). Nothing here is rendered.

| order | folder | |
|---|---|---|
| 1 | processor_config.json | key chat_template |
| 2 | chat_template.json | key chat_template |
| 3 | chat_template.jinja | and additional_chat_templates/<name>.jinja |
| 4 | tokenizer_config.json | key chat_template |
| GGUF | tokenizer.chat_template | and tokenizer.chat_template.<name> |

A value is a string, or several under names: a list of {name, template}, or an object name -> template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from troth.errors import ModelLoadError

MAX_TEMPLATE_BYTES: Final = 2**20
MAX_TEMPLATES: Final = 32
MAX_TEMPLATE_NAME: Final = 128
DEFAULT: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
"""Name of the template for chats with tools, where a model has one of its own for them."""
GGUF_KEY: Final = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """The template a model ships. Jinja source, not yet parsed: ``text/chat_template.py`` does that."""

    source: str
    """The one to use when nothing else is asked for."""
    origin: str
    """The file or key it comes from."""
    named: Mapping[str, str]
    """Further templates by name, such as tool_use or rag."""


def template_from_json(value: Any, path: Path) -> TemplateSource | None:
    """The template in the value of ``chat_template`` in a JSON file; None when the value is null or empty.

    Raises:
        ModelLoadError: the value has another form, a template is not text, or one passes a bound above.
    """
    if not value:
        return None
    if isinstance(value, str):
        return _choose([(DEFAULT, value)], path.name, path)
    if isinstance(value, dict):
        return _choose(value.items(), path.name, path)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return _choose([(item.get("name"), item.get("template")) for item in value], path.name, path)
    message = f"{value!r:.40} is no template: give a string, or a list of objects with name and template"
    raise ModelLoadError(message, path=str(path), field="chat_template")


def template_from_files(texts: Mapping[str, str], path: Path) -> TemplateSource:
    """The template of ``path``, a .jinja file, given as ``default`` with its neighbours. Raises as above."""
    return _choose(texts.items(), path.name, path)


def template_from_gguf(metadata: Mapping[str, Any], path: Path) -> TemplateSource | None:
    """The template in the metadata of a GGUF; None when there is none. Raises as above."""
    if not metadata.get(GGUF_KEY):
        return None
    prefix = GGUF_KEY + "."
    further = [(key.removeprefix(prefix), text) for key, text in metadata.items() if key.startswith(prefix)]
    return _choose([(DEFAULT, metadata[GGUF_KEY]), *further], GGUF_KEY, path)


def _choose(pairs: Collection[tuple[Any, Any]], origin: str, path: Path) -> TemplateSource:
    def fail(message: str) -> NoReturn:
        raise ModelLoadError(message, path=str(path), field="chat_template")

    if len(pairs) > MAX_TEMPLATES:
        fail(f"there are {len(pairs)} templates; at most {MAX_TEMPLATES} are read here")
    templates: dict[str, str] = {}
    for name, text in pairs:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_TEMPLATE_NAME:
            fail(f"{name!r:.40} names a template; a name is text of 1 to {MAX_TEMPLATE_NAME} characters")
        if not isinstance(text, str):
            fail(f"template {name!r} is a {type(text).__name__}, not a string")
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            fail(f"template {name!r} is not UTF-8")
        if num_bytes > MAX_TEMPLATE_BYTES:
            fail(f"template {name!r} is {num_bytes} bytes long; at most {MAX_TEMPLATE_BYTES} are read here")
        templates[name] = text
    # Without a default the first one stands in, and the origin says which that is.
    chosen = DEFAULT if DEFAULT in templates else next(iter(templates))
    named = {name: text for name, text in templates.items() if name != chosen}
    origin = origin if chosen == DEFAULT else f"{origin} ({chosen})"
    return TemplateSource(source=templates[chosen], origin=origin, named=named)
