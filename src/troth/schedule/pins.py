"""Prefixes that stay in the prompt cache by name, until they are unpinned by name.

Refuses to know who asks and how the prefix came to be computed (``run/engine.py``). A pin holds references and one
lease like a row, so whatever makes room passes it over. Next: ``prefix_index.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from troth.contracts.counted import counted
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK
from troth.contracts.prefix_cache import PinnedPrefix
from troth.errors import CapabilityUnavailable, RequestError
from troth.schedule.admission import SchedulerLimits
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.prefix_match import PrefixPlace

CHECKPOINT_SHARE = 0.5
"""Of the places for recurrent states, the most that pins take: requests save theirs in the others."""


@dataclass(frozen=True, slots=True)
class _Pin:
    place: PrefixPlace
    tables: list[BlockTable]

    @property
    def num_tokens(self) -> int:
        return self.place.node.depth * BLOCK_TOKENS


class Pins:
    """The pins of one scheduler.

    Args:
        index: its prompt cache; None: there is none, and nothing can be pinned.
        limits: says what must stay free: a request as large as any that is admitted.
    """

    def __init__(self, index: PrefixIndex | None, limits: SchedulerLimits) -> None:
        self._index = index
        self._limits = limits
        self._by_name: dict[str, _Pin] = {}

    def pin(self, name: str, namespace: str, token_ids: Sequence[int]) -> int:
        """Keep the longest usable prefix of some tokens; how many tokens it has. An older pin of the name ends.

        Raises:
            CapabilityUnavailable: there is no prompt cache.
            RequestError: nothing of it is held, or the largest request would no longer fit beside all pins. Nothing
                is pinned then, and an older pin stays.
        """
        if self._index is None:
            raise CapabilityUnavailable("pinning a prefix", "this engine has no prompt cache", param="pin")
        taken = self._index.pin(namespace, token_ids)
        if taken is None:
            raise RequestError(
                f"nothing of prefix {name!r} can be kept: it has {counted(len(token_ids), 'token')}, the prompt cache "
                f"keeps whole blocks of {BLOCK_TOKENS}, and of recurrent models where a state was saved; pin a longer "
                "one",
                param="pin",
                code="nothing_to_pin",
            )
        made, others = _Pin(*taken), {other: pin for other, pin in self._by_name.items() if other != name}
        refusal = self._refusal(name, [*others.values(), made])
        if refusal is not None:
            self._index.unpin(*taken)
            raise refusal
        self.unpin(name)
        self._by_name[name] = made
        return made.num_tokens

    def unpin(self, name: str) -> bool:
        """Let a prefix go the way of the others; whether it was pinned."""
        pin = self._by_name.pop(name, None)
        if pin is None:
            return False
        assert self._index is not None
        self._index.unpin(pin.place, pin.tables)
        return True

    def status(self) -> tuple[PinnedPrefix, ...]:
        """Every pin, in order of pinning."""
        return tuple(
            PinnedPrefix(name=name, num_tokens=pin.num_tokens, num_bytes=self._num_bytes([pin]))
            for name, pin in self._by_name.items()
        )

    def discarded(self) -> list[str]:
        """Names of pins that keep nothing: a row failed that had computed a part of it, which is out of the index."""
        return [name for name, pin in self._by_name.items() if not pin.place.node.alive]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pins, what they share counted once."""
        return self._num_bytes(self._by_name.values())

    def tables(self) -> list[BlockTable]:
        """One of each group for each pin. For checks."""
        return [table for pin in self._by_name.values() for table in pin.tables]

    def _refusal(self, name: str, pins: Sequence[_Pin]) -> RequestError | None:
        """Why so many pins leave too little, if they do."""
        limits, largest = self._limits, self._limits.largest_request
        for group, (spec, count) in enumerate(zip(limits.groups, limits.num_blocks, strict=True)):
            num_pinned = len(_blocks(pins, group))
            needed = spec.blocks_for(largest, limits.step_tokens)
            if num_pinned + needed > count:
                return RequestError(
                    f"prefix {name!r} does not fit: all pins would hold {num_pinned} of {count} KV cache blocks, and a "
                    f"request of {largest} tokens needs {needed}; unpin another, lower --context, or raise --kv-memory",
                    param="pin",
                    code="pin_does_not_fit",
                )
        num_places = limits.num_checkpoints
        num_states = len(_states(pins))
        if num_places is not None and num_states > num_places * CHECKPOINT_SHARE:
            return RequestError(
                f"prefix {name!r} does not fit: all pins would hold {num_states} of {num_places} places for recurrent "
                f"states, of which requests need half; unpin another, or raise --kv-memory",
                param="pin",
                code="pin_does_not_fit",
            )
        return None

    def _num_bytes(self, pins: Iterable[_Pin]) -> int:
        pins = list(pins)
        of_blocks = sum(
            len(_blocks(pins, group)) * spec.bytes_per_block for group, spec in enumerate(self._limits.groups)
        )
        return of_blocks + len(_states(pins)) * self._limits.checkpoint_bytes


def _blocks(pins: Iterable[_Pin], group: int) -> set[int]:
    return {block_id for pin in pins for block_id in pin.tables[group].block_ids if block_id != NO_BLOCK}


def _states(pins: Iterable[_Pin]) -> set[int]:
    return {pin.place.node.checkpoint_id for pin in pins if pin.place.node.checkpoint_id is not None}
