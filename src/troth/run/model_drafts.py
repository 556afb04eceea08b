"""Drafts by a second model: keeps its keys and values in step with the first one's, and makes drafts of what it says.

Both read the same tokens at the same positions, so the second model's keys and values lie in the slots of the first
one's (``AttentionSpec.guests``). Whatever fills a block for the first model fills it for the second, in the same step
and so in the same chunks; the tokens of a block that is not full wait here until it is, or a draft is wanted.
Refuses to know plans' open drafts (``made_drafts.py``). Legend: T tokens, R rows, M tokens remembered of all rows, V
vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from troth.cache.storage import CacheStorage
from troth.contracts.names import BLOCK_TOKENS, Row
from troth.contracts.plan import ON_DEVICE, StepPlan
from troth.models.family import Model
from troth.nn.batch import Batch, GroupTables, Wanted
from troth.ops.rows import Rows
from troth.run.capture import Capture
from troth.run.made_drafts import Draw, OpenDrafts, Tables
from troth.run.readback import to_device
from troth.run.recorded_passes import RecordedPasses

Span = tuple[Row, int, int]
"""A row, and the positions from the first to behind the last of its tokens."""
RECORDED_TOKENS: Final = 2
"""Most tokens of each row in a pass that is recorded: the last draft, which was right, and the token after it."""


class ModelDrafts:
    """Owns the tokens that the draft model was not fed yet. A Proposer.

    Args:
        model: drafts; all of its layers are attention.
        cache: of the model that is drafted for, with the draft model's layers as guests.
        tables: of the rows.
        vocab_size: logits of the model that is drafted for.
        capture: keeps passes to run again; None: none are kept.
    """

    name = "the draft model"
    reads_hidden = False

    def __init__(
        self, model: Model, cache: CacheStorage, tables: Tables, vocab_size: int, capture: Capture | None = None
    ) -> None:
        assert cache.guest_group is not None, "the cache has no guests"
        self._model = model
        self._cache = cache.guest_cache()
        self._tables = tables
        self._group = cache.guest_group
        self._vocab_size = vocab_size
        self._device = tables.last_token.device
        self._token_M = torch.zeros(len(tables.last_token) * BLOCK_TOKENS, dtype=torch.int64, device=self._device)
        self._num_fed: dict[Row, int] = {}
        """Tokens of each row whose keys and values are in the cache."""
        self._passes = RecordedPasses(self._pass, _copied, _refill, capture)

    # Keeping in step

    def follow(self, plan: StepPlan) -> None:
        """As Proposer."""
        for admission in plan.admissions:
            self._num_fed[admission.row] = admission.num_cached_tokens
        for row, start in zip(plan.rows, plan.starts, strict=True):
            self._num_fed[row] = min(self._num_fed[row], start)

    def note(self, plan: StepPlan, hidden_TD: Tensor) -> None:
        """As Proposer."""
        token_T = self._fed(plan)
        fed, first, kept, due = 0, dict[Row, tuple[int, int]](), list[int](), list[Span]()
        places: list[tuple[Row, int]] = []
        for row, start, count in zip(plan.rows, plan.starts, plan.num_new, strict=True):
            end = start + count
            if end // BLOCK_TOKENS * BLOCK_TOKENS > self._num_fed[row]:
                due.append((row, self._num_fed[row], end))
                self._num_fed[row] = end
            first[row] = (start, fed)
            keep = range(max(start, end - BLOCK_TOKENS), end)
            places += [(row, position) for position in keep]
            kept += [fed + position - start for position in keep]
            fed += count
        if due:
            self._feed(due, first, token_T)
        self._token_M[self._remembered(places)] = token_T[self._index(kept)]

    def _fed(self, plan: StepPlan) -> Tensor:
        token_T = self._index(plan.token_ids)
        if ON_DEVICE not in plan.token_ids:
            return token_T
        row_T = [row for row, count in zip(plan.rows, plan.num_new, strict=True) for _ in range(count)]
        return torch.where(token_T == ON_DEVICE, self._tables.last_token[self._index(row_T)], token_T)

    def _feed(self, due: Sequence[Span], first: Mapping[Row, tuple[int, int]], token_T: Tensor) -> None:
        """Write the keys and values of spans that end with what a step fed, and begin with what was remembered.

        Args:
            due: the spans.
            first: position of the first token that the step fed of a row, and its index.
            token_T: int64: what the step fed.
        """
        due, index = sorted(due, key=_is_long), list[int]()
        for row, start, end in due:
            begin, at = first[row]
            index += [row * BLOCK_TOKENS + position % BLOCK_TOKENS for position in range(start, begin)]
            fed = range(max(start, begin), end)  # what was drafted is fed already
            index += [len(self._token_M) + at + position - begin for position in fed]
        tokens_T = torch.cat([self._token_M, token_T])[self._index(index)]
        batch = self._batch(due, tokens_T, exact=False)
        batch.wanted = Wanted(batch.sample_S[:1], 0)
        self._model.forward(batch, self._cache)

    # Drafting

    def propose(self, plan: StepPlan, wanted: Sequence[OpenDrafts], draw: Draw) -> list[Tensor]:
        """As Proposer."""
        last_R = self._index([plan.token_ids[one.at - 1] for one in wanted])
        self._token_M[self._remembered([(one.row, one.position) for one in wanted])] = last_R
        spans = [(one.row, self._num_fed[one.row], one.position + 1) for one in wanted]
        # Rows of one token come first; draws want the rows that go on longest first.
        order = sorted(range(len(spans)), key=lambda r: _is_long(spans[r]))
        ordered = [spans[r] for r in order]
        places = [(row, position) for row, start, end in ordered for position in range(start, end)]
        logits_RV = self._logits(ordered, self._token_M[self._remembered(places)])
        if order != sorted(order):
            logits_RV = logits_RV[self._index(sorted(range(len(order)), key=order.__getitem__))]
        token_R = draw(logits_RV, wanted, 0)
        made = [token_R]
        for depth in range(1, wanted[0].count):
            going = [one for one in wanted if one.count > depth]
            spans = [(one.row, one.position + depth, one.position + depth + 1) for one in going]
            token_R = draw(self._logits(spans, token_R[: len(going)]), going, depth)
            made.append(token_R)
        for one in wanted:
            self._num_fed[one.row] = one.position + one.count
        return made

    def _logits(self, spans: Sequence[Span], token_T: Tensor) -> Tensor:
        """Feed spans; float32 [R, V] behind the last token of each, for the vocabulary of the other model."""
        batch = self._batch(spans, token_T, exact=True)
        if self._passes.records and batch.rows.max_new <= RECORDED_TOKENS:
            (logits_RV,) = self._passes.computed(tuple(batch.rows.num_new), batch)
            if batch.rows.max_new > 1:
                logits_RV = logits_RV[batch.sample_S]
        else:
            batch.wanted = Wanted(batch.sample_S, len(spans))
            (logits_RV,) = self._pass(batch)
        missing = self._vocab_size - logits_RV.shape[1]
        # Output layers are padded to round sizes: what lies behind the vocabulary is no token of either model.
        return pad(logits_RV, (0, missing), value=-torch.inf) if missing else logits_RV

    def _pass(self, batch: Batch) -> tuple[Tensor]:
        return (self._model.logits(self._model.forward(batch, self._cache)),)

    # Tensors

    def _batch(self, spans: Sequence[Span], token_T: Tensor, *, exact: bool) -> Batch:
        rows, num_new = [row for row, _, _ in spans], [end - start for _, start, end in spans]
        places = [(row, position) for row, start, end in spans for position in range(start, end)]
        tables = self._tables.tables(self._group, rows, [row for row, _ in places], [at for _, at in places])
        table_RB, behind = tables.block_table_RB, list(accumulate(num_new))
        if not self._passes.records:
            table_RB = table_RB[:, : -(-max(end for _, _, end in spans) // BLOCK_TOKENS)]
        return Batch(
            token_ids_T=token_T,
            positions_T=self._index([position for _, position in places]),
            rows=Rows(
                num_new=num_new,
                starts=[start for _, start, _ in spans],
                rows=[int(row) for row in rows],
                query_start_R1=self._index([0, *behind]).int(),
                context_len_R=self._index([end for _, _, end in spans]).int(),
                row_R=self._index(rows),
                max_new=max(num_new),
                num_single=num_new.count(1),
                num_exact=len(places) if exact else 0,
            ),
            groups=(GroupTables(table_RB, tables.slots_T),),
            sample_S=self._index([end - 1 for end in behind]),
        )

    def _remembered(self, places: Sequence[tuple[Row, int]]) -> Tensor:
        """Where rows keep these places: index into M, int64 [T]."""
        return self._index([row * BLOCK_TOKENS + position % BLOCK_TOKENS for row, position in places])

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)


def _is_long(span: Span) -> bool:
    return span[2] - span[1] != 1


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    (group,) = batch.groups
    rows = batch.rows
    return (
        *(batch.token_ids_T, batch.positions_T, group.block_table_RB, group.slots_T),
        *(rows.context_len_R, rows.row_R),
    )


def _refill(kept: Batch, batch: Batch) -> None:
    for to, new in zip(_tensors(kept), _tensors(batch), strict=True):
        to.copy_(new)
    kept.rows.starts, kept.rows.rows = batch.rows.starts, batch.rows.rows


def _copied(batch: Batch) -> Batch:
    """The same in tensors of its own."""
    token_ids_T, positions_T, table_RB, slots_T, context_R, row_R = map(Tensor.clone, _tensors(batch))
    rows = replace(batch.rows, context_len_R=context_R, row_R=row_R, starts=list(batch.rows.starts))
    return replace(
        batch,
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        rows=rows,
        groups=(GroupTables(table_RB, slots_T),),
    )
