"""A runner without a model: its "KV cache" holds token ids, its "logits" are a hash of what it reads back.

The next token of a row is a function of every token read through the row's block tables (for window groups,
of the last ``window`` ones). A wrong block table, a lost block or a block with two owners therefore changes
the answer, which makes this the strictest test a scheduler can get without tensors. With ``recurrent`` each row
also has a state, a hash of every token fed since position 0, which checkpoints save and restore; drafts are no part of
it before a plan recalls them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from troth.contracts.cache_spec import TRAIL_TOKENS, AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, BlockId, CheckpointId, Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepPlan, StepResult
from troth.contracts.request import Request
from troth.errors import DeviceError
from troth.schedule.reservations import Reservation


def expected_answer(
    request: Request,
    max_tokens: int,
    *,
    groups: tuple[AttentionSpec, ...],
    vocab_size: int = 1000,
    answer_length: Callable[[Request], int | None] = lambda request: None,
    recurrent: bool = False,
) -> list[int]:
    """What FakeRunner answers to ``request`` under any scheduler that is right."""
    tokens = list(request.prompt_ids)
    for step in range(max_tokens):
        seen = [tokens[max(0, len(tokens) - (spec.window or len(tokens))) :] for spec in groups]
        if recurrent:
            seen.append([_state_after(tokens)])
        token_id = _next_token(request, seen, step, vocab_size, answer_length(request))
        tokens.append(token_id)
        if token_id in request.eos_ids:
            break
    return tokens[len(request.prompt_ids) :]


@dataclass(slots=True)
class _FakeStep:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


class FakeRunner:
    """A StepRunner over integers.

    Args:
        groups: the scheduler's cache groups.
        num_blocks: their pool sizes.
        vocab_size: answers are below it.
        answer_length: tokens after which a request's answer ends with its lowest EOS id; None: never by
        itself.
        fail_step: step id that raises DeviceError on launch.
        recurrent: whether answers depend on a state per row, too.
    """

    def __init__(
        self,
        groups: tuple[AttentionSpec, ...],
        num_blocks: tuple[int, ...],
        *,
        vocab_size: int = 1000,
        answer_length: Callable[[Request], int | None] = lambda request: None,
        fail_step: int | None = None,
        recurrent: bool = False,
    ) -> None:
        self.groups = groups
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_tokens = 0
        self._answer_length = answer_length
        self._fail_step = fail_step
        self._slots = [[-1] * (count * BLOCK_TOKENS) for count in num_blocks]
        self._tables: dict[tuple[Row, int], list[BlockId]] = {}
        self._requests: dict[Row, Request] = {}
        self._last_token: dict[Row, int] = {}
        self._recurrent = recurrent
        self._states: dict[Row, tuple[int, int]] = {}
        """Row -> (tokens fed, hash of them), the drafts of its last step aside."""
        self._trails: dict[Row, list[int]] = {}
        """Row -> those drafts."""
        self._checkpoints: dict[CheckpointId, tuple[int, int]] = {}

    def starts(self, plan: StepPlan) -> bool:
        """As contracts.ports.StepRunner: like a device."""
        return True

    def launch(self, plan: StepPlan) -> _FakeStep:
        """Write the step's tokens, then read every sampled row's history back through its block tables."""
        if plan.step_id == self._fail_step:
            raise DeviceError(f"step {plan.step_id} was told to fail")
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self._apply(plan)
        answers: list[list[int]] = []
        offset = 0
        for i, row in enumerate(plan.rows):
            start, count = plan.starts[i], plan.num_new[i]
            token_ids = plan.token_ids[offset : offset + count]
            offset += count
            fed = [self._last_token[row] if t == ON_DEVICE else t for t in token_ids]
            for group in range(len(self.groups)):
                self._write(row, group, start, fed)
            if self._recurrent:
                self._recall(row, plan.recalls.get(i, 0))
                self._feed(row, start, fed, plan.num_draft[i])
            if plan.sample_steps[i] == NO_SAMPLE:
                answers.append([])
                continue
            answers.append(self._answer(row, start + count, plan.sample_steps[i], fed[count - plan.num_draft[i] :]))
            self._last_token[row] = answers[-1][-1]
        for copy in plan.saves:
            self._checkpoints[copy.checkpoint_id] = self._states[copy.row]
        return _FakeStep(StepResult(plan.step_id, answers))

    def _answer(self, row: Row, num_tokens: int, step: int, drafts: list[int]) -> list[int]:
        """The drafts that are what the row says anyway, and its next token."""
        request = self._requests[row]
        length, answer = self._answer_length(request), list[int]()
        for count, draft in enumerate([*drafts, None]):
            seen = [self._read(row, group, num_tokens - len(drafts) + count) for group in range(len(self.groups))]
            if self._recurrent:
                seen.append([_state_after(drafts[:count], self._states[row][1])])
            answer.append(_next_token(request, seen, step + count, self.vocab_size, length))
            if answer[-1] != draft:
                break
        return answer

    def fill(self, reservation: Reservation) -> None:
        """Fill reserved blocks with what their tokens would have left there."""
        token_ids = reservation.token_ids
        for fill in reservation.fills:
            for index, block_id in enumerate(fill.block_ids, fill.first_index):
                block = token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                self._slots[fill.group][block_id * BLOCK_TOKENS : (block_id + 1) * BLOCK_TOKENS] = block
        if reservation.checkpoint_id is not None:
            self._checkpoints[reservation.checkpoint_id] = (len(token_ids), _state_after(list(token_ids)))

    def close(self) -> None:
        """Nothing to give back."""

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.releases:
            self._requests.pop(row, None)
            for group in range(len(self.groups)):
                self._tables.pop((row, group), None)
        for admission in plan.admissions:
            self._requests[admission.row] = admission.request
        for update in plan.block_updates:
            table = self._tables.setdefault((update.row, update.group), [])
            first = update.first_index
            assert first <= len(table), f"table of row {update.row} has a gap at {len(table)}"
            table[first : first + len(update.block_ids)] = update.block_ids
        for copy in plan.restores:
            self._states[copy.row] = self._checkpoints[copy.checkpoint_id]

    def _recall(self, row: Row, count: int) -> None:
        drafts = self._trails.pop(row, [])
        assert count <= len(drafts), f"row {row} recalls {count} drafts of {len(drafts)}"
        if count:
            position, state = self._states[row]
            self._states[row] = (position + count, _state_after(drafts[:count], state))

    def _feed(self, row: Row, start: int, token_ids: list[int], num_drafts: int) -> None:
        position, state = self._states[row] if start else (0, 0)
        assert position == start, f"row {row} is fed position {start}, its state is after {position} tokens"
        assert num_drafts <= TRAIL_TOKENS, f"row {row} is fed {num_drafts} drafts"
        known, self._trails[row] = token_ids[: len(token_ids) - num_drafts], token_ids[len(token_ids) - num_drafts :]
        self._states[row] = (position + len(known), _state_after(known, state))

    def _write(self, row: Row, group: int, start: int, token_ids: list[int]) -> None:
        table = self._tables[row, group]
        for position, token_id in enumerate(token_ids, start):
            block_id = table[position // BLOCK_TOKENS]
            self._slots[group][block_id * BLOCK_TOKENS + position % BLOCK_TOKENS] = token_id

    def _read(self, row: Row, group: int, num_tokens: int) -> list[int]:
        table = self._tables[row, group]
        first = max(0, num_tokens - (self.groups[group].window or num_tokens))
        seen = []
        for position in range(first, num_tokens):
            block_id = table[position // BLOCK_TOKENS]
            assert block_id != NO_BLOCK, f"row {row} reads a block of group {group} that was never given"
            seen.append(self._slots[group][block_id * BLOCK_TOKENS + position % BLOCK_TOKENS])
        return seen


def _state_after(token_ids: list[int], state: int = 0) -> int:
    for token_id in token_ids:
        state = zlib.crc32(token_id.to_bytes(4, "little"), state)
    return state


def _next_token(request: Request, seen: list[list[int]], step: int, vocab_size: int, length: int | None) -> int:
    if length is not None and step + 1 >= length and request.eos_ids:
        return min(request.eos_ids)
    digest = zlib.crc32(repr((seen, request.sampling.seed, step)).encode())
    token_id = digest % vocab_size
    return token_id if token_id not in request.eos_ids else (token_id + 1) % vocab_size
