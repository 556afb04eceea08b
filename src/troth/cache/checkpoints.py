"""The tensors of saved recurrent states: whole rows of ``storage.py``'s states, copied out and back in.

Refuses to know which tokens a state stands for (``schedule/prefix_index.py`` does). A checkpoint holds the state of one
row over all recurrent layers; its id is the index into every tensor here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.plan import CheckpointCopy


class CheckpointStorage:
    """Owns the memory of all checkpoints of one model.

    Args:
        cache: where the live states are; read by ``save``, written by ``restore``.
        num_checkpoints: how many states fit.

    Raises:
        OutOfMemory: the device cannot hold them.
    """

    def __init__(self, cache: CacheStorage, num_checkpoints: int) -> None:
        live = {
            f"{layer}.{number}": state for layer, states in cache.states.items() for number, state in enumerate(states)
        }
        self.saved: dict[str, Tensor] = {
            name: cache.zeros((num_checkpoints, *state.shape[1:]), state.dtype, state.device)
            for name, state in live.items()
        }
        """``layer.number`` -> [num_checkpoints, ...] of every layer's tensors."""
        self._pairs = [(live[name], saved) for name, saved in self.saved.items()]
        """(live states [max_rows, ...], saved ones) of every layer and tensor."""

    def save(self, copies: Sequence[CheckpointCopy]) -> None:
        """Copy the rows' states, as they are now, to their checkpoints."""
        for copy in copies:
            for live, saved in self._pairs:
                saved[copy.checkpoint_id].copy_(live[copy.row])

    def restore(self, copies: Sequence[CheckpointCopy]) -> None:
        """Copy checkpoints to the states of rows that start from them."""
        for copy in copies:
            for live, saved in self._pairs:
                live[copy.row].copy_(saved[copy.checkpoint_id])
