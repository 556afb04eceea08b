"""The ``prediction`` of a chat: a text that its answer is expected to repeat in large part.

It proposes drafts and changes no token (``contracts/speculation.py``). Format: the public OpenAI API reference,
predicted outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from troth.contracts.bounds import mistyped_json, shown_json
from troth.contracts.events import Completed
from troth.contracts.speculation import Speculation
from troth.errors import RequestError
from troth.serve.fields import Fields, missing
from troth.serve.model import Tokenizer


def read_prediction(fields: Fields, tokenizer: Tokenizer) -> Speculation | None:
    """How drafts are made for a chat that predicts its answer; None: as the engine does. Raises RequestError."""
    prediction = fields.object("prediction")
    if prediction is None:
        return None
    kind = prediction.text("type")
    if kind not in (None, "content"):
        raise RequestError(f"prediction.type must be content, not {shown_json(kind)}", param=prediction.name("type"))
    text = _text(prediction)
    predicted_ids = tuple(tokenizer.encode(text, add_special=False)) if text else ()
    # Where the answer differs, what it repeats may be in the prompt, too.
    return Speculation(sources=("external", "ngram"), predicted_ids=predicted_ids) if predicted_ids else None


def prediction_counts(completed: Sequence[Completed]) -> dict[str, int]:
    """Predicted tokens that were accepted and rejected, for usage; nothing where no text was predicted."""
    stats = [one.speculation for one in completed if one.speculation is not None]
    drafted = sum(one.num_drafted_by_source.get("external", 0) for one in stats)
    accepted = sum(one.num_accepted_by_source.get("external", 0) for one in stats)
    if not drafted:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def speculation_object(completed: Sequence[Completed]) -> dict[str, Any]:
    """What the ``troth`` object says of the drafts of these choices; nothing where none were to be made."""
    stats = [one.speculation for one in completed if one.speculation is not None]
    if not stats:
        return {}
    depths = zip_longest(*(one.accepted_by_depth for one in stats), fillvalue=0)
    reasons = [one.disabled_reason for one in stats if one.disabled_reason is not None]
    return {
        "speculation": {
            "rounds": sum(one.num_verifies for one in stats),
            "drafted": sum(one.num_drafted for one in stats),
            "accepted": sum(one.num_accepted for one in stats),
            "accepted_by_depth": [sum(rounds) for rounds in depths],
            "sources": sorted({name for one in stats for name in one.num_drafted_by_source}),
            "disabled_reason": reasons[0] if reasons else None,
            "uncertified": any(one.uncertified for one in stats),
        }
    }


def _text(prediction: Fields) -> str:
    name, content = prediction.name("content"), prediction.raw("content")
    if content is None:
        raise missing(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise mistyped_json(name, "a string or an array of text parts", content)
    return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise mistyped_json(name, 'an object {"type": "text", "text": ...}', part)
    text: str = part["text"]
    return text
