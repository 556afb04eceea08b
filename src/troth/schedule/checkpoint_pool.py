"""The places where recurrent states can be saved. Integers only; the states are ``cache/checkpoints.py``'s.

Refuses to know whose state lies where: ``prefix_index.py`` owns what is attached, ``row_prefix.py`` what is on its way.
"""

from __future__ import annotations

from troth.contracts.names import CheckpointId


class CheckpointPool:
    """Checkpoints 0 .. num_checkpoints - 1, each free or with one owner."""

    def __init__(self, num_checkpoints: int) -> None:
        if num_checkpoints < 0:
            raise ValueError(f"a checkpoint pool cannot have {num_checkpoints} places")
        self.num_checkpoints = num_checkpoints
        self._free = [CheckpointId(i) for i in range(num_checkpoints - 1, -1, -1)]
        self._taken = bytearray(num_checkpoints)

    @property
    def num_free(self) -> int:
        """Places nobody owns."""
        return len(self._free)

    def take(self) -> CheckpointId | None:
        """A free place, now the caller's; None when there is none."""
        if not self._free:
            return None
        checkpoint_id = self._free.pop()
        self._taken[checkpoint_id] = 1
        return checkpoint_id

    def release(self, checkpoint_id: CheckpointId) -> None:
        """Give a place back. A step under way may still write to it: steps run in order, so that precedes any reuse."""
        assert self._taken[checkpoint_id], f"checkpoint {checkpoint_id} was released more often than taken"
        self._taken[checkpoint_id] = 0
        self._free.append(checkpoint_id)
