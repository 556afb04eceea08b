"""What the scheduler tells the runner to compute in one step, and what the runner answers.

A plan is integers only, laid out as parallel lists (one entry per row that takes part) because a step may have
hundreds of rows and must cost microseconds each. Plans and results are plain data: they can be recorded, replayed
and compared. Neither is changed after it was handed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from troth.contracts.names import BlockId, CheckpointId, RequestId, Row
from troth.contracts.request import Request

ON_DEVICE: Final = -1
"""Token id of a plan entry whose value the host does not know yet: the row's last sampled token."""

DRAFTED: Final = -2
"""Token id of a draft that the runner makes itself, in the step that verifies it, with what the model has for it."""

NO_SAMPLE: Final = -1
"""Sample step of a row whose chunk ends before the last known token: nothing is sampled."""


@dataclass(slots=True)
class Admission:
    """A request that takes a row in this step, for the first time or again after preemption."""

    row: Row
    request: Request
    output_ids: list[int]
    """Tokens emitted before this admission (after preemption); feeds penalties."""
    num_cached_tokens: int
    """Prompt tokens whose state the prompt cache supplied; computing starts after them."""


@dataclass(slots=True)
class BlockUpdate:
    """Entries of one row's block table in one cache group, new or changed: table[first_index:][:len] = block_ids."""

    row: Row
    group: int
    first_index: int
    block_ids: list[BlockId]


@dataclass(slots=True)
class CheckpointCopy:
    """One row's recurrent state, over all recurrent layers, on its way to or from a checkpoint."""

    row: Row
    checkpoint_id: CheckpointId


@dataclass(slots=True)
class StepPlan:
    """One step: which tokens of which rows to feed.

    Rows come in running order: ``num_decodes`` rows that feed one output token each, ``num_verifies`` rows that feed
    one and the drafts after it, then prompt chunks. Row ``i`` feeds ``num_new[i]`` tokens at positions ``starts[i] ..
    starts[i] + num_new[i] - 1``; they are the next ``num_new[i]`` entries of ``token_ids``.
    """

    step_id: int
    rows: list[Row] = field(default_factory=list)
    request_ids: list[RequestId] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    num_draft: list[int] = field(default_factory=list)
    """How many of the row's new tokens, at their end, are drafts to verify."""
    sample_steps: list[int] = field(default_factory=list)
    """Index s of the output token sampled after the row's last non-draft token, the key of its noise; or NO_SAMPLE."""
    token_ids: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_verifies: int = 0
    admissions: list[Admission] = field(default_factory=list)
    releases: list[Row] = field(default_factory=list)
    """Rows given up before this step (finished, cancelled, preempted); applied before the admissions."""
    block_updates: list[BlockUpdate] = field(default_factory=list)
    restores: list[CheckpointCopy] = field(default_factory=list)
    """States that rows start from: checkpoint to row, before anything is computed."""
    recalls: dict[int, int] = field(default_factory=dict)
    """Plan index -> how many drafts of the row's last step were right: its recurrent states take them in before
    anything is computed. Of rows that are not named, none were, or all is taken in."""
    saves: list[CheckpointCopy] = field(default_factory=list)
    """States worth keeping: row to checkpoint, after the row's tokens are computed, drafts aside."""

    @property
    def num_tokens(self) -> int:
        """Tokens fed by the whole step."""
        return len(self.token_ids)

    @property
    def num_exact(self) -> int:
        """Tokens at the head of the step that continue answers, drafts included."""
        if not self.num_verifies:
            return self.num_decodes
        return self.num_decodes + sum(self.num_new[self.num_decodes : self.num_decodes + self.num_verifies])

    def drafts_of(self, index: int) -> list[int]:
        """The drafts that the plan's row ``index`` feeds; the step says which of them were right."""
        end = sum(self.num_new[: index + 1])
        return self.token_ids[end - self.num_draft[index] : end]


@dataclass(slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    """The most likely tokens, best first, as many as asked for."""


@dataclass(slots=True)
class StepResult:
    """What one step produced, row by row in the plan's order."""

    step_id: int
    token_ids: list[list[int]]
    """Per row: the accepted drafts and the token sampled after them; empty where nothing was sampled."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Plan index -> one entry per token of ``token_ids``, for rows that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Plan index -> entries for the prompt tokens after each position of the chunk, for rows that asked."""
    failures: dict[int, str] = field(default_factory=dict)
    """Plan index -> why this row alone failed (non-finite logits). Its state is invalid."""
    ends: list[int] = field(default_factory=list)
    """Plan indices of answers that their grammar completes with these tokens, or had completed before them."""
    dead_ends: dict[int, str] = field(default_factory=dict)
    """Plan index -> why the request's grammar lets no token follow. Nothing was sampled; the state is valid."""
