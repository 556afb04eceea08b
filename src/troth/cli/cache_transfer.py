"""``troth cache export`` and ``import``: one conversation's state as a file.

Refuses to know the file's form (``cache/conversation_file.py``). Loads no weights, but reads their files once, to know
the model again on another machine. Read next: ``cache.py``, the other actions.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troth import compose
from troth.cli import flags
from troth.cli.json_operand import read_json
from troth.cli.quantity import bytes_text
from troth.contracts.bounds import shown_json
from troth.contracts.counted import counted
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OptionError, RequestError
from troth.serve.fields import Fields
from troth.serve.prefixes import prefix_ids

if TYPE_CHECKING:
    from troth.cache.conversation_file import CachePlace, Carried

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
        raise OptionError(f"cache {action} takes {' '.join(usage)}, not {counted(len(operands), 'operand')}")
    model, engine, file = flags.model_options(args), flags.engine_options(args), Path(operands[0])
    # Both are known before the model's files are looked at, which takes seconds.
    prompt = _prompt(file) if action == "export" else {}
    if not file.exists():
        raise OptionError(f"{file}: there is no such file")
    artifact = compose.find(model)
    planned = compose.plan(artifact, model, engine)
    with compose.cache_place(planned, folder) as place:
        if action == "import":
            return _imported(place, file)
        ids = _prompt_ids(file, prompt, compose.load_text(artifact, model), planned.plan.context_tokens)
        return _exported(place, ids, Path(operands[1]))


def _exported(place: CachePlace, ids: Sequence[int], file: Path) -> tuple[dict[str, Any], list[str]]:
    carried = compose.export_conversation(place, ids, file)
    size = bytes_text(carried.num_bytes)
    lines = [
        f"Exported the state of {carried.num_tokens:,} of {len(ids):,} tokens to {file}, {size}.",
        f"It is for {place.label}; it tells what was talked about.",
    ]
    if carried.num_tokens + BLOCK_TOKENS <= len(ids):
        lines.append(f"What follows them is not in {place.folder.path}, and will be computed.")
    return {**_told(place, carried), "num_prompt_tokens": len(ids), "file": str(file)}, lines


def _imported(place: CachePlace, file: Path) -> tuple[dict[str, Any], list[str]]:
    carried = compose.import_conversation(place, file)
    size = bytes_text(carried.num_bytes)
    lines = [f"Imported the state of {carried.num_tokens:,} tokens of {place.label} from {file}, {size}."]
    if carried.num_known:
        lines.append(f"{carried.num_known} of its {carried.num_members} parts were in {place.folder.path} already.")
    return {**_told(place, carried), "num_known": carried.num_known, "file": str(file)}, lines


def _told(place: CachePlace, carried: Carried) -> dict[str, Any]:
    return {
        "num_tokens": carried.num_tokens,
        "num_bytes": carried.num_bytes,
        "num_members": carried.num_members,
        "label": place.label,
        "namespace": place.common,
    }


def _prompt(path: Path) -> dict[str, Any]:
    """What a file says of a prompt. Raises OptionError, naming the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise OptionError(f"{path}: must be an object with messages or a prompt, not {shown_json(value)}")
    return value


def _prompt_ids(path: Path, prompt: dict[str, Any], text: compose.TextSide, context_tokens: int) -> tuple[int, ...]:
    """The tokens of a conversation or a text that a file holds. Raises OptionError, naming the file."""
    fields = Fields(prompt)
    fields.tolerate("model", "id")
    try:
        return prefix_ids(fields, text.prompts(context_tokens), text.capabilities).ids
    except RequestError as error:
        raise OptionError(f"{path}: {error}") from error
