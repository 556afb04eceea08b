"""Decode steps on a CPU that the pool's workers compute while the host commits the step before and plans the next.

A step's program is three tapes: the staged numbers go to where the recording reads them, the recording runs, tokens
are drawn and noted for the step behind it. Two steps may be under way, so there are two stages for each number of
rows; programs run in order. Takes steps in which every row feeds one token and draws the next by its parameters alone:
what looks at logits or at tokens on the host (penalties, grammars, log-probabilities, drafts), or at the caches, waits
until they are finished.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from troth.contracts.plan import NO_SAMPLE, StepPlan
from troth.ops.all_finite import all_finite
from troth.ops.impl import cpu, cpu_steps
from troth.ops.sample import sample
from troth.run.batch import BatchBuilder
from troth.run.readback import NOT_FINITE
from troth.run.recorded import Recorded, RecordedDecode
from troth.run.sampler import Sampled, Sampler, StagedDraws
from troth.run.step_inputs import StepInputs

NUM_STAGES: Final = 2
"""Steps under way, at most: the one that is waited for and the one behind it."""
MOST_STAGED_BYTES: Final = 2**20
"""Of a stage: what one thread copies while the others wait, and a machine holds three times for each number of rows."""
_DRAWING_OPS: Final = 3
"""``all_finite``, ``sample`` and ``note``: with fewer, PyTorch computed one of them."""


class StartedTokens:
    """Tokens of a step that was started, as ``readback.Readback``; only the thread that started it may ask.

    Args:
        program: computes them.
        token_R: int64 [R]; the stage's own, read before the stage is used again.
        finite_R: bool [R]; the same.
    """

    def __init__(self, program: cpu.Program, token_R: Tensor, finite_R: Tensor) -> None:
        self._program = program
        self._token_R = token_R
        self._finite_R = finite_R
        self._tokens: list[int] | None = None

    @property
    def is_here(self) -> bool:
        """Whether reading waits for nothing."""
        return self._tokens is not None or self._program.is_finished

    def tokens(self) -> list[int]:
        """The tokens, or NOT_FINITE; takes part in computing them."""
        if self._tokens is None:
            self._program.finish()
            finite = self._finite_R.tolist()
            self._tokens = [
                token_id if is_finite else NOT_FINITE
                for token_id, is_finite in zip(self._token_R.tolist(), finite, strict=True)
            ]
        return self._tokens


@dataclass(slots=True)
class _Stage:
    """Where the host writes one step's numbers and draws, and where its tokens come."""

    inputs: StepInputs
    draws: StagedDraws
    tapes: tuple[cpu.Tape, ...]
    token_R: Tensor
    finite_R: Tensor
    started: StartedTokens | None = None
    """Of the step that used it last; read before another does."""


class StartedDecode:
    """Owns the stages, by numbers of rows. One thread uses it: that which made the recordings.

    Args:
        recorded: has the recordings.
        batches: stages the numbers, and has the rows' last tokens.
    """

    def __init__(self, recorded: RecordedDecode, batches: BatchBuilder) -> None:
        self._recorded = recorded
        self._batches = batches
        self._stages: dict[int, list[_Stage]] = {}
        self._refused: set[int] = set()
        """Numbers of rows that there can be no stages for."""
        self._last: cpu.Program | None = None
        """Started last; None: nothing is under way."""

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan's computing can be started and left alone. ``Sampler.draws_alone`` says it of its draws."""
        num_rows = len(plan.rows)
        if plan.num_decodes != num_rows or plan.saves or plan.restores or plan.recalls or num_rows in self._refused:
            return False
        recorded = self._recorded.of_rows(num_rows)
        return recorded is not None and not recorded.rows.recalls and NO_SAMPLE not in plan.sample_steps

    def prepare(self, num_rows: int) -> bool:
        """Make the stages of steps of so many rows that it takes, the first time; whether there are some now.

        There are none where code is called in the middle of such steps, where their logits are not drawn from by the
        recording ops, and where their block tables are too large to be copied for each.
        """
        if num_rows not in self._stages and num_rows not in self._refused:
            recorded = self._recorded.of_rows(num_rows)
            assert recorded is not None, "nobody takes these steps yet"
            self.finish_started()  # recording the draws makes them, on logits and tokens of whoever is under way
            made = [self._new_stage(num_rows, recorded) for _ in range(NUM_STAGES)]
            if None in made:
                self._refused.add(num_rows)
            else:
                self._stages[num_rows] = [stage for stage in made if stage is not None]
        return num_rows in self._stages

    def start(self, plan: StepPlan, sampler: Sampler) -> Sampled:
        """Start a followed plan that it takes and is prepared for, behind those that are under way.

        Waits for the step that used this stage before, NUM_STAGES starts of as many rows ago. The tokens' tensor is
        the stage's own memory, overwritten by a later start.
        """
        stages = self._stages[len(plan.rows)]
        stage = stages.pop(0)
        stages.append(stage)
        if stage.started is not None:
            stage.started.tokens()
        self._batches.stage(stage.inputs, plan)
        sampler.stage(stage.draws, plan)
        self._last = cpu.start_program(*stage.tapes)
        stage.started = StartedTokens(self._last, stage.token_R, stage.finite_R)
        return Sampled(stage.token_R, stage.started, {})

    def finish_started(self) -> None:
        """Wait for all that was started."""
        if self._last is not None:
            self._last.finish()
            self._last = None

    @torch.inference_mode()
    def _new_stage(self, num_rows: int, recorded: Recorded) -> _Stage | None:
        read, recording = recorded.inputs, recorded.recording
        if read is None or not isinstance(recording, cpu.Tape) or recording.whole is None:
            return None
        if read.memory.numel() > MOST_STAGED_BYTES:
            return None
        inputs = self._batches.new_inputs(num_rows)
        inputs.memory.copy_(read.memory)
        draws, last_token = StagedDraws(num_rows), self._batches.last_token
        kept = last_token.clone()  # recording an operation runs it, too
        with cpu.recording() as feed:
            token_ids, rows = torch.from_numpy(read.token_id_R), torch.from_numpy(read.row_R)
            cpu_steps.feed(inputs.memory, read.memory, token_ids, rows, last_token)
        with cpu.recording() as draw:
            logits_RV = recorded.kept.computed[0]
            finite_R = all_finite(logits_RV)
            token_R = sample(logits_RV, draws.draws)
            cpu_steps.note(token_R, torch.from_numpy(inputs.row_R), last_token)
        last_token.copy_(kept)
        if len(draw) != _DRAWING_OPS:
            return None
        return _Stage(inputs, draws, (feed, recording, draw), token_R, finite_R)
