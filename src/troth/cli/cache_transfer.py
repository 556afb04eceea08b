"""``troth cache export`` and ``import``: one conversation's state as a file.

Refuses to know the file's form (``cache/conversation_file.py``). Loads no weights, but reads their files once, to know
the model again on another machine. Read next: ``cache.py``, the other actions.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troth import compose
from troth.cli import flags
from troth.cli.quantity import bytes_text
from troth.errors import OptionError, RequestError
from troth.serve.fields import Fields, shown
from troth.serve.prefixes import prefix_ids

USAGE = {"export": ("PROMPT.json", "FILE"), "import": ("FILE",)}


def transfer(action: str, operands: Sequence[str], args: Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Do it; what came of it, as values and as lines.

    Raises:
        OptionError: operands are missing, the prompt or the file is not what it must be, or is of another model.
        ModelLoadError: there is no such model.
        DeviceError: the folder cannot be used.
    """
    usage = USAGE[action]
    if len(operands) != len(usage):
        raise OptionError(f"troth cache {action} takes {' '.join(usage)}, not {len(operands)} operands")
    model, engine = flags.model_options(args), flags.engine_options(args)
    artifact = compose.find(model)
    planned = compose.plan(artifact, model, engine)
    with compose.cache_place(planned, folder) as place:
        if action == "import":
            carried = compose.import_conversation(place, Path(operands[0]))
            done = "Imported"
        else:
            text = compose.load_text(artifact, model)
            ids = _prompt_ids(Path(operands[0]), text, planned.plan.context_tokens)
            carried = compose.export_conversation(place, ids, Path(operands[1]))
            done = "Exported"
    told = {"num_tokens": carried.num_tokens, "num_bytes": carried.num_bytes}
    return told, [f"{done} the state of {carried.num_tokens:,} tokens, {bytes_text(carried.num_bytes)}."]


def _prompt_ids(path: Path, text: compose.TextSide, context_tokens: int) -> tuple[int, ...]:
    """The tokens of a conversation or a text. Raises OptionError, naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise OptionError(f"{path}: must be an object with messages or a prompt, not {shown(value)}")
    fields = Fields(value)
    fields.tolerate("model", "id")
    try:
        return prefix_ids(fields, text.prompts(context_tokens), text.capabilities).ids
    except RequestError as error:
        raise OptionError(f"{path}: {error}") from error
