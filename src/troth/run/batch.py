"""From a plan's integers to the tensors of one step. Keeps every row's block tables between steps.

Legend: R rows of the step, T tokens, B blocks per table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, Row
from troth.contracts.plan import ON_DEVICE, StepPlan
from troth.nn.batch import Batch, GroupTables
from troth.ops.rows import Rows
from troth.run.draws import drawn_tokens


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
        self._width = -(-context_tokens // BLOCK_TOKENS)
        self._tables = [np.full((max_rows, self._width), NO_BLOCK, dtype=np.int32) for _ in groups]
        self._device = device
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """int64 [max_rows] on the device: what ON_DEVICE entries of a plan stand for."""
        self._last_token = self.last_token.numpy() if device.type == "cpu" else None

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's table changes; once per plan, before its batch is built."""
        for row in plan.releases:
            for table in self._tables:
                table[row] = NO_BLOCK
        for update in plan.block_updates:
            end = update.first_index + len(update.block_ids)
            self._tables[update.group][update.row, update.first_index : end] = update.block_ids

    def build(self, plan: StepPlan) -> Batch:
        """Lay out a followed plan in fresh tensors."""
        numbers = self._numbers(plan)
        blocks = -(-int(numbers.context_len_R.max()) // BLOCK_TOKENS)
        groups = tuple(
            GroupTables(block_table_RB=self._put(table[numbers.row_R, :blocks]), slots_T=self._put(slots_T))
            for table, slots_T in zip(self._tables, numbers.slots, strict=True)
        )
        rows = Rows(
            num_new=plan.num_new,
            starts=plan.starts,
            rows=[int(row) for row in plan.rows],
            query_start_R1=self._put(numbers.query_start_R1),
            context_len_R=self._put(numbers.context_len_R),
            row_R=self._put(numbers.row_R),
            max_new=max(plan.num_new),
            num_single=_leading_ones(plan.num_new),
            num_exact=plan.num_exact,
        )
        return Batch(
            token_ids_T=self._token_ids(plan, numbers.row_T),
            positions_T=self._put(numbers.position_T),
            rows=rows,
            groups=groups,
            sample_S=self._put(np.asarray(drawn_tokens(plan), dtype=np.int64)),
        )

    def build_whole(self, plan: StepPlan) -> Batch:
        """As ``build``, with tables of full width: a batch whose tensors can be refilled for any later context."""
        batch = self.build(plan)
        row_R = self._numbers(plan).row_R
        for group, table in zip(batch.groups, self._tables, strict=True):
            group.block_table_RB = self._put(table[row_R])
        return batch

    def refiller(self, batch: Batch) -> Callable[[StepPlan], None]:
        """What writes a followed plan into the tensors, on the CPU, of a batch that ``build_whole`` made.

        The plan must be of as many decodes as that one was.
        """
        # Through numpy views made once: a decode step refills a dozen small tensors, with cold caches.
        token_ids, positions = batch.token_ids_T.numpy(), batch.positions_T.numpy()
        context_len, row_ids = batch.rows.context_len_R.numpy(), batch.rows.row_R.numpy()
        groups = [
            (table, group.block_table_RB.numpy(), group.slots_T.numpy())
            for group, table in zip(batch.groups, self._tables, strict=True)
        ]

        def refill(plan: StepPlan) -> None:
            rows, starts = np.asarray(plan.rows, dtype=np.int64), np.asarray(plan.starts, dtype=np.int64)
            if ON_DEVICE in plan.token_ids:
                batch.token_ids_T.copy_(self._token_ids(plan, rows))
            else:
                token_ids[:] = plan.token_ids
            positions[:] = starts
            batch.rows.starts, batch.rows.rows = plan.starts, list(plan.rows)
            np.add(starts, 1, out=context_len, casting="same_kind")
            row_ids[:] = rows
            blocks, offsets = np.divmod(starts, BLOCK_TOKENS)
            for table, block_table, slots in groups:
                np.take(table, rows, axis=0, out=block_table)
                slots[:] = table[rows, blocks] * BLOCK_TOKENS + offsets

        return refill

    def note_sampled(self, rows: Sequence[Row], token_S: Tensor) -> None:
        """Remember the tokens just drawn, int64 [S] on the device, of these rows."""
        if self._last_token is not None:
            for row, token_id in zip(rows, token_S.tolist(), strict=True):
                self._last_token[row] = token_id
        else:
            self.last_token[rows] = token_S

    def _numbers(self, plan: StepPlan) -> _Numbers:
        starts, num_new = np.asarray(plan.starts), np.asarray(plan.num_new)
        row_R = np.asarray(plan.rows, dtype=np.int64)
        query_start_R1 = np.zeros(len(row_R) + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start_R1[1:])
        row_T = np.repeat(row_R, num_new)
        first_T = np.repeat(starts - query_start_R1[:-1], num_new)
        position_T = np.arange(plan.num_tokens) + first_T
        return _Numbers(
            row_R=row_R,
            row_T=row_T,
            query_start_R1=query_start_R1,
            context_len_R=(starts + num_new).astype(np.int32),
            position_T=position_T,
            slots=tuple(
                table[row_T, position_T // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + position_T % BLOCK_TOKENS
                for table in self._tables
            ),
        )

    def _token_ids(self, plan: StepPlan, row_T: NDArray[np.int64]) -> Tensor:
        ids = np.asarray(plan.token_ids, dtype=np.int64)
        token_ids_T = self._put(ids)
        unknown = ids == ON_DEVICE
        if unknown.any():
            known_by_row = self.last_token[self._put(row_T)]
            token_ids_T = torch.where(self._put(unknown), known_by_row, token_ids_T)
        return token_ids_T

    def _put(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


@dataclass(slots=True)
class _Numbers:
    """A plan as arrays on the host."""

    row_R: NDArray[np.int64]
    row_T: NDArray[np.int64]
    query_start_R1: NDArray[np.int32]
    context_len_R: NDArray[np.int32]
    position_T: NDArray[np.int64]
    slots: tuple[NDArray[np.int64], ...]
    """By group, [T]."""


def _leading_ones(num_new: list[int]) -> int:
    count = 0
    for n in num_new:
        if n != 1:
            break
        count += 1
    return count
