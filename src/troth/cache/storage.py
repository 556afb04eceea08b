"""The tensors behind every cache group: block pools for attention layers, a state and a trail per row for recurrent
ones.

Refuses to know who owns which block or row. Read by ``ops/attention.py`` and the recurrent ops; sized by
``schedule/sizing.py``.

A pool of N blocks, per layer of its group (K key-value heads, S = 16 slots, D head size):

    k_NKDS  [N, K, D, 16]   one head's keys of a block are one stream, 16 keys side by side for each value of a head
    v_NKSD  [N, K, 16, D]   one head's values of a block are one stream, key after key

and, where they are codes of 8 bits (``ops/codes.py``), a float32 scale for each key and value of a head: [N, K, 16]
twice. On a CPU a block of all layers of a group is one stretch of memory, so that the system is asked for memory as
blocks are used (docs/adr/0020); elsewhere each of these tensors is one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from troth.contracts.cache_spec import TRAIL_TOKENS, AttentionSpec, CacheSpec
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OutOfMemory
from troth.ops.attention import attention
from troth.ops.codes import LARGEST
from troth.ops.layer_kv import LayerKV

SPARE_BLOCKS: Final = 1
"""At the end of each pool, nobody's: where block -1 of a padding row lies."""
_ALIGNED_BYTES: Final = 64
"""Where tensors of a block begin: a line of a processor's cache. Pools begin with a page."""


class CacheStorage:
    """Owns the memory of all caches of one model.

    Args:
        specs: the model's cache groups.
        num_blocks: pool size of each attention group, in order.
        max_rows: rows of the persistent batch; each has one state per recurrent layer.
        dtype: of keys and values. Recurrent states are float32.
        device: where everything lies.

    Raises:
        OutOfMemory: the device cannot hold it.
    """

    def __init__(
        self,
        specs: tuple[CacheSpec, ...],
        num_blocks: tuple[int, ...],
        max_rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kv: dict[int, LayerKV] = {}
        """By layer index."""
        self.pools: list[list[Tensor]] = []
        """By attention group number: tensors [num_blocks, ...] that hold all keys and values of its blocks."""
        # Kernels for GPUs, which an interpreter runs on a CPU, take pools of one layer.
        self._together = device.type == "cpu" and attention.active[:1] not in (("triton",), ("invariant",))
        self.group_of: dict[int, int] = {}
        """Layer index -> attention group number."""
        self.states: dict[int, tuple[Tensor, ...]] = {}
        """By layer index: the group's tensors, float32 [max_rows, ...]."""
        self.trails: dict[int, tuple[Tensor, ...]] = {}
        """By layer index: what it keeps of drafts, float32 [max_rows, TRAIL_TOKENS, ...]."""
        self.frontiers: dict[int, Tensor] = {}
        """Attention group number -> the hidden state of each block's last token, float32 [num_blocks, D], where a draft
        head has its layer."""
        self.own_blocks: dict[int, int] = {}
        """Of the same groups -> the first of the blocks, one for each row, that the head's layer has besides."""
        self._guests: dict[int, LayerKV] = {}
        """Those of ``kv`` that are a draft model's, in order of its layers."""
        self.guest_group: int | None = None
        """The attention group in whose blocks they lie; None: there are none."""
        self.num_bytes = 0
        group = 0
        for spec in specs:
            if isinstance(spec, AttentionSpec):
                own = max_rows if spec.frontier_width else 0
                shared = [layer for layer in spec.layers if not own or layer != spec.layers[-1]]
                members = [(layer, spec) for layer in shared]
                members += [(layer, guest) for guest in spec.guests for layer in guest.layers]
                self._add_layers(members, group, num_blocks[group] + SPARE_BLOCKS, dtype, device)
                if own:
                    # The head's layer has blocks besides, for each row.
                    last = [(spec.layers[-1], spec)]
                    self._add_layers(last, group, num_blocks[group] + own + SPARE_BLOCKS, dtype, device)
                for guest in spec.guests:
                    self.guest_group = group
                    self._guests |= {layer: self.kv[layer] for layer in guest.layers}
                if spec.frontier_width:
                    self.own_blocks[group] = num_blocks[group]
                    shape = (num_blocks[group] + SPARE_BLOCKS, spec.frontier_width)
                    self.frontiers[group] = self.zeros(shape, torch.float32, device)
                group += 1
            else:
                for layer in spec.layers:
                    self.states[layer] = tuple(
                        self.zeros((max_rows, *tensor.shape), torch.float32, device) for tensor in spec.tensors
                    )
                    self.trails[layer] = tuple(
                        self.zeros((max_rows, TRAIL_TOKENS, *tensor.shape), torch.float32, device)
                        for tensor in spec.trail
                    )

    def guest_cache(self) -> CacheStorage:
        """The draft model's part, as that knows it: layers from 0, all in one group, which is ``guest_group``."""
        part, first = CacheStorage((), (), 0, dtype=torch.float32, device=torch.device("cpu")), min(self._guests)
        part.kv = {layer - first: kv for layer, kv in self._guests.items()}
        part.group_of = dict.fromkeys(part.kv, 0)
        return part

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is held."""
        for kv in self.kv.values():
            yield from kv.tensors().values()
        yield from self.frontiers.values()
        for kept in (*self.states.values(), *self.trails.values()):
            yield from kept

    def _add_layers(
        self,
        members: list[tuple[int, AttentionSpec]],
        group: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the pools of some layers of a group."""
        self.group_of |= {layer: group for layer, _ in members}
        while len(self.pools) <= group:
            self.pools.append([])
        if self._together and members:
            pool_NB = self.zeros(
                (num_blocks, sum(_bytes_of_block(spec, dtype) for _, spec in members)), torch.uint8, device
            )
            self.pools[group].append(pool_NB)
            first = 0
            for layer, spec in members:
                self.kv[layer] = _view(pool_NB, first, spec, dtype)
                first += _bytes_of_block(spec, dtype)
            return
        for layer, spec in members:
            held = [self.zeros((num_blocks, *shape), kind, device) for shape, kind in _tensors_of_block(spec, dtype)]
            self.kv[layer] = LayerKV(*held)
            self.pools[group] += held

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that counts to these caches' bytes. Raises OutOfMemory."""
        try:
            if device.type == "cpu":
                tensor = _untouched_zeros(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
            else:
                tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            wanted = torch.Size(shape).numel() * dtype.itemsize
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            raise OutOfMemory("no room for the KV cache", wanted_bytes=wanted, free_bytes=free) from error
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _tensors_of_block(spec: AttentionSpec, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what one layer holds in a block, in the order of LayerKV's fields."""
    heads = spec.num_kv_heads
    held = [((heads, spec.head_dim, BLOCK_TOKENS), dtype), ((heads, BLOCK_TOKENS, spec.value_dim), dtype)]
    scales = 2 if dtype in LARGEST else 0
    return [*held, *[((heads, BLOCK_TOKENS), torch.float32)] * scales]


def _bytes_of_block(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """What one layer takes of a block that layers share: each of its tensors begins with a line."""
    return sum(_in_lines(shape, kind) for shape, kind in _tensors_of_block(spec, dtype))


def _in_lines(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _view(pool_NB: Tensor, first: int, spec: AttentionSpec, dtype: torch.dtype) -> LayerKV:
    """One layer's share of blocks, uint8 [N, bytes], from byte ``first`` of each on."""
    views = []
    for shape, kind in _tensors_of_block(spec, dtype):
        size = torch.Size(shape).numel() * kind.itemsize
        views.append(pool_NB[:, first : first + size].view(kind).view(len(pool_NB), *shape))
        first += _in_lines(shape, kind)
    return LayerKV(*views)


def _untouched_zeros(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], from the beginning of a page: calloc'ed pages cost nothing until a block is used, and
    torch.zeros would touch them all (3 s for 3 GB).
    """
    raw = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    first = -raw.ctypes.data % mmap.PAGESIZE
    return torch.from_numpy(raw[first : first + num_bytes])
