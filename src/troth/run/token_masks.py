"""One row's masks, as the threads of ``grammar.py`` compute them: take tokens in, then say what may come next.

Refuses to know rows and steps. Whoever runs one of these on a session has it alone until it returns. ``num_logits``,
where it is given, is the number of logits of a row that lies in main memory; its masks come spread out.
Legend: V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from troth.contracts.plan import NO_SAMPLE
from troth.run.draws import confirmed
from troth.run.readback import NOT_FINITE, Readback
from troth.text.grammar_session import GrammarSession

_PENALTIES: Final = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)
"""float32 [256, 8]: what each bit of a byte adds to its token's logit."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """One mask: its bits, and where logits lie in main memory also what it adds to each: 0, or minus infinity.

    Spread out by the thread that computed it (12 us for 49,152 tokens), it is applied in one addition (13 us); the bits
    alone take ten times as long.
    """

    bits: bytes
    penalty_V: Tensor | None
    cost_s: float

    @property
    def is_nothing(self) -> bool:
        """Whether no token may come."""
        return self.bits == bytes(len(self.bits))


def next_mask(session: GrammarSession, num_logits: int | None) -> TokenMask | None:
    """The mask of the next draw; spread out where the number of logits is given."""
    begun = time.perf_counter()
    bits = session.mask()
    if bits is None:
        return None
    penalty_V = None
    if num_logits is not None:
        penalties = np.take(_PENALTIES, np.frombuffer(bits, np.uint8), axis=0)
        penalty_V = torch.from_numpy(penalties.reshape(-1)[:num_logits])
    return TokenMask(bits, penalty_V, time.perf_counter() - begun)


def begin(session: GrammarSession, output_ids: Sequence[int], num_logits: int | None) -> TokenMask | None:
    """Take output tokens in, and compute the mask behind them."""
    for token_id in output_ids:
        session.advance(token_id)
    return next_mask(session, num_logits)


def differs(session: GrammarSession, first: int, fed: Sequence[int], sample_step: int) -> bool:
    """Whether a plan feeds other output tokens, from the ``first`` on, than the session has taken in.

    A row that starts over feeds its output in parts: what the session has behind a part is no difference, unless the
    plan draws there, output token ``sample_step``: the answer was cut before its last tokens.
    """
    known = session.token_ids[first : first + len(fed)]
    return known != fed or session.num_tokens > sample_step != NO_SAMPLE


def resume(
    session: GrammarSession,
    under_way: Future[TokenMask | None],
    first: int,
    fed: Sequence[int],
    sample_step: int,
    num_logits: int | None,
) -> TokenMask | None:
    """Make the session follow a plan, see ``differs``, once the work under way is done: it was queued earlier."""
    mask = under_way.result()
    if not differs(session, first, fed, sample_step):
        return mask
    kept = session.token_ids[first:]
    same = 0
    while same < min(len(kept), len(fed)) and kept[same] == fed[same]:
        same += 1
    session.rollback(len(kept) - same)
    return begin(session, fed[same:], num_logits)


def look_ahead(
    session: GrammarSession, under_way: Future[TokenMask | None], drafts: Sequence[int], num_logits: int | None
) -> list[TokenMask | None]:
    """The masks behind each draft, up to the first that may not come or that nothing may follow."""
    allowed = under_way.result()
    ahead: list[TokenMask | None] = []
    fork = session.fork()
    for draft in drafts:
        if allowed is not None and not allowed.bits[draft >> 3] >> (draft & 7) & 1:
            break
        fork.advance(draft)
        allowed = next_mask(fork, num_logits)
        if allowed is not None and allowed.is_nothing:
            break
        ahead.append(allowed)
    return ahead


def advance_verified(
    session: GrammarSession,
    tokens: Readback,
    s: int,
    drafts: Sequence[int],
    complete: Future[bool],
    count: Future[int],
    num_logits: int | None,
) -> TokenMask | None:
    """As ``advance``, for a row with drafts: take in the draws that count, and tell how many do."""
    try:
        drawn = tokens.tokens()[s : s + 1 + len(drafts)]
        drawn = drawn[: confirmed(drawn, drafts)]
        num_taken = 0
        while num_taken < len(drawn) and drawn[num_taken] != NOT_FINITE and not session.is_complete:
            session.advance(drawn[num_taken])
            num_taken += 1
        complete.set_result(session.is_complete)
        count.set_result(num_taken)
    # The edge of a thread, as in ``advance``.
    except BaseException as error:
        for future in (complete, count):
            if not future.done():
                future.set_exception(error)
        raise
    return next_mask(session, num_logits)


def advance(
    session: GrammarSession, tokens: Readback, s: int, complete: Future[bool], num_logits: int | None
) -> TokenMask | None:
    """Take in a token that may still be on its way from the device; first tell whether the answer is complete."""
    try:
        token_id = tokens.tokens()[s]
        if token_id == NOT_FINITE:
            complete.set_result(False)
            return None
        session.advance(token_id)
        complete.set_result(session.is_complete)
    # The edge of a thread: the step's result must not wait for an answer for ever.
    except BaseException as error:
        complete.set_exception(error)
        raise
    return next_mask(session, num_logits)
