"""From a plan's integers to the tensors of one step. Keeps every row's block tables between steps.

Legend: R rows of the step, T tokens, B blocks per table.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepPlan
from troth.nn.batch import Batch, GroupTables
from troth.ops.rows import Rows


class BatchBuilder:
    """Owns the persistent block tables and the last sampled token of each row.

    Args:
        groups: attention groups, in order.
        max_rows: rows of the persistent batch.
        context_tokens: longest request; sizes the tables.
        device: where the step's tensors go.
    """

    def __init__(
        self, groups: tuple[AttentionSpec, ...], max_rows: int, context_tokens: int, device: torch.device
    ) -> None:
        width = -(-context_tokens // BLOCK_TOKENS)
        self._tables = [np.full((max_rows, width), NO_BLOCK, dtype=np.int32) for _ in groups]
        self._device = device
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """int64 [max_rows] on the device: what ON_DEVICE entries of a plan stand for."""

    def build(self, plan: StepPlan) -> Batch:
        """Apply the plan's table changes and lay out its tokens."""
        self._apply(plan)
        starts, num_new = np.asarray(plan.starts), np.asarray(plan.num_new)
        row_R = np.asarray(plan.rows, dtype=np.int64)
        query_start = np.zeros(len(row_R) + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start[1:])
        context_len = (starts + num_new).astype(np.int32)
        row_T = np.repeat(row_R, num_new)
        position_T = np.arange(plan.num_tokens) - np.repeat(query_start[:-1], num_new) + np.repeat(starts, num_new)
        blocks = -(-int(context_len.max()) // BLOCK_TOKENS)
        groups = tuple(
            GroupTables(
                block_table_RB=self._put(table[row_R, :blocks]),
                slots_T=self._put(
                    table[row_T, position_T // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + position_T % BLOCK_TOKENS
                ),
            )
            for table in self._tables
        )
        sampled = [i for i, step in enumerate(plan.sample_steps) if step != NO_SAMPLE]
        rows = Rows(
            num_new=plan.num_new,
            starts=plan.starts,
            rows=[int(row) for row in plan.rows],
            query_start_R1=self._put(query_start),
            context_len_R=self._put(context_len),
            row_R=self._put(row_R),
            max_new=int(num_new.max()),
            num_single=_leading_ones(plan.num_new),
        )
        return Batch(
            token_ids_T=self._token_ids(plan, row_T),
            positions_T=self._put(position_T),
            rows=rows,
            groups=groups,
            sample_S=self._put(query_start[1:][sampled].astype(np.int64) - 1),
        )

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.releases:
            for table in self._tables:
                table[row] = NO_BLOCK
        for update in plan.block_updates:
            end = update.first_index + len(update.block_ids)
            self._tables[update.group][update.row, update.first_index : end] = update.block_ids

    def _token_ids(self, plan: StepPlan, row_T: NDArray[np.int64]) -> torch.Tensor:
        ids = np.asarray(plan.token_ids, dtype=np.int64)
        token_ids_T = self._put(ids)
        unknown = ids == ON_DEVICE
        if unknown.any():
            known_by_row = self.last_token[self._put(row_T)]
            token_ids_T = torch.where(self._put(unknown), known_by_row, token_ids_T)
        return token_ids_T

    def _put(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


def _leading_ones(num_new: list[int]) -> int:
    count = 0
    for n in num_new:
        if n != 1:
            break
        count += 1
    return count
