"""Proves how a template writes media: a placeholder per attachment, in its place among the texts. And translation.

Binds nothing itself: what the placeholders become is for whoever reads the media. Read next: ``probe_trial.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.text.probe_trial import USER, Trial, common_prefix, in_order, user

_BEFORE, _AFTER = "qvbefore", "qvafter"
_ADDRESS: Final = "qvaddress"

_PARTS: Final[dict[str, tuple[Mapping[str, Any], ...]]] = {
    "image": ({"type": "image"}, {"type": "image_url", "image_url": {"url": _ADDRESS}}),
    "audio": ({"type": "audio"}, {"type": "input_audio", "input_audio": {"data": _ADDRESS, "format": "wav"}}),
    "video": ({"type": "video"}, {"type": "video_url", "video_url": {"url": _ADDRESS}}),
}
"""How clients and Hugging Face's processors write a part of each kind."""


def prove_media(trial: Trial) -> dict[str, str] | None:
    """Kind -> placeholder; None when no part of any kind leaves one.

    Proved with one part between two texts, and with two parts around a text: as many placeholders, in their places.
    """
    found = {}
    for kind, parts in _PARTS.items():
        for part in parts:
            placeholder = _placeholder(trial, part)
            if placeholder is not None:
                found[kind] = placeholder
                break
    shown = ", ".join(f"{kind} {text!r}" for kind, text in found.items())
    trial.note("media", bool(found), shown or "no content part but text leaves anything in the prompt")
    return found or None


def _placeholder(trial: Trial, part: Mapping[str, Any]) -> str | None:
    texts = [{"type": "text", "text": word} for word in (_BEFORE, _AFTER)]
    bare = _render(trial, texts)
    one = _render(trial, [texts[0], part, texts[1]])
    if bare is None or one is None or not in_order(bare, _BEFORE, _AFTER) or not in_order(one, _BEFORE, _AFTER):
        return None
    if one == bare or any(word in one for word in (_ADDRESS, f'"{part["type"]}"', f"'{part['type']}'")):
        return None  # the part itself is printed: no placeholder
    between = one[one.index(_BEFORE) + len(_BEFORE) : one.rindex(_AFTER)]
    usual = bare[bare.index(_BEFORE) + len(_BEFORE) : bare.rindex(_AFTER)]
    start = common_prefix(between, usual)
    placeholder = between[start:].removesuffix(usual[start:]).strip()
    two = _render(trial, [part, texts[0], part])
    if not placeholder or two is None or not in_order(two, placeholder, _BEFORE, placeholder):
        return None
    return placeholder


def _render(trial: Trial, parts: Sequence[Mapping[str, Any]]) -> str | None:
    return trial.render([{"role": "user", "content": parts}])


def prove_translation(trial: Trial) -> bool:
    """A text with language codes beside it arrives, and the names of the codes do not."""
    codes = {"source_lang_code": "en", "target_lang_code": "fr"}
    text = trial.render([{"role": "user", "content": [{"type": "text", "text": USER, **codes}]}])
    plain = trial.render([user()])
    holds = text is not None and USER in text and text != plain and not any(name in text for name in codes)
    return trial.note(
        "translation", holds, "language codes beside a text" + (" are taken" if holds else " change nothing")
    )
