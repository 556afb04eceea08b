"""What the scheduler knows about one request. Only ``scheduler.py`` changes it.

One truth, ``num_computed``, chases ``num_tokens``; prefill and decode only describe the gap between them.

    token_ids   [ prompt ............ | output known to the host ... ]
    in flight                                                        ( num_pending: sampled, not read yet )
    num_done    ----- confirmed by commit ----->|
    num_computed ---- planned, maybe in flight ------>|
                                                       <---- gap ---->
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from troth.contracts.names import NO_ROW
from troth.contracts.request import Request
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_node import PrefixNode
from troth.schedule.row_prefix import RowPrefix

NEVER: Final = 2**63
"""A number of tokens nobody reaches."""


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"
    """Ended for its consumer; one more feed completes its last cache block."""
    ENDED = "ended"


class RequestState:
    """Mutable bookkeeping of one request."""

    __slots__ = (
        "arrival",
        "epoch",
        "held",
        "last_step",
        "matched",
        "max_tokens",
        "num_cached",
        "num_computed",
        "num_done",
        "num_dropped",
        "num_pending",
        "num_prompt",
        "num_recalled",
        "prefix",
        "publish_at",
        "request",
        "request_id",
        "row",
        "status",
        "tables",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int, max_tokens: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.num_pending = 0
        self.num_dropped = 0
        """Samples of steps under way that do not count."""
        self.num_computed = 0
        self.num_done = 0
        self.num_cached = 0
        self.num_recalled = 0
        """Computed tokens at the end that recurrent states have not taken in: right drafts of the row's last step."""
        self.row = NO_ROW
        self.tables: list[BlockTable] = []
        self.prefix: RowPrefix | None = None
        """The row's dealings with the prompt cache; None without a row, or when the request is not to be cached."""
        self.publish_at: int = NEVER
        """Number of committed tokens from which on there is a block to publish."""
        self.matched: PrefixNode | None = None
        """How far the prompt cache agreed with the tokens when it was last asked."""
        self.status = Status.WAITING
        self.held = False
        self.last_step = -1
        self.epoch = 0
        """Counts losses of state; results planned in an older epoch say nothing about the cache."""

    @property
    def num_output(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.token_ids) - self.num_prompt + self.num_pending

    @property
    def gap(self) -> int:
        """Tokens known (or in flight) whose state is not computed yet."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Emitted tokens known to the host."""
        return self.token_ids[self.num_prompt :]

    @property
    def committed_ids(self) -> list[int]:
        """The tokens whose state the cache holds as valid: always a prefix of prompt + emitted."""
        return self.token_ids[: min(self.num_done, len(self.token_ids))]


def by_priority_then_arrival(state: RequestState) -> tuple[int, int]:
    """The scheduling policy: the smallest runs first, the largest is preempted first."""
    return (state.request.priority, state.arrival)
