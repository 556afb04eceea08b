"""Whether a second model can draft for a first: it can be kept in step with it, and means the same by its token ids.

Refuses to load (``assemble.py``) and to draft (``model_drafts.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from troth.config.options import EngineOptions
from troth.contracts.cache_spec import host_group, recurrent_bytes
from troth.errors import CapabilityUnavailable
from troth.models.registry import Recognised

_ANY_BYTES = 1
"""Which layers there are does not depend on how their numbers are held."""


def require_drafts(
    recognised: Recognised, draft_model: Recognised, engine: EngineOptions, difference: Callable[[], str | None]
) -> None:
    """Refuse a draft model that cannot draft for a model.

    Args:
        recognised: the model that is drafted for.
        draft_model: the one that drafts.
        engine: options; they name it.
        difference: what the two vocabularies differ in; None: nothing. Called last: it takes a while.

    Raises:
        CapabilityUnavailable: with the reason.
    """
    reason = _refusal(recognised, draft_model, engine)
    if reason is None and (found := difference()) is not None:
        reason = f"its vocabulary is not that of {recognised.artifact.name}: {found}"
    if reason is not None:
        raise CapabilityUnavailable(
            "speculation draft",
            f"{draft_model.artifact.name} cannot draft for {recognised.artifact.name}: {reason}",
            param="draft_model",
        )


def _refusal(recognised: Recognised, draft_model: Recognised, engine: EngineOptions) -> str | None:
    if "mtp" in engine.speculation:
        return "the options name mtp, too, and one of them drafts; leave out either"
    if recurrent_bytes(draft_model.config.cache_specs(_ANY_BYTES)) is not None:
        return "it has recurrent layers, whose states do not go back over drafts of its own; name one without"
    if host_group(recognised.config.cache_specs(_ANY_BYTES)) is None:
        return "no layer of the model drafted for keeps all tokens, so there are no blocks for its keys and values"
    return None
