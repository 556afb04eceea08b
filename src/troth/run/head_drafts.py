"""Drafts by the model's own head: keeps its keys and values in step with the model's, and makes drafts of them.

The head needs the hidden state of every token. A long chunk's are fed to it in the step that computed them; those of
answers wait here, row by row, until a draft is wanted or a block is full. So a block that others may use has the head's
part whenever it has the model's, whoever computed it, and any row may be drafted for at any time.
Refuses to know plans' open drafts (``made_drafts.py``). Next: ``head_passes.py`` and ``head_graphs.py``, which make
drafts call by call and captured, ``nn/draft_head.py``.
Legend: T tokens or pairs, R rows, M tokens remembered of all rows, N blocks, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import UNFED_TOKENS
from troth.contracts.names import BLOCK_TOKENS, Row
from troth.contracts.plan import ON_DEVICE, StepPlan
from troth.models.family import Model
from troth.nn.draft_head import Pairs
from troth.ops.rows import unrelated
from troth.run.capture import Capture
from troth.run.head_graphs import HeadGraphs
from troth.run.head_passes import HeadPasses
from troth.run.made_drafts import Draw, OpenDrafts, Tables
from troth.run.readback import to_device

Place = tuple[Row, int]
"""A row and a position in it."""
REMEMBERED: Final = UNFED_TOKENS
LONG: Final = REMEMBERED // 2
"""Tokens above which what a row is fed goes to the head at once."""


@dataclass(slots=True)
class _Fresh:
    """What a step fed and computed."""

    places: Sequence[Place]
    tokens: Sequence[int] | Tensor
    hidden_TD: Tensor


class HeadDrafts:
    """Owns the hidden states that the head was not fed yet. A Proposer.

    Args:
        model: has a draft head.
        cache: its caches, with the head's layer.
        tables: of the rows.
        capture: keeps passes to run again; None: none are kept.
    """

    name = "the draft head"
    reads_hidden = True

    def __init__(self, model: Model, cache: CacheStorage, tables: Tables, capture: Capture | None = None) -> None:
        assert model.draft_head is not None, "the model has no draft head"
        self._model = model
        self._head = model.draft_head
        self._cache = cache
        self._tables = tables
        self._group = cache.group_of[self._head.attention.layer]
        on_device = tables.table_GPB is not None
        self._passes = HeadPasses(model, cache, tables, None if on_device else capture)
        self._frontier_ND = cache.frontiers[self._group]
        self._device, width = self._frontier_ND.device, self._frontier_ND.shape[1]
        max_rows = len(tables.last_token)
        self._hidden_MD = torch.zeros(max_rows * REMEMBERED, width, dtype=self._head.dtype, device=self._device)
        self._token_M = torch.zeros(max_rows * REMEMBERED, dtype=torch.int64, device=self._device)
        self._graphs: HeadGraphs | None = None
        if tables.table_GPB is not None and capture is not None:
            remembered = self._token_M, self._hidden_MD
            self._graphs = HeadGraphs(model, cache, tables.table_GPB[self._group], remembered, capture)
        self._fresh: list[_Fresh] = []
        """Of steps that nobody has looked at yet, oldest first: what is stored together costs less."""
        self._num_primed: dict[Row, int] = {}
        """Tokens of each row whose pairs are in the cache."""

    # Keeping in step

    def follow(self, plan: StepPlan) -> None:
        """As Proposer."""
        if plan.admissions:
            self._store()  # before their rows are others'
        resumed: list[Place] = []
        for admission in plan.admissions:
            self._num_primed[admission.row] = admission.num_cached_tokens
            self._passes.admit(admission.row)
            if admission.num_cached_tokens:
                resumed.append((admission.row, admission.num_cached_tokens - 1))
        for row, start in zip(plan.rows, plan.starts, strict=True):
            self._num_primed[row] = min(self._num_primed[row], start)
            self._passes.follow(row, start)
        if resumed:
            self._hidden_MD[self._remembered(resumed)] = self._frontier_ND[self._blocks(resumed)].to(self._head.dtype)

    def note(self, plan: StepPlan, hidden_TD: Tensor) -> None:
        """As Proposer."""
        spans = list(zip(plan.rows, plan.starts, plan.num_new, strict=True))
        places = [(row, position) for row, start, count in spans for position in range(start, start + count)]
        edges = [t for t, (_, position) in enumerate(places) if position % BLOCK_TOKENS == BLOCK_TOKENS - 1]
        if not edges and max(plan.num_new) <= LONG and 0 not in plan.starts:
            tokens = self._fed(plan, places) if ON_DEVICE in plan.token_ids else plan.token_ids
            self._fresh.append(_Fresh(places, tokens, hidden_TD.clone()))
            return
        self._store()
        token_T = self._fed(plan, places)
        self._clear_first([(row, 0) for row, start, _ in spans if start == 0])
        self._prime_long(spans, token_T, hidden_TD)
        self._remember(spans, places, token_T, hidden_TD)
        if not edges:
            return
        block_E = self._blocks([places[t] for t in edges])
        self._frontier_ND[block_E] = hidden_TD[self._index(edges)].float()
        due: list[Place] = []
        for row, start, count in spans:
            if self._num_primed[row] < (start + count) // BLOCK_TOKENS * BLOCK_TOKENS:
                due += self._unprimed(row, start + count)
        if due:
            self._head.prime(self._pairs(due, *self._recall(due), num_exact=0), self._cache)

    def _fed(self, plan: StepPlan, places: Sequence[Place]) -> Tensor:
        token_T = to_device(torch.tensor(plan.token_ids, dtype=torch.int64), self._device)
        if ON_DEVICE in plan.token_ids:
            known_T = self._tables.last_token[self._index([row for row, _ in places])]
            token_T = torch.where(token_T == ON_DEVICE, known_T, token_T)
        return token_T

    def _clear_first(self, firsts: Sequence[Place]) -> None:
        """Slots without a pair hold zeros, not what their block's last user left there: blocks are kept and shared."""
        if firsts:
            rows = [row for row, _ in firsts]
            kv = self._cache.kv[self._head.attention.layer]
            num_kv_heads, head_dim, value_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2], kv.v_NKSD.shape[3]
            slots_R = self._tables.tables(self._group, rows[:1], rows, [0] * len(rows)).slots_T
            k_RKD = torch.zeros(len(rows), num_kv_heads, head_dim, device=self._device)
            kv.write(slots_R, k_RKD, k_RKD.new_zeros(len(rows), num_kv_heads, value_dim))

    def _prime_long(self, spans: Sequence[tuple[Row, int, int]], token_T: Tensor, hidden_TD: Tensor) -> None:
        """Feed the head what rows with long chunks were fed: their first pair with what is remembered of the row."""
        bridge, inside, index = list[Place](), list[Place](), list[int]()
        begin = 0
        for row, start, count in spans:
            if count > LONG:
                self._token_M[row * REMEMBERED + start % REMEMBERED] = token_T[begin]
                bridge += self._unprimed(row, start + 1)
                inside += [(row, position) for position in range(start + 1, start + count)]
                index += range(begin + 1, begin + count)
                self._num_primed[row] = start + count
            begin += count
        if not inside:
            return
        index_T = self._index(index)
        tokens, hidden = [token_T[index_T]], [hidden_TD[index_T - 1]]
        if bridge:
            bridge_T, bridge_TD = self._recall(bridge)
            tokens, hidden = [bridge_T, *tokens], [bridge_TD, *hidden]
        self._head.prime(self._pairs(bridge + inside, torch.cat(tokens), torch.cat(hidden), num_exact=0), self._cache)

    def _remember(
        self, spans: Sequence[tuple[Row, int, int]], places: Sequence[Place], token_T: Tensor, hidden_TD: Tensor
    ) -> None:
        """Keep what each row was fed; of a long chunk, its last."""
        if any(count > LONG for _, _, count in spans):
            ends = accumulate(count for _, _, count in spans)
            kept = [
                t for end, (_, _, count) in zip(ends, spans, strict=True) for t in range(end - min(count, LONG), end)
            ]
            index_T = self._index(kept)
            places, token_T, hidden_TD = [places[t] for t in kept], token_T[index_T], hidden_TD[index_T]
        self._put(places, token_T, hidden_TD)

    def _store(self) -> None:
        # One after the other: a later step may have fed what an earlier one did again.
        for one in self._fresh:
            token_T = one.tokens if isinstance(one.tokens, Tensor) else self._index(one.tokens)
            self._put(one.places, token_T, one.hidden_TD)
        self._fresh.clear()

    def _put(self, places: Sequence[Place], token_T: Tensor, hidden_TD: Tensor) -> None:
        at_T = self._remembered(places)
        self._token_M.index_copy_(0, at_T, token_T)
        self._hidden_MD.index_copy_(0, at_T, hidden_TD)

    def _unprimed(self, row: Row, end: int) -> list[Place]:
        """The tokens before ``end`` whose pairs are not in the cache, from now on they are. The first has no pair."""
        found = [(row, position) for position in range(max(1, self._num_primed[row]), end)]
        self._num_primed[row] = max(end, self._num_primed[row])
        return found

    # Drafting

    def propose(self, plan: StepPlan, wanted: Sequence[OpenDrafts], draw: Draw) -> list[Tensor]:
        """As Proposer."""
        self._store()
        missing = [place for one in wanted for place in self._unprimed(one.row, one.position)]
        if self._graphs is not None:
            last_ids = [plan.token_ids[one.at - 1] for one in wanted]
            made = self._graphs.run(wanted, last_ids, missing, draw)
            if made is not None:
                return made
        if missing:
            self._head.prime(self._pairs(missing, *self._recall(missing), num_exact=len(missing)), self._cache)
        token_R = self._index([plan.token_ids[one.at - 1] for one in wanted])
        hidden_RD = self._hidden_MD[self._remembered([(one.row, one.position - 1) for one in wanted])]
        return self._passes.run(wanted, token_R, hidden_RD, draw)

    # Tensors

    def _pairs(self, places: Sequence[Place], token_T: Tensor, hidden_TD: Tensor, *, num_exact: int) -> Pairs:
        rows, positions = [row for row, _ in places], [position for _, position in places]
        return Pairs(
            token_ids_T=token_T,
            hidden_TD=hidden_TD,
            positions_T=self._index([position - 1 for position in positions]),
            slots_T=self._tables.tables(self._group, rows[:1], rows, positions).slots_T,
            rows=unrelated(num_exact, self._device),
        )

    def _recall(self, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
        """Remembered tokens, int64 [T], and the hidden states of those before them, [T, D]."""
        before_T = self._remembered([(row, position - 1) for row, position in places])
        return self._token_M[self._remembered(places)], self._hidden_MD[before_T]

    def _remembered(self, places: Sequence[Place]) -> Tensor:
        """Where rows keep these places: index into M, int64 [T]."""
        return self._index([row * REMEMBERED + position % REMEMBERED for row, position in places])

    def _blocks(self, places: Sequence[Place]) -> Tensor:
        rows = [row for row, _ in places]
        slots_T = self._tables.tables(self._group, rows[:1], rows, [position for _, position in places]).slots_T
        return slots_T // BLOCK_TOKENS

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._device)
