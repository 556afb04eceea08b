"""Which blocks and states of a text are worth having on disk, and how far those that are there reach.

Refuses to know files and tensors: places in a chain of blocks only, the block from 0. Used by ``run/disk_cache.py``.

    blocks      0  1  2  3  4  5  6  7  8  9 10 11 12
    kv, full    x  x  x  x  x  x  x  x  x  x  x  x  x      all
    kv, window        x  x  x                 x  x  x      inside the window before each end
    state                   x                       x      at each end
    ends                    5                      13      blocks after which another request may begin
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from troth.cache.disk_names import STATE, BundleKind, kv_kind
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class DiskReach:
    """What a model's requests need of a chain.

    Args:
        groups: attention groups, in order.
        has_states: whether a request can only start from a saved recurrent state.
    """

    groups: tuple[AttentionSpec, ...]
    has_states: bool

    @property
    def kinds(self) -> tuple[BundleKind, ...]:
        """Everything that is kept of a chain."""
        return (*map(kv_kind, range(len(self.groups))), *((STATE,) if self.has_states else ()))

    def group_of(self, kind: BundleKind) -> int:
        """The attention group whose blocks are of a kind."""
        return self.kinds.index(kind)

    def needed(self, kind: BundleKind, num_blocks: int) -> range:
        """The places that a request which starts after ``num_blocks`` blocks reads."""
        if kind == STATE:
            return range(num_blocks - 1, num_blocks)
        spec = self.groups[self.group_of(kind)]
        return range(spec.first_needed(num_blocks * BLOCK_TOKENS), num_blocks)

    def wanted(self, kind: BundleKind, ends: Iterable[int]) -> list[int]:
        """The places to keep so that a request can start at each of ``ends``, ascending."""
        return sorted({place for end in ends for place in self.needed(kind, end)})

    def deepest(self, held: Mapping[BundleKind, Collection[int]], most: int) -> int:
        """The most blocks, at most ``most``, that a request can start after; 0 when there are none."""
        windows = []
        for group, spec in enumerate(self.groups):
            have = held[kv_kind(group)]
            if spec.window is None:
                most = next((place for place in range(most) if place not in have), most)
            else:
                windows.append(kv_kind(group))
        for num_blocks in range(most, 0, -1):
            if self.has_states and num_blocks - 1 not in held[STATE]:
                continue
            if all(place in held[kind] for kind in windows for place in self.needed(kind, num_blocks)):
                return num_blocks
        return 0


def runs(places: Sequence[int], most: int) -> list[range]:
    """Ascending places as stretches of consecutive ones, none longer than ``most``."""
    found: list[range] = []
    for place in places:
        if found and found[-1].stop == place and len(found[-1]) < most:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found
