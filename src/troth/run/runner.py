"""Computes plans: one forward pass for the mixed batch, then one draw per sampled row.

Refuses to know about text, clients and queues. Reads ``run/batch.py`` for the tensors and ``run/sampler.py`` for the
draws. Legend: T tokens, S sampled positions, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.names import Row
from troth.contracts.plan import StepPlan, StepResult, TokenLogprobs
from troth.errors import DeviceError, DeviceLost, OutOfMemory
from troth.models.family import Model
from troth.nn.batch import Batch, GroupTables, Wanted
from troth.run.capture import Capture
from troth.run.draws import DrawPlaces, confirmed, draw_places, drawn_tokens
from troth.run.grammar import RowGrammars
from troth.run.head_drafts import HeadDrafts
from troth.run.made_drafts import MadeDrafts, Watch
from troth.run.model_drafts import ModelDrafts
from troth.run.readback import NOT_FINITE
from troth.run.sampler import Sampled, Sampler, token_logprobs
from troth.run.started import StartedDecode

_log = logging.getLogger(__name__)
R = TypeVar("R")
PROMPT_LOGITS_ROWS: Final = 64
"""Positions whose logits are held at once for prompt log-probabilities: 64 x 150k float32 are 38 MB."""


@dataclass(slots=True)
class _LaunchedStep:
    plan: StepPlan
    places: DrawPlaces
    sampled: Sampled | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def result(self) -> StepResult:
        """As contracts.ports.PendingStep."""
        return _device_errors(self._result)

    def _result(self) -> StepResult:
        result = StepResult(self.plan.step_id, [[] for _ in self.plan.rows], prompt_logprobs=self.prompt_logprobs)
        if self.sampled is None:
            return result
        places, token_ids, logprobs = self.places, self.sampled.tokens.tokens(), self.sampled.logprobs
        for s in places.firsts:
            i, end = places.indices[s], s + 1
            if token_ids[s] == NOT_FINITE:
                result.failures[i] = "the model's logits are not finite"
                continue
            if s in places.drafts:
                end = s + confirmed(token_ids[s:], places.drafts[s])
                if token_ids[end - 1] == NOT_FINITE:
                    end -= 1  # the next step comes upon it without drafts, and the row fails there
            result.token_ids[i] = token_ids[s:end]
            if s in logprobs:
                result.logprobs[i] = [logprobs[draw] for draw in range(s, end)]
        if self.sampled.grammar is not None:
            self.sampled.grammar.tell(result, places.indices)
        return result


class Batches(Protocol):
    """Turns plans into tensors and remembers what was sampled; ``batch.py`` and ``device_batch.py``."""

    last_token: Tensor
    """int64 [rows]: the last token drawn for each row."""

    @property
    def table_GPB(self) -> Tensor | None:
        """As run.made_drafts.Tables."""

    def follow(self, plan: StepPlan) -> None:
        """Apply a plan's changes to the block tables; once per plan, before its batch is built."""

    def build(self, plan: StepPlan) -> Batch:
        """A followed plan in fresh tensors."""

    def tables(self, group: int, rows: Sequence[Row], row_T: Sequence[Row], position_T: Sequence[int]) -> GroupTables:
        """Blocks of ``rows`` in one group, and the slots of tokens anywhere in them."""

    def note_sampled(self, rows: Sequence[Row], token_S: Tensor) -> None:
        """Remember the tokens, int64 [S], drawn for these rows in the step that was built last."""


class DecodeSteps(Protocol):
    """Computes steps of decodes alone in a faster way; ``recorded.py`` and ``graphs.py``."""

    refusal: str | None
    """Why it does not, in words; None while it does."""
    capture: Capture | None
    """Keeps other computing to run again; None: nothing does."""
    hidden_TD: Tensor | None
    """Final hidden states of every token of the step that ``logits`` computed last; overwritten by a later step."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """float32 [S, V] of the sampled rows of a followed plan; None when it is to be computed in the ordinary way.

        The tensor is overwritten by a later step.
        """


class ModelRunner:
    """A StepRunner over a model and its caches. One thread uses it.

    Args:
        model: computes.
        cache: its caches.
        batches: turns plans into tensors.
        recorded: computes decode steps; None: every step is computed call by call.
        checkpoints: where plans save recurrent states; None: no plan does.
        grammars: of the rows that have one; None: no request may.
        draft_model: drafts for the model, which has no draft head then; its layers are guests in ``cache``.
        started: computes decode steps while the host goes on; None: ``launch`` returns when a step is computed, or a
            device has it.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheStorage,
        batches: Batches,
        recorded: DecodeSteps | None = None,
        checkpoints: CheckpointStorage | None = None,
        grammars: RowGrammars | None = None,
        draft_model: Model | None = None,
        started: StartedDecode | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._batches = batches
        self._recorded = recorded
        self._checkpoints = checkpoints
        self._grammars = grammars
        self._started = started
        self._sampler = Sampler(grammars, batches.last_token)
        self._made: MadeDrafts | None = None
        capture = recorded.capture if recorded is not None else None
        if model.draft_head is not None:
            self._made = MadeDrafts(HeadDrafts(model, cache, batches, capture), self._sampler)
        elif draft_model is not None:
            proposer = ModelDrafts(draft_model, cache, batches, model.config.vocab_size, capture)
            self._made = MadeDrafts(proposer, self._sampler)

    @property
    def downgrades(self) -> tuple[str, ...]:
        """What this runner could not do the fast way, in words."""
        slow = (self._recorded.refusal,) if self._recorded is not None and self._recorded.refusal else ()
        return slow + ((self.made_drafts_failure,) if self.made_drafts_failure is not None else ())

    @property
    def made_drafts_failure(self) -> str | None:
        """Why the draft head or draft model makes no drafts any more; None: it does, or there is none."""
        return self._made.failure if self._made is not None else None

    def watch_drafts(self, watch: Watch) -> None:
        """Have somebody told the logits of drafts that are made in the step."""
        assert self._made is not None, "nothing makes drafts"
        self._made.watch = watch

    def starts(self, plan: StepPlan) -> bool:
        """As contracts.ports.StepRunner."""
        if self._started is None:
            return True
        if self._made is not None or plan.admissions:
            return False
        return self._sampler.draws_alone(plan) and self._started.takes(plan)

    def finish_started(self) -> None:
        """Wait for steps that use the caches while the host goes on. Devices order what they do themselves."""
        if self._started is not None:
            self._started.finish_started()

    def launch(self, plan: StepPlan) -> _LaunchedStep:
        """As contracts.ports.StepRunner."""
        return _device_errors(lambda: self._launch(plan))

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        if self._started is not None and self.starts(plan) and self._started.prepare(len(plan.rows)):
            self._batches.follow(plan)
            self._sampler.follow(plan)
            return _LaunchedStep(plan, draw_places(plan), self._started.start(plan, self._sampler), {})
        self.finish_started()
        self._batches.follow(plan)
        if self._made is not None:
            self._made.follow(plan)
            plan = self._made.fill(plan)
        self._sampler.follow(plan)
        if self._checkpoints is not None and plan.restores:
            self._checkpoints.restore(plan.restores)
        logits_SV = self._recorded.logits(plan) if self._recorded is not None else None
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if logits_SV is None:
            batch = self._batches.build(plan)
            drawn = drawn_tokens(plan)
            wants_all = any(self._sampler.prompt_logprobs_of(row) is not None for row in plan.rows)
            if (
                len(drawn) < plan.num_tokens
                and not wants_all
                and not (self._made is not None and self._made.reads_hidden)
            ):
                # A step that draws nothing keeps one position: no op takes none.
                index_S = batch.sample_S if drawn else torch.zeros_like(batch.positions_T[:1])
                batch.wanted = Wanted(index_S, sum(1 for token in drawn if token < plan.num_exact))
            hidden_TD = self._model.forward(batch, self._cache)
            self._save(plan)
            if self._made is not None:
                self._made.note(plan, hidden_TD)
            if wants_all:
                prompt_logprobs = self._prompt_logprobs(plan, hidden_TD)
            if drawn:
                logits_SV = self._model.logits(hidden_TD if batch.wanted is not None else hidden_TD[batch.sample_S])
        else:
            self._save(plan)
            if self._made is not None and self._recorded is not None and self._recorded.hidden_TD is not None:
                self._made.note(plan, self._recorded.hidden_TD)
        places = draw_places(plan)
        if not places.rows or logits_SV is None:
            return _LaunchedStep(plan, places, None, prompt_logprobs)
        sampled = self._sampler.draw(logits_SV, plan, places)
        self._batches.note_sampled(places.rows, sampled.token_S)
        return _LaunchedStep(plan, places, sampled, prompt_logprobs)

    def close(self) -> None:
        """Drop the weights and caches."""
        self.finish_started()
        self._started = None
        del self._model, self._cache, self._batches
        self._made = None
        self._recorded = self._checkpoints = None
        if self._grammars is not None:
            self._grammars.close()

    def _save(self, plan: StepPlan) -> None:
        if self._checkpoints is not None and plan.saves:
            self._checkpoints.save(plan.saves)

    def _prompt_logprobs(self, plan: StepPlan, hidden_TD: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow the chunk's positions, for rows that asked."""
        found: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for i, row in enumerate(plan.rows):
            start, count = plan.starts[i], plan.num_new[i]
            num_top = self._sampler.prompt_logprobs_of(row)
            prompt_ids = self._sampler.prompt_ids_of(row)
            last = min(start + count, len(prompt_ids) - 1)
            if num_top is not None and start < last:
                entries: list[TokenLogprobs] = []
                for begin in range(start, last, PROMPT_LOGITS_ROWS):
                    end = min(begin + PROMPT_LOGITS_ROWS, last)
                    hidden = hidden_TD[offset + begin - start : offset + end - start]
                    logprobs = self._model.logits(hidden).log_softmax(dim=-1)
                    entries += [
                        token_logprobs(logprobs[p - begin], prompt_ids[p + 1], num_top) for p in range(begin, end)
                    ]
                found[i] = entries
            offset += count
        return found


def _device_errors(run: Callable[[], R]) -> R:
    """Run part of a step; what the device or allocator raises becomes this package's own errors."""
    try:
        return run()
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        torch.cuda.empty_cache()
        raise OutOfMemory(f"a step did not fit: {error}", wanted_bytes=total - free, free_bytes=free) from error
    except MemoryError as error:
        raise OutOfMemory("a step did not fit into main memory", wanted_bytes=0, free_bytes=0) from error
    # The edge of a step: whatever fails in it, a bug of ours included, ends the rows that took part and no others.
    except Exception as error:
        _log.exception("a step failed")
        if _is_lost():
            raise DeviceLost(f"the device answers no more: {error}; start the engine anew") from error
        raise DeviceError(f"a step failed: {type(error).__name__}: {error}") from error


def _is_lost() -> bool:
    """Whether the GPU takes no more work in this process: some failures of a kernel are for good."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
