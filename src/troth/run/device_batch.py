"""From a plan's integers to the tensors of one step, where the caches are on another device than the plan.

Block tables live on that device and only their changes travel; a step's numbers travel in one copy from pinned memory,
behind which the host goes on. ``run/batch.py`` does the same on the CPU, with views instead of copies.
Legend: R rows of the step, T tokens, S sampled rows, B blocks per table, G cache groups, P rows of the persistent batch
and one more, which stands for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepPlan
from troth.nn.batch import Batch, GroupTables
from troth.ops.rows import Rows, recall_tensor
from troth.run.draws import drawn_tokens

ALIGNMENT: Final = 16
"""Numbers of a step begin at multiples of this many: kernels are compiled for aligned addresses, and once."""


@dataclass(slots=True)
class DecodeInputs:
    """What a decode step of a fixed number of rows is refilled with; the rows behind the last one are padding."""

    ids_4R: Tensor
    """int64 [4, R] on the device: token ids (or ON_DEVICE), positions, rows, drafts to recall."""
    starts: list[int] = field(default_factory=list)
    """The positions as the host last filled them; providers that look at them cannot be replayed."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.ids_4R.shape[1]


class DeviceBatches:
    """Owns the block tables and the last sampled token of each row, on the device.

    Args:
        groups: attention groups, in order.
        max_rows: rows of the persistent batch.
        context_tokens: longest request; sizes the tables.
        device: where everything lies.
    """

    def __init__(
        self, groups: tuple[AttentionSpec, ...], max_rows: int, context_tokens: int, device: torch.device
    ) -> None:
        # Rows of tables, too, begin at aligned addresses.
        self._width = _aligned(-(-context_tokens // BLOCK_TOKENS))
        self._device = device
        self._pad_row = max_rows
        self._table_GPB = torch.full(
            (len(groups), max_rows + 1, self._width), NO_BLOCK, dtype=torch.int32, device=device
        )
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        """int64 [P]: what ON_DEVICE entries of a plan stand for."""
        self._sampled_S = torch.zeros(0, dtype=torch.int64, device=device)
        """Rows of the step that was built last, those that sample."""
        self._index_S: Tensor | None = None
        """Their places in the step, where others lie between them."""

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's table changes; once per plan, before its batch is built."""
        changes: dict[int, int] = {}
        for update in plan.block_updates:
            first = (update.group * (self._pad_row + 1) + update.row) * self._width + update.first_index
            changes.update(zip(range(first, first + len(update.block_ids)), update.block_ids, strict=True))
        if changes:
            places, block_ids = self._put(np.array(list(changes)), np.array(list(changes.values())))
            self._table_GPB.view(-1).index_copy_(0, places, block_ids.int())

    def build(self, plan: StepPlan) -> Batch:
        """Lay out a followed plan in fresh tensors."""
        row_R, starts_R, new_R = (np.asarray(values) for values in (plan.rows, plan.starts, plan.num_new))
        query_start_R1 = np.zeros(len(row_R) + 1, dtype=np.int64)
        np.cumsum(new_R, out=query_start_R1[1:])
        position_T = np.arange(plan.num_tokens) + np.repeat(starts_R - query_start_R1[:-1], new_R)
        drawn = np.asarray(drawn_tokens(plan), dtype=np.int64)
        row_T = np.repeat(row_R, new_R)
        ids_T, positions_T, rows_T, query_start, context, rows, sample_S, self._sampled_S = self._put(
            np.asarray(plan.token_ids),
            position_T,
            row_T,
            query_start_R1,
            starts_R + new_R,
            row_R,
            drawn,
            row_T[drawn],
        )
        if ON_DEVICE in plan.token_ids:
            ids_T = torch.where(ids_T == ON_DEVICE, self.last_token[rows_T], ids_T)
        blocks = _aligned(-(-int((starts_R + new_R).max()) // BLOCK_TOKENS))
        return Batch(
            token_ids_T=ids_T,
            positions_T=positions_T,
            rows=Rows(
                num_new=plan.num_new,
                starts=plan.starts,
                rows=[int(row) for row in plan.rows],
                query_start_R1=query_start.int(),
                context_len_R=context.int(),
                row_R=rows,
                max_new=max(plan.num_new),
                num_single=next((i for i, count in enumerate(plan.num_new) if count != 1), len(plan.num_new)),
                num_exact=plan.num_exact,
                num_verifies=plan.num_verifies,
                recalls=plan.recalls,
                recall_R=recall_tensor(plan.recalls, len(plan.rows), self._device) if plan.recalls else None,
            ),
            groups=self._groups(rows, rows_T, positions_T, blocks),
            sample_S=sample_S,
        )

    def decode_inputs(self, num_rows: int) -> DecodeInputs:
        """Fresh inputs of so many rows, all padding."""
        ids_4R = torch.zeros((4, _aligned(num_rows)), dtype=torch.int64, device=self._device)[:, :num_rows]
        ids_4R[2] = self._pad_row
        return DecodeInputs(ids_4R, [0] * num_rows)

    def fill(self, inputs: DecodeInputs, plan: StepPlan) -> None:
        """Write a followed plan of decodes, no more than there are rows, into inputs."""
        count = len(plan.rows)
        ids_4R = np.zeros((4, inputs.num_rows), dtype=np.int64)
        ids_4R[0, :count], ids_4R[1, :count] = plan.token_ids, plan.starts
        ids_4R[2] = self._pad_row
        ids_4R[2, :count] = plan.rows
        ids_4R[3, list(plan.recalls)] = list(plan.recalls.values())
        inputs.ids_4R.copy_(self._pinned(ids_4R), non_blocking=True)
        inputs.starts[:] = ids_4R[1].tolist()
        self._index_S, self._sampled_S = None, inputs.ids_4R[2, :count]
        if NO_SAMPLE in plan.sample_steps:
            index_S = np.flatnonzero(np.asarray(plan.sample_steps) != NO_SAMPLE)
            self._index_S, self._sampled_S = self._put(index_S, np.asarray(plan.rows)[index_S])

    def decode_batch(self, inputs: DecodeInputs, num_blocks: int) -> Batch:
        """The batch of inputs, by operations on the device alone, for contexts of at most ``num_blocks`` blocks.

        Padding is a token of a row without context, whose key goes nowhere.
        """
        ids_R, positions_R, row_R, recall_R = inputs.ids_4R
        context_R = torch.where(row_R == self._pad_row, 0, positions_R + 1).int()
        count = inputs.num_rows
        return Batch(
            token_ids_T=torch.where(ids_R == ON_DEVICE, self.last_token[row_R], ids_R),
            positions_T=positions_R,
            rows=Rows(
                num_new=[1] * count,
                starts=inputs.starts,
                rows=[],
                query_start_R1=torch.arange(count + 1, dtype=torch.int32, device=self._device),
                context_len_R=context_R,
                row_R=row_R,
                max_new=1,
                num_single=count,
                num_exact=count,
                recall_R=recall_R,
            ),
            groups=self._groups(row_R, row_R, positions_R, num_blocks),
            sample_S=torch.arange(count, device=self._device),
        )

    def sampled(self, values_RV: Tensor) -> Tensor:
        """Of values of every row of the inputs that were filled last, [R, V], those of rows that sample, [S, V]."""
        if self._index_S is not None:
            return values_RV.index_select(0, self._index_S)
        return values_RV[: len(self._sampled_S)]

    def tables(self, group: int, rows: Sequence[Row], row_T: Sequence[Row], position_T: Sequence[int]) -> GroupTables:
        """Blocks of ``rows`` in one group, and the slots of tokens anywhere in them."""
        row_R, rows_T, positions_T = self._put(*(np.asarray(ids, dtype=np.int64) for ids in (rows, row_T, position_T)))
        table_PB = self._table_GPB[group]
        slots_T = table_PB[rows_T, positions_T // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions_T % BLOCK_TOKENS
        return GroupTables(table_PB.index_select(0, row_R), slots_T)

    def note_sampled(self, rows: Sequence[Row], token_S: Tensor) -> None:
        """Remember the tokens just drawn, int64 [S] on the device, of the step that was built last."""
        assert len(rows) == len(self._sampled_S), "the rows of another step"
        self.last_token[self._sampled_S] = token_S

    def _groups(self, row_R: Tensor, row_T: Tensor, positions_T: Tensor, num_blocks: int) -> tuple[GroupTables, ...]:
        block_T, offset_T = positions_T // BLOCK_TOKENS, positions_T % BLOCK_TOKENS
        return tuple(
            GroupTables(
                block_table_RB=table_PB[:, :num_blocks].index_select(0, row_R),
                slots_T=table_PB[row_T, block_T].long() * BLOCK_TOKENS + offset_T,
            )
            for table_PB in self._table_GPB
        )

    def _put(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """The arrays as int64 tensors on the device, in one copy that the host does not wait for."""
        begins, end = [], 0
        for array in arrays:
            begins.append(end)
            end += _aligned(len(array))
        whole = np.zeros(end, dtype=np.int64)
        for begin, array in zip(begins, arrays, strict=True):
            whole[begin : begin + len(array)] = array
        sent = self._pinned(whole).to(self._device, non_blocking=True)
        return [sent[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=True)]

    def _pinned(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
