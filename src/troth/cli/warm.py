"""What ``troth serve --warm FILE`` names: read and checked before the model loads, computed once it has.

Refuses to know what a prefix is made of (``serve/prefixes.py``). The file is a JSON list of objects, each as the
body of ``POST /v1/cache/prefixes``. Every error names the file and the entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troth.cli.json_operand import read_json
from troth.cli.terminal import Terminal
from troth.contracts.bounds import shown_json
from troth.contracts.counted import counted
from troth.contracts.names import RequestId
from troth.errors import DeviceError, OptionError, RequestError
from troth.serve.errors import EngineFailure
from troth.serve.fields import Fields
from troth.serve.model import ModelList, Prompts, ServedModel
from troth.serve.prefixes import prefix_ids, read_prefix, warm


class WarmFile:
    """The prefixes of one file.

    Raises:
        OptionError: it cannot be read, or is not what such a file must be.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        value = read_json(Path(path).expanduser())
        if not isinstance(value, list):
            raise OptionError(f"{path}: must be a list of prefixes, not {shown_json(value)}")
        if not value:
            raise OptionError(f"{path}: must be a list with at least one prefix")
        self._entries: list[dict[str, Any]] = []
        for number, entry in enumerate(value):
            if not isinstance(entry, dict) or not entry.keys() & {"messages", "prompt"}:
                raise self._wrong(number, f"must be an object with messages or a prompt, not {shown_json(entry)}")
            self._entries.append(entry)

    def check(self, models: Sequence[ServedModel], prompts: Prompts) -> None:
        """Refuse what the model could never keep, before it has loaded. Computes nothing.

        Args:
            models: those served.
            prompts: builds prompts without an engine.

        Raises:
            OptionError: naming the file and the entry.
        """
        known = ModelList(models)
        for number, entry in enumerate(self._entries):
            fields = Fields(entry)
            try:
                model, name = known.find(fields.text("model")), fields.text("id")
                prefix_ids(fields, prompts, model.capabilities).request(RequestId("warm"), name)
            except RequestError as error:
                raise self._wrong(number, str(error)) from error

    async def warm(self, models: Sequence[ServedModel], terminal: Terminal) -> None:
        """Compute and pin all of them, in order, and say so.

        Raises:
            OptionError: one is refused, by name; those before it stay pinned.
            DeviceError: the engine failed on one.
            NotReady: the engine is gone or loads again.
        """
        known, num_tokens, seconds = ModelList(models), 0, 0.0
        for number, entry in enumerate(self._entries):
            try:
                prefix = await asyncio.to_thread(read_prefix, Fields(entry), known)
                done = await warm(prefix)
            except RequestError as error:
                raise self._wrong(number, str(error)) from error
            except EngineFailure as error:
                if error.failed.param is None:
                    raise DeviceError(f"{self._path}: entry {number + 1}: {error}") from error
                raise self._wrong(number, str(error)) from error
            num_tokens += done.num_prompt_tokens
            seconds += done.prefill_s
        prefixes = counted(len(self._entries), "prefix", "prefixes")
        terminal.note(f"Warmed {prefixes}: {num_tokens:,} tokens in {seconds:.1f} s.")

    def _wrong(self, number: int, message: str) -> OptionError:
        return OptionError(f"{self._path}: entry {number + 1}: {message}")
