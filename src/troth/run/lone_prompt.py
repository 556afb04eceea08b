"""A prompt computed in one step, over caches of its own that are thrown away: no scheduler, no neighbours.

For who wants to know what a model computes (``certification.py``) or what that takes (``step_cost.py``). Refuses to
draw. Next: ``runner.py`` for steps of an engine. Legend: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import CacheSpec, attention_groups
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import BlockUpdate, StepPlan
from troth.models.family import Model
from troth.run.batch import BatchBuilder
from troth.run.device_batch import DeviceBatches


class LonePrompt:
    """Owns the caches.

    Args:
        model: on ``device``.
        specs: its caches.
        token_ids: the prompt, at least one.
        kv_dtype: of keys and values.
        device: where the model is.

    Raises:
        OutOfMemory: the device cannot hold the caches.
    """

    def __init__(
        self,
        model: Model,
        specs: tuple[CacheSpec, ...],
        token_ids: Sequence[int],
        *,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        groups, num_tokens = attention_groups(specs), len(token_ids)
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        self._model = model
        self.cache = CacheStorage(specs, (num_blocks,) * len(groups), 1, dtype=kv_dtype, device=device)
        """As fresh as the system gives it, until ``hidden`` is called."""
        self._batches: BatchBuilder | DeviceBatches
        if device.type == "cpu":
            self._batches = BatchBuilder(groups, 1, num_tokens)
        else:
            self._batches = DeviceBatches(groups, 1, num_tokens, device)
        row, block_ids = Row(0), [BlockId(i) for i in range(num_blocks)]
        self._plan = StepPlan(0, [row], [RequestId("lone")], [0], [num_tokens], [0], [0], list(token_ids))
        self._plan.block_updates = [BlockUpdate(row, group, 0, block_ids) for group in range(len(groups))]

    def hidden(self) -> Tensor:
        """Final hidden states of every token, float [T, D]; computed anew by each call, in inference mode."""
        self._batches.follow(self._plan)
        return self._model.forward(self._batches.build(self._plan), self.cache)
