"""A draft head's passes where the block tables lie on its device: a step's integers go there in one copy, the rest is
worked out there, by what is captured once and replayed.

One capture feeds the head the pairs that it lacks and makes the first drafts, another makes one more of those; rows and
pairs are padded. ``head_drafts.py`` decides what is lacking, ``head_passes.py`` does the same call by call.
Legend: R rows, M pairs that are lacking, N what is remembered of all rows, P rows of the persistent batch and one more
for padding, B blocks per table, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import UNFED_TOKENS
from troth.contracts.names import BLOCK_TOKENS, Row
from troth.contracts.speculation import MAX_DRAFTS
from troth.models.family import Model
from troth.nn.draft_head import LastPairs, Pairs
from troth.ops.copy_blocks import copy_blocks
from troth.ops.rows import Rows, unrelated
from troth.run.capture import Capture
from troth.run.graphs import row_counts
from troth.run.made_drafts import Draw, OpenDrafts
from troth.run.readback import to_device
from troth.run.recorded_passes import RecordedPasses

PAIRS_OF_A_ROW: Final = (2, 8)
"""Lacking pairs over rows that are captured: those of a step's accepted drafts, and of more."""


@dataclass(slots=True)
class _First:
    """What the first pass is made of, padding included."""

    ids_4R: Tensor
    """int64 [4, R]: rows, positions of the last known tokens, drafts that are wanted, the tokens themselves."""
    ids_2M: Tensor
    """int64 [2, M]: rows and positions of lacking pairs."""
    starts: list[int]
    """Tokens before each, on the host; providers that look at them cannot be replayed."""


@dataclass(slots=True)
class _Next:
    """What each further pass is made of."""

    ids_4R: Tensor
    """The same in all passes of a step."""
    depth: Tensor
    """int64 [1]: from 1."""
    token_R: Tensor
    """int64: of the rows that go on; those behind them write nowhere."""
    hidden_RD: Tensor
    starts: list[int]
    is_second: bool
    """Whether no pass of this step came before it but the first one."""


class HeadGraphs:
    """Owns the captures.

    Args:
        model: has a draft head.
        cache: its caches.
        table_PB: int32: blocks of the head's group, by row; kept up by its owner.
        remembered: int64 [N] tokens and float [N, D] hidden states of the rows' last UNFED_TOKENS tokens; kept up by
            their owner.
        capture: keeps passes to run again.
    """

    def __init__(
        self, model: Model, cache: CacheStorage, table_PB: Tensor, remembered: tuple[Tensor, Tensor], capture: Capture
    ) -> None:
        assert model.draft_head is not None, "the model has no draft head"
        self._model = model
        self._head = model.draft_head
        self._cache = cache
        self._table_PB = table_PB
        self._token_N, self._hidden_ND = remembered
        self._own = cache.own_blocks[cache.group_of[self._head.attention.layer]]
        self._device = table_PB.device
        self._pad_row = len(table_PB) - 1
        self._row_counts = row_counts(self._pad_row)
        self._depth = torch.arange(MAX_DRAFTS["mtp"], device=self._device)
        self._first = RecordedPasses(self._first_pass, _copied_first, _refill_first, capture)
        self._next = RecordedPasses(self._next_pass, _copied_next, _refill_next, capture)

    def run(
        self, wanted: Sequence[OpenDrafts], token_ids: Sequence[int], lacking: Sequence[tuple[Row, int]], draw: Draw
    ) -> list[Tensor] | None:
        """Feed the head what it lacks and make drafts.

        Args:
            wanted: those that want most come first.
            token_ids: their last known tokens.
            lacking: rows and positions of the tokens whose pairs are not in the cache, remembered all of them.
            draw: draws the drafts.

        Returns:
            By depth, int64, of the rows that want so many; None: there are too many lacking pairs, nothing was done.
        """
        rows = next(count for count in self._row_counts if count >= len(wanted))
        pairs = next((rows * each for each in PAIRS_OF_A_ROW if rows * each >= len(lacking)), None)
        if pairs is None:
            return None
        first = self._laid_out(wanted, token_ids, lacking, rows, pairs)
        hidden_RD, logits_RV = self._first.computed((rows, pairs), first)
        made = [draw(logits_RV[: len(wanted)], wanted, 0)]
        for depth in range(1, wanted[0].count):
            going = [one for one in wanted if one.count > depth]
            starts, at = [start + depth for start in first.starts], self._depth[depth : depth + 1]
            further = _Next(first.ids_4R, at, made[-1][: len(going)], hidden_RD, starts, depth == 1)
            hidden_RD, logits_RV = self._next.computed(rows, further)
            made.append(draw(logits_RV[: len(going)], going, depth))
        return made

    def _laid_out(
        self,
        wanted: Sequence[OpenDrafts],
        token_ids: Sequence[int],
        lacking: Sequence[tuple[Row, int]],
        rows: int,
        pairs: int,
    ) -> _First:
        whole = np.zeros(4 * rows + 2 * pairs, dtype=np.int64)
        ids_4R, ids_2M = whole[: 4 * rows].reshape(4, rows), whole[4 * rows :].reshape(2, pairs)
        ids_4R[0], ids_2M[0] = self._pad_row, self._pad_row
        ids_4R[:, : len(wanted)] = (
            [one.row for one in wanted],
            [one.position for one in wanted],
            [one.count for one in wanted],
            token_ids,
        )
        if lacking:
            ids_2M[:, : len(lacking)] = np.asarray(lacking).T
        sent = to_device(torch.from_numpy(whole), self._device)
        starts = [max(0, position - 1) for position in ids_4R[1].tolist()]
        return _First(sent[: 4 * rows].view(4, rows), sent[4 * rows :].view(2, pairs), starts)

    def _first_pass(self, first: _First) -> tuple[Tensor, Tensor]:
        row_R, position_R = first.ids_4R[:2]
        self._feed(*first.ids_2M)
        self._copy_first_blocks(row_R)
        hidden_RD = self._hidden_ND[_remembered(row_R, (position_R - 1).clamp_(min=0))]
        token_R = first.ids_4R[3].clone()  # at an address for which kernels are compiled
        return self._drafted(first.ids_4R, self._depth[:1], token_R, hidden_RD, first.starts)

    def _next_pass(self, further: _Next) -> tuple[Tensor, Tensor]:
        token_R = pad(further.token_R, (0, further.ids_4R.shape[1] - len(further.token_R)))
        return self._drafted(further.ids_4R, further.depth, token_R, further.hidden_RD, further.starts)

    def _feed(self, row_M: Tensor, position_M: Tensor) -> None:
        """Write what the head lacks. Position 0 has no pair: it stands for padding."""
        before_M = (position_M - 1).clamp_(min=0)
        slots_M = self._table_PB[row_M, position_M // BLOCK_TOKENS].long() * BLOCK_TOKENS + position_M % BLOCK_TOKENS
        pairs = Pairs(
            token_ids_T=self._token_N[_remembered(row_M, position_M)],
            hidden_TD=self._hidden_ND[_remembered(row_M, before_M)],
            positions_T=before_M,
            slots_T=torch.where(position_M > 0, slots_M, -1),
            rows=unrelated(len(row_M), self._device),
        )
        self._head.prime(pairs, self._cache)

    def _copy_first_blocks(self, row_R: Tensor) -> None:
        """Have the rows' own blocks begin like their first ones do; those of padding are the spare block."""
        first_R, own_R = self._table_PB[row_R, 0].long(), row_R + self._own
        copy_blocks(first_R, own_R, self._cache.kv[self._head.attention.layer])

    def _drafted(
        self, ids_4R: Tensor, depth: Tensor, token_R: Tensor, hidden_RD: Tensor, starts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, float [R, D], and logits, float32 [R, V], of one pass."""
        row_R, position_R, count_R, _ = ids_4R
        goes_on_R = count_R > depth
        at_R = torch.where(goes_on_R, position_R + depth, 0)
        own_R = row_R + self._own
        table_RB = self._table_PB.index_select(0, row_R)
        # A row's first block is read from its own one, so that is where what the head makes up must go, too.
        table_RB[:, 0] = own_R
        block_R = table_RB.gather(1, (at_R // BLOCK_TOKENS).unsqueeze(1)).squeeze(1).long()
        num_rows = len(row_R)
        pairs = LastPairs(
            token_ids_T=token_R,
            hidden_TD=hidden_RD,
            positions_T=(at_R - 1).clamp_(min=0),
            slots_T=torch.where(goes_on_R, block_R * BLOCK_TOKENS + at_R % BLOCK_TOKENS, -1),
            rows=Rows(
                num_new=[1] * num_rows,
                starts=starts,
                rows=[],
                query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32, device=self._device),
                context_len_R=at_R.int(),
                row_R=row_R,
                max_new=1,
                num_single=num_rows,
                num_exact=num_rows,
            ),
            own_slots_R=torch.where(goes_on_R, own_R * BLOCK_TOKENS, -1),
            block_table_RB=table_RB,
        )
        hidden_RD = self._head.draft(pairs, self._cache)
        return hidden_RD, self._model.logits(hidden_RD)


def _remembered(row_T: Tensor, position_T: Tensor) -> Tensor:
    """Where rows keep these places: index into N, int64 [T]."""
    return row_T * UNFED_TOKENS + position_T % UNFED_TOKENS


def _copied_first(first: _First) -> _First:
    return _First(first.ids_4R.clone(), first.ids_2M.clone(), list(first.starts))


def _refill_first(kept: _First, first: _First) -> None:
    kept.ids_4R.copy_(first.ids_4R)
    kept.ids_2M.copy_(first.ids_2M)
    kept.starts[:] = first.starts


def _copied_next(further: _Next) -> _Next:
    num_rows = further.ids_4R.shape[1]
    return _Next(
        ids_4R=further.ids_4R.clone(),
        depth=further.depth.clone(),
        token_R=pad(further.token_R, (0, num_rows - len(further.token_R))).clone(),
        hidden_RD=further.hidden_RD.clone(),
        starts=list(further.starts),
        is_second=further.is_second,
    )


def _refill_next(kept: _Next, further: _Next) -> None:
    if further.is_second:
        kept.ids_4R.copy_(further.ids_4R)
    kept.depth.copy_(further.depth)
    kept.token_R[: len(further.token_R)].copy_(further.token_R)
    kept.hidden_RD.copy_(further.hidden_RD)
    kept.starts[:] = further.starts
