"""From a plan's integers to the tensors of one step, where the caches are on another device than the plan.

Block tables live on that device and only their changes travel; a step's numbers travel in one copy from pinned memory,
behind which the host goes on. ``run/batch.py`` does the same on the CPU, with views instead of copies.
Legend: R rows of the step, T tokens, S sampled rows, B blocks per table, G cache groups, P rows of the persistent batch
and one more, which stands for padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepPlan
from troth.nn.batch import Batch, GroupTables
from troth.ops.rows import Rows, recall_tensor
from troth.run.answer_inputs import AnswerInputs, aligned
from troth.run.draws import drawn_tokens


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
        self._width = aligned(-(-context_tokens // BLOCK_TOKENS))
        self._device = device
        self._pad_row = max_rows
        self.table_GPB = torch.full(
            (len(groups), max_rows + 1, self._width), NO_BLOCK, dtype=torch.int32, device=device
        )
        """int32 [G, P, B]: blocks of every row, NO_BLOCK where nothing is held."""
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
            self.table_GPB.view(-1).index_copy_(0, places, block_ids.int())

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
        blocks = aligned(-(-int((starts_R + new_R).max()) // BLOCK_TOKENS))
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

    def answer_inputs(self, num_rows: int, num_tokens: int, width: int) -> AnswerInputs:
        """Fresh inputs of so many rows of up to ``width`` tokens, all padding."""
        return AnswerInputs(num_rows, num_tokens, width, self._pad_row, self._device)

    def fill(self, inputs: AnswerInputs, plan: StepPlan) -> None:
        """Write a followed plan, all of whose rows continue answers and fit, into inputs."""
        inputs.refill(self._pinned(inputs.filled(plan)))
        self._index_S, self._sampled_S = None, inputs.row_T[: plan.num_tokens]
        if NO_SAMPLE in plan.sample_steps:
            self._index_S, self._sampled_S = self._drawn(plan)

    def answer_batch(self, inputs: AnswerInputs, num_blocks: int) -> Batch:
        """The batch of inputs, by operations on the device alone, for contexts of at most ``num_blocks`` blocks.

        Padding has no context, and its keys go nowhere. Rows of one token are computed as rows with drafts are where
        others have some: both advance their states by that token.
        """
        count, is_single = inputs.num_rows, inputs.width == 1
        num_tokens = inputs.num_tokens
        on_device_T = self.last_token[inputs.row_T]
        return Batch(
            token_ids_T=torch.where(inputs.ids_T == ON_DEVICE, on_device_T, inputs.ids_T),
            positions_T=inputs.positions_T,
            rows=Rows(
                num_new=inputs.num_new,
                starts=inputs.starts,
                rows=[],
                query_start_R1=inputs.begin_R1.int(),
                context_len_R=inputs.context_R.int(),
                row_R=inputs.row_R,
                max_new=inputs.width,
                num_single=count if is_single else 0,
                num_exact=num_tokens,
                num_verifies=0 if is_single else count,
                recall_R=inputs.recall_R,
            ),
            groups=self._groups(inputs.row_R, inputs.row_T, inputs.positions_T, num_blocks),
            sample_S=torch.arange(num_tokens, device=self._device),
        )

    def sampled(self, values_TV: Tensor) -> Tensor:
        """Of values of every token of the inputs that were filled last, [T, V], those that are drawn from, [S, V]."""
        if self._index_S is not None:
            return values_TV.index_select(0, self._index_S)
        return values_TV[: len(self._sampled_S)]

    def tables(self, group: int, rows: Sequence[Row], row_T: Sequence[Row], position_T: Sequence[int]) -> GroupTables:
        """Blocks of ``rows`` in one group, and the slots of tokens anywhere in them."""
        row_R, rows_T, positions_T = self._put(*(np.asarray(ids, dtype=np.int64) for ids in (rows, row_T, position_T)))
        table_PB = self.table_GPB[group]
        slots_T = table_PB[rows_T, positions_T // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions_T % BLOCK_TOKENS
        return GroupTables(table_PB.index_select(0, row_R), slots_T)

    def note_sampled(self, rows: Sequence[Row], token_S: Tensor) -> None:
        """Remember the tokens just drawn, int64 [S] on the device, of the step that was built last."""
        assert len(rows) == len(self._sampled_S), "the rows of another step"
        self.last_token[self._sampled_S] = token_S

    def _drawn(self, plan: StepPlan) -> list[Tensor]:
        """Index of each token behind which is drawn, and its row, int64 [S]."""
        drawn = np.asarray(drawn_tokens(plan), dtype=np.int64)
        return self._put(drawn, np.repeat(np.asarray(plan.rows), plan.num_new)[drawn])

    def _groups(self, row_R: Tensor, row_T: Tensor, positions_T: Tensor, num_blocks: int) -> tuple[GroupTables, ...]:
        block_T, offset_T = positions_T // BLOCK_TOKENS, positions_T % BLOCK_TOKENS
        return tuple(
            GroupTables(
                block_table_RB=table_PB[:, :num_blocks].index_select(0, row_R),
                slots_T=table_PB[row_T, block_T].long() * BLOCK_TOKENS + offset_T,
            )
            for table_PB in self.table_GPB
        )

    def _put(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """The arrays as int64 tensors on the device, in one copy that the host does not wait for."""
        begins, end = [], 0
        for array in arrays:
            begins.append(end)
            end += aligned(len(array))
        whole = np.zeros(end, dtype=np.int64)
        for begin, array in zip(begins, arrays, strict=True):
            whole[begin : begin + len(array)] = array
        sent = self._pinned(whole).to(self._device, non_blocking=True)
        return [sent[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=True)]

    def _pinned(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
