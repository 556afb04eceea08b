"""A draft head's passes over one pair of each row: the first makes a draft of what is known, others one of a draft.

Where the op provider records, a pass is recorded once per number of rows (``recorded_passes.py``).
Refuses to know which pairs are known (``head_drafts.py``). Next: ``nn/draft_head.py``.
Legend: P passes, R rows, D model width, V vocabulary, B blocks per table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.names import BLOCK_TOKENS, Row
from troth.models.family import Model
from troth.nn.draft_head import LastPairs
from troth.ops.copy_blocks import copy_blocks
from troth.ops.rows import Rows
from troth.run.capture import Capture
from troth.run.made_drafts import Draw, OpenDrafts, Tables
from troth.run.readback import to_device
from troth.run.recorded_passes import RecordedPasses


class HeadPasses:
    """Owns the rows' own blocks in the head's layer, and the recordings.

    Args:
        model: has a draft head.
        cache: its caches.
        tables: of the rows.
        capture: keeps passes to run again; None: every pass is computed call by call.
    """

    def __init__(self, model: Model, cache: CacheStorage, tables: Tables, capture: Capture | None) -> None:
        assert model.draft_head is not None, "the model has no draft head"
        self._model = model
        self._head = model.draft_head
        self._cache = cache
        self._tables = tables
        self._group = cache.group_of[self._head.attention.layer]
        self._own = cache.own_blocks[self._group]
        self._device = cache.kv[self._head.attention.layer].k_NKDS.device
        self._num_copied: dict[Row, int] = {}
        """Pairs of each row's first block that its own block has."""
        self._recorded = RecordedPasses(self._pass, _copied, _refill, capture)

    def follow(self, row: Row, start: int) -> None:
        """A row goes on at ``start``: what its first block holds from there on is not what its own block has."""
        self._num_copied[row] = min(self._num_copied.get(row, 0), start)

    def admit(self, row: Row) -> None:
        """Another request has the row."""
        self._num_copied[row] = 0

    def run(self, wanted: Sequence[OpenDrafts], token_R: Tensor, hidden_RD: Tensor, draw: Draw) -> list[Tensor]:
        """Make drafts: by depth, int64, of the rows that want so many.

        Args:
            wanted: those that want most come first.
            token_R: int64 [R]: their last known tokens.
            hidden_RD: float [R, D]: hidden states of the tokens before those.
            draw: draws the drafts.
        """
        self._copy_first_blocks(wanted)
        passes = self._laid_out(wanted)
        made = list[Tensor]()
        for depth in range(wanted[0].count):
            going = [one for one in wanted if one.count > depth]
            pairs = passes(depth, going, token_R[: len(going)], hidden_RD[: len(going)])
            hidden_RD, logits_RV = self._recorded.computed(len(going), pairs)
            token_R = draw(logits_RV, going, depth)
            made.append(token_R)
        return made

    def _copy_first_blocks(self, wanted: Sequence[OpenDrafts]) -> None:
        """Have the rows' own blocks begin like their first ones do, as far as those are known."""
        missing = [one for one in wanted if self._num_copied[one.row] < min(BLOCK_TOKENS, one.position)]
        if not missing:
            return
        rows = [one.row for one in missing]
        first_R = self._tables.tables(self._group, rows, rows, [0] * len(rows)).slots_T // BLOCK_TOKENS
        own_R = self._index([self._own + row for row in rows])
        copy_blocks(first_R, own_R, self._cache.kv[self._head.attention.layer])
        for one in missing:
            self._num_copied[one.row] = min(BLOCK_TOKENS, one.position)

    def _laid_out(
        self, wanted: Sequence[OpenDrafts]
    ) -> Callable[[int, Sequence[OpenDrafts], Tensor, Tensor], LastPairs]:
        """Where the pairs of all passes go, worked out at once; what makes those of one pass."""
        rows, depths = [one.row for one in wanted], range(wanted[0].count)
        places = [(one.row, one.position + min(depth, one.count - 1)) for depth in depths for one in wanted]
        tables = self._tables.tables(self._group, rows, [row for row, _ in places], [at for _, at in places])
        # A row's first block is read from its own one, so that is where what the head makes up must go, too.
        in_own = [(self._own + row) * BLOCK_TOKENS + at if at < BLOCK_TOKENS else -1 for row, at in places]
        slots_PR = tables.slots_T
        if max(in_own) >= 0:
            own_T = self._index(in_own)
            slots_PR = torch.where(own_T >= 0, own_T, slots_PR)
        slots_PR = slots_PR.view(len(depths), len(rows))
        before_PR = self._index([at - 1 for _, at in places]).view(len(depths), len(rows))
        length_PR = (before_PR + 1).int()
        own_R = self._index([self._own + row for row in rows])
        num_blocks = max(at for _, at in places) // BLOCK_TOKENS + 1
        table_RB = tables.block_table_RB
        table_RB[:, 0] = own_R
        if not self._recorded.records:
            table_RB = table_RB[:, :num_blocks]
        start_R1 = torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device)

        def pairs(depth: int, going: Sequence[OpenDrafts], token_R: Tensor, hidden_RD: Tensor) -> LastPairs:
            count = len(going)
            return LastPairs(
                token_ids_T=token_R,
                hidden_TD=hidden_RD,
                positions_T=before_PR[depth, :count],
                slots_T=slots_PR[depth, :count],
                rows=Rows(
                    num_new=[1] * count,
                    starts=[one.position + depth - 1 for one in going],
                    rows=[one.row for one in going],
                    query_start_R1=start_R1[: count + 1],
                    context_len_R=length_PR[depth, :count],
                    row_R=own_R[:count] - self._own,
                    max_new=1,
                    num_single=count,
                    num_exact=count,
                ),
                own_slots_R=own_R[:count] * BLOCK_TOKENS,
                block_table_RB=table_RB[:count],
            )

        return pairs

    def _pass(self, pairs: LastPairs) -> tuple[Tensor, Tensor]:
        hidden_RD = self._head.draft(pairs, self._cache)
        return hidden_RD, self._model.logits(hidden_RD)

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)


def _tensors(pairs: LastPairs) -> tuple[Tensor, ...]:
    return (
        *(pairs.token_ids_T, pairs.hidden_TD, pairs.positions_T, pairs.slots_T, pairs.own_slots_R),
        *(pairs.block_table_RB, pairs.rows.context_len_R),
    )


def _refill(kept: LastPairs, pairs: LastPairs) -> None:
    for to, new in zip(_tensors(kept), _tensors(pairs), strict=True):
        to.copy_(new)
    kept.rows.starts[:] = pairs.rows.starts


def _copied(pairs: LastPairs) -> LastPairs:
    """The same in tensors of its own."""
    token_ids_T, hidden_TD, positions_T, slots_T, own_slots_R, table_RB, context_R = map(Tensor.clone, _tensors(pairs))
    rows = pairs.rows
    return LastPairs(
        token_ids_T=token_ids_T,
        hidden_TD=hidden_TD,
        positions_T=positions_T,
        slots_T=slots_T,
        rows=Rows(
            num_new=rows.num_new,
            starts=list(rows.starts),
            rows=rows.rows,
            query_start_R1=rows.query_start_R1.clone(),
            context_len_R=context_R,
            row_R=rows.row_R.clone(),
            max_new=1,
            num_single=rows.num_single,
            num_exact=rows.num_exact,
        ),
        own_slots_R=own_slots_R,
        block_table_RB=table_RB,
    )
