"""From a plan's integers to the tensors of one step, on the CPU. Keeps every row's block tables between steps.

Refuses to know other devices (``device_batch.py``).
Legend: R rows of the step, T tokens, B blocks per table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, Row
from troth.contracts.plan import ON_DEVICE, StepPlan
from troth.nn.batch import Batch, GroupTables
from troth.ops.rows import Rows, recall_tensor, refill_recalls
from troth.run.draws import drawn_tokens
from troth.run.step_inputs import StepInputs

_CPU: Final = torch.device("cpu")


class BatchBuilder:
    """Owns the persistent block tables and the last sampled token of each row.

    Args:
        groups: attention groups, in order.
        max_rows: rows of the persistent batch.
        context_tokens: longest request; sizes the tables.
    """

    table_GPB: None = None
    """The tables do not lie on a device of their own."""

    def __init__(self, groups: tuple[AttentionSpec, ...], max_rows: int, context_tokens: int) -> None:
        self._width = -(-context_tokens // BLOCK_TOKENS)
        self._tables = [np.full((max_rows, self._width), NO_BLOCK, dtype=np.int32) for _ in groups]
        self.last_token = torch.zeros(max_rows, dtype=torch.int64)
        """int64 [max_rows]: what ON_DEVICE entries of a plan stand for."""
        self._last_token = self.last_token.numpy()

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
            GroupTables(block_table_RB=_tensor(table[numbers.row_R, :blocks]), slots_T=_tensor(slots_T))
            for table, slots_T in zip(self._tables, numbers.slots, strict=True)
        )
        rows = Rows(
            num_new=plan.num_new,
            starts=plan.starts,
            rows=[int(row) for row in plan.rows],
            query_start_R1=_tensor(numbers.query_start_R1),
            context_len_R=_tensor(numbers.context_len_R),
            row_R=_tensor(numbers.row_R),
            max_new=max(plan.num_new),
            num_single=_leading_ones(plan.num_new),
            num_exact=plan.num_exact,
            num_verifies=plan.num_verifies,
            recalls=plan.recalls,
            recall_R=recall_tensor(plan.recalls, len(plan.rows), _CPU) if plan.recalls else None,
        )
        return Batch(
            token_ids_T=self._token_ids(plan, numbers.row_T),
            positions_T=_tensor(numbers.position_T),
            rows=rows,
            groups=groups,
            sample_S=_tensor(np.asarray(drawn_tokens(plan), dtype=np.int64)),
        )

    def build_whole(self, plan: StepPlan) -> Batch:
        """As ``build``, with tables of full width: a batch whose tensors can be refilled for any later context."""
        batch = self.build(plan)
        row_R = self._numbers(plan).row_R
        batch.rows.recall_R = recall_tensor(plan.recalls, len(plan.rows), _CPU)
        for group, table in zip(batch.groups, self._tables, strict=True):
            group.block_table_RB = _tensor(table[row_R])
        return batch

    def build_over(self, inputs: StepInputs, plan: StepPlan) -> Batch:
        """A batch of single tokens whose tensors are ``inputs``, filled by a followed plan; refill them for later ones.

        The plan draws behind every token.
        """
        batch = Batch(
            token_ids_T=torch.from_numpy(inputs.token_id_R),
            positions_T=torch.from_numpy(inputs.position_R),
            rows=inputs.rows(),
            groups=tuple(
                GroupTables(block_table_RB=torch.from_numpy(table_RB), slots_T=torch.from_numpy(slot_R))
                for table_RB, slot_R in zip(inputs.block_table_GRB, inputs.slot_GR, strict=True)
            ),
            sample_S=torch.arange(len(plan.rows)),
        )
        self.refill_over(batch, inputs, plan)
        return batch

    def new_inputs(self, num_rows: int) -> StepInputs:
        """Room for the numbers of steps of so many rows."""
        return StepInputs(num_rows, self._width, len(self._tables))

    def stage(self, inputs: StepInputs, plan: StepPlan) -> None:
        """Write a followed plan whose rows feed one token each; tokens that the host does not know stay ON_DEVICE."""
        rows, starts = np.asarray(plan.rows, dtype=np.int64), np.asarray(plan.starts, dtype=np.int64)
        inputs.token_id_R[:] = plan.token_ids
        inputs.position_R[:] = starts
        inputs.row_R[:] = rows
        np.add(starts, 1, out=inputs.context_len_R, casting="same_kind")
        blocks, offsets = np.divmod(starts, BLOCK_TOKENS)
        for table, block_table_RB, slot_R in zip(self._tables, inputs.block_table_GRB, inputs.slot_GR, strict=True):
            np.take(table, rows, axis=0, out=block_table_RB)
            slot_R[:] = table[rows, blocks] * BLOCK_TOKENS + offsets

    def refill_over(self, batch: Batch, inputs: StepInputs, plan: StepPlan) -> None:
        """Write another followed plan into a batch of ``build_over``. No step is under way."""
        self.stage(inputs, plan)
        if ON_DEVICE in plan.token_ids:
            known_R = self._last_token[inputs.row_R]
            np.copyto(inputs.token_id_R, known_R, where=inputs.token_id_R == ON_DEVICE)
        batch.rows.starts, batch.rows.rows = plan.starts, list(plan.rows)
        refill_recalls(batch.rows, plan.recalls)

    def refiller(self, batch: Batch) -> Callable[[StepPlan], None]:
        """What writes a followed plan into the tensors of a batch that ``build_whole`` made.

        The plan must feed as many tokens of each row as that one did, and draw behind all of them.
        """
        # Through numpy views made once: a step refills a dozen small tensors, with cold caches.
        new_R = np.asarray(batch.rows.num_new)
        index_T = np.repeat(np.arange(len(new_R)), new_R)
        offset_T = np.arange(len(index_T)) - (np.cumsum(new_R) - new_R)[index_T]
        positions, context_len = batch.positions_T.numpy(), batch.rows.context_len_R.numpy()
        row_ids = batch.rows.row_R.numpy()
        groups = [
            (table, group.block_table_RB.numpy(), group.slots_T.numpy())
            for group, table in zip(batch.groups, self._tables, strict=True)
        ]

        def refill(plan: StepPlan) -> None:
            rows, starts = np.asarray(plan.rows, dtype=np.int64), np.asarray(plan.starts, dtype=np.int64)
            row_T, position_T = rows[index_T], starts[index_T] + offset_T
            batch.token_ids_T.copy_(self._token_ids(plan, row_T))
            positions[:] = position_T
            batch.rows.starts, batch.rows.rows = plan.starts, list(plan.rows)
            refill_recalls(batch.rows, plan.recalls)
            context_len[:] = starts + new_R
            row_ids[:] = rows
            blocks, offsets = np.divmod(position_T, BLOCK_TOKENS)
            for table, block_table, slots in groups:
                np.take(table, rows, axis=0, out=block_table)
                slots[:] = table[row_T, blocks] * BLOCK_TOKENS + offsets

        return refill

    def tables(self, group: int, rows: Sequence[Row], row_T: Sequence[Row], position_T: Sequence[int]) -> GroupTables:
        """Blocks of ``rows`` in one group, and the slots of tokens anywhere in them."""
        table, position = self._tables[group], np.asarray(position_T)
        slots_T = table[np.asarray(row_T), position // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        return GroupTables(_tensor(table[np.asarray(rows)]), _tensor(slots_T + position % BLOCK_TOKENS))

    def note_sampled(self, rows: Sequence[Row], token_S: Tensor) -> None:
        """Remember the tokens just drawn, int64 [S], of these rows."""
        for row, token_id in zip(rows, token_S.tolist(), strict=True):
            self._last_token[row] = token_id

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
        token_ids_T = _tensor(ids)
        unknown = ids == ON_DEVICE
        if unknown.any():
            known_by_row = self.last_token[_tensor(row_T)]
            token_ids_T = torch.where(_tensor(unknown), known_by_row, token_ids_T)
        return token_ids_T


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


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _leading_ones(num_new: list[int]) -> int:
    count = 0
    for n in num_new:
        if n != 1:
            break
        count += 1
    return count
