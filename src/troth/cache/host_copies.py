"""Contents of blocks and checkpoints on their way between the caches and main memory.

Refuses to know what they stand for and where they go (``run/disk_cache.py``). What comes from outside is only taken
when it has every tensor of the caches, in shape and dtype: never a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.names import BlockId, CheckpointId
from troth.ops.codes import as_bytes


class HostCopies:
    """Reads and writes the caches of one model. The thread that runs its steps uses it, between steps.

    Args:
        cache: the block pools.
        checkpoints: the saved recurrent states; None: the model keeps none.
        finish_started: waits for steps under way: that of a row which has ended may still write to what were its
            blocks. None: copies are ordered with steps.
    """

    def __init__(
        self,
        cache: CacheStorage,
        checkpoints: CheckpointStorage | None = None,
        finish_started: Callable[[], None] | None = None,
    ) -> None:
        self._finish_started = finish_started if finish_started is not None else _nothing
        self._pools: dict[int, dict[str, Tensor]] = {}
        """Group -> ``layer.field`` -> [num_blocks, ...]."""
        for layer, kv in cache.kv.items():
            pool = self._pools.setdefault(cache.group_of[layer], {})
            pool.update((f"{layer}.{name}", tensor) for name, tensor in kv.tensors().items())
        for group, frontier in cache.frontiers.items():
            self._pools[group]["frontier"] = frontier
        self._saved = {} if checkpoints is None else dict(checkpoints.saved)

    def close(self) -> None:
        """Let the memory of the caches go."""
        self._finish_started = _nothing
        self._pools.clear()
        self._saved.clear()

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group."""
        return _entry_bytes(self._pools[group])

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return _entry_bytes(self._saved)

    def read_blocks(self, group: int, block_ids: Sequence[BlockId]) -> dict[str, Tensor]:
        """Copies in main memory, first dimension len(block_ids)."""
        self._finish_started()
        return _read(self._pools[group], block_ids)

    def read_state(self, checkpoint_id: CheckpointId) -> dict[str, Tensor]:
        """A copy in main memory, first dimension 1."""
        self._finish_started()
        return _read(self._saved, [checkpoint_id])

    def takes_blocks(self, group: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these can be contents of blocks of a group."""
        return _fits(self._pools[group], tensors)

    def takes_state(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these can be a checkpoint."""
        return bool(self._saved) and _fits(self._saved, tensors)

    def write_blocks(self, group: int, block_ids: Sequence[BlockId], tensors: Mapping[str, Tensor]) -> None:
        """Fill blocks, one of ``tensors``' first dimension each; ``takes_blocks`` said yes."""
        self._finish_started()
        _write(self._pools[group], block_ids, tensors)

    def write_state(self, checkpoint_id: CheckpointId, tensors: Mapping[str, Tensor]) -> None:
        """Fill a checkpoint; ``takes_state`` said yes."""
        self._finish_started()
        _write(self._saved, [checkpoint_id], tensors)


def _nothing() -> None:
    """Waits for nothing."""


def _entry_bytes(pool: Mapping[str, Tensor]) -> int:
    return sum(tensor[:1].numel() * tensor.element_size() for tensor in pool.values())


def _fits(pool: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    return pool.keys() == tensors.keys() and all(
        pool[name].shape[1:] == tensor.shape[1:] and pool[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


@torch.inference_mode()
def _read(pool: Mapping[str, Tensor], places: Sequence[int]) -> dict[str, Tensor]:
    index = torch.tensor(places, dtype=torch.int64)
    on_device = {device: index.to(device) for device in {tensor.device for tensor in pool.values()}}
    return {
        name: as_bytes(tensor).index_select(0, on_device[tensor.device]).cpu().view(tensor.dtype)
        for name, tensor in pool.items()
    }


@torch.inference_mode()
def _write(pool: Mapping[str, Tensor], places: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    index = torch.tensor(places, dtype=torch.int64)
    on_device = {device: index.to(device) for device in {tensor.device for tensor in pool.values()}}
    for name, tensor in pool.items():
        as_bytes(tensor).index_copy_(0, on_device[tensor.device], as_bytes(tensors[name]).to(tensor.device))
