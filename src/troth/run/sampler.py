"""Sampling state of every row, and one step's draws and log-probabilities.

Refuses to know how a draw is made (``ops/sample.py``) or what a penalty does to a logit (``ops/penalise.py``).
Legend: S sampled positions, V vocabulary, N touched logits.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from troth.contracts.names import Row
from troth.contracts.plan import ON_DEVICE, Admission, StepPlan, TokenLogprobs
from troth.contracts.sampling import SamplingParams
from troth.ops.all_finite import all_finite
from troth.ops.penalise import Touched, penalise
from troth.ops.sample import Draws, as_int64, sample, step_key
from troth.run.draws import DrawPlaces, draw_places
from troth.run.grammar import GrammarStep, RowGrammars
from troth.run.readback import DrawnTokens, Readback, to_device


@dataclass(slots=True)
class _RowSampling:
    params: SamplingParams
    prompt_ids: tuple[int, ...]
    penalised_prompt: frozenset[int]
    """The prompt's tokens, when a repetition penalty looks at them."""
    bias: dict[int, float]
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token is in the output."""
    num_counted: int = 0
    """Output tokens in ``counts``, and the one that is awaited."""
    awaits_token: bool = False
    """Whether the last of them is still on the device."""
    drafts: Sequence[int] = ()
    """What was fed behind them last, to be verified: those that the next step does not feed again were right."""


@dataclass(slots=True)
class Sampled:
    """What one step drew, still on the device."""

    token_S: Tensor
    """int64 [S]."""
    tokens: DrawnTokens
    """The same, on their way to the host."""
    logprobs: dict[int, TokenLogprobs]
    """Index into S -> log-probabilities, for rows that asked."""
    grammar: GrammarStep | None = None
    """What grammars say about the draws; None: no row has one."""


class StagedDraws:
    """Parameters and keys of the draws of R rows that go on together, in tensors of main memory that stay in place.

    Args:
        num_rows: R.
    """

    def __init__(self, num_rows: int) -> None:
        self.draws = _parameters([SamplingParams(temperature=0.0)] * num_rows, torch.device("cpu"))
        """As of the last ``fill``; greedy before."""
        self.states: list[_RowSampling] = []
        """Whose parameters they are."""

    def fill(self, states: list[_RowSampling], steps: Sequence[int]) -> None:
        """Write how each row draws, and the key of its output token ``steps[i]``. No step under way reads them."""
        if len(states) != len(self.states) or any(map(operator.is_not, states, self.states)):
            self.states = states
            other = _parameters([state.params for state in states], torch.device("cpu"))
            for one in fields(Draws):
                value = getattr(other, one.name)
                if isinstance(value, Tensor):
                    getattr(self.draws, one.name).copy_(value)
            self.draws.all_greedy = other.all_greedy
        if not self.draws.all_greedy:
            keys = self.draws.key_R.numpy()
            keys[:] = [as_int64(step_key(state.params.seed, step)) for state, step in zip(states, steps, strict=True)]


class Sampler:
    """Owns parameters and token counts of the rows in the batch.

    Args:
        grammars: of the rows that have one; None: no row may.
        last_token: int64 [rows] on the device: what ON_DEVICE entries of a plan stand for; None: plans have none.
    """

    def __init__(self, grammars: RowGrammars | None = None, last_token: Tensor | None = None) -> None:
        self._rows: dict[Row, _RowSampling] = {}
        self._last_token = last_token
        self._grammars = grammars
        self._drawn: list[_RowSampling] = []
        """Whose parameters ``_draws`` holds."""
        self._draws: Draws | None = None
        self._greedy: dict[int, Draws] = {}
        """By number of rows: for guesses, several to a step."""

    def follow(self, plan: StepPlan) -> None:
        """Take in the rows a plan releases and admits, and count the output tokens it feeds."""
        if self._grammars is not None:
            self._grammars.follow(plan)
        for row in plan.releases:
            self._rows.pop(row, None)
        for admission in plan.admissions:
            self._rows[admission.row] = _new_row(admission)
        offset = 0
        for i, row in enumerate(plan.rows):
            state, count = self._rows[row], plan.num_new[i]
            if state.params.needs_history:
                if state.drafts:
                    _count_accepted(state, plan.starts[i])
                first = max(plan.starts[i], len(state.prompt_ids) + state.num_counted)
                end = offset + count - (plan.num_draft[i] if plan.num_verifies else 0)
                fed = plan.token_ids[offset + first - plan.starts[i] : end]
                state.drafts = plan.token_ids[end : offset + count]
                state.awaits_token = ON_DEVICE in fed
                state.counts.update(fed[:-1] if state.awaits_token else fed)
                state.num_counted += len(fed)
            offset += count

    def draws_alone(self, plan: StepPlan) -> bool:
        """Whether every row of a plan, followed or not, draws by its parameters alone: nobody looks at its logits, and
        they need no history.
        """
        for row in plan.rows:
            state = self._rows.get(row)
            if state is None or state.bias or state.params.needs_history or state.params.logprobs is not None:
                return False
        return self._grammars is None or not self._grammars.has_any(plan.rows)

    def stage(self, draws: StagedDraws, plan: StepPlan) -> None:
        """Write how the rows of a followed plan draw, each one token."""
        draws.fill([self._rows[row] for row in plan.rows], plan.sample_steps)

    def draw(self, logits_SV: Tensor, plan: StepPlan, places: DrawPlaces | None = None) -> Sampled:
        """Draw one token for each sampled row of the plan, and one behind each of its drafts.

        Args:
            logits_SV: float32, changed in place.
            plan: already followed.
            places: its draws.
        """
        places = places or draw_places(plan)
        states = [self._rows[row] for row in places.rows]
        sampled = list(zip(states, places.steps, strict=True))
        finite_S = all_finite(logits_SV)
        self._count_awaited(places.rows, states)
        touched = self._touched(states, logits_SV.device, places.drafts)
        if touched is not None:
            penalise(logits_SV, touched)
        grammar = self._grammars.mask(logits_SV, places) if self._grammars is not None else None
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        # The draw may scale its logits in place; log-probabilities are of the distribution before temperature.
        kept = {i: logits_SV[i].log_softmax(dim=-1) for i in wanted}
        token_S = sample(logits_SV, self._draws_of(sampled, logits_SV.device))
        logprobs = {i: token_logprobs(kept[i], int(token_S[i]), states[i].params.logprobs or 0) for i in wanted}
        tokens = Readback(token_S, finite_S)
        if self._grammars is not None and grammar is not None:
            self._grammars.advance(grammar, tokens, places)
        return Sampled(token_S, tokens, logprobs, grammar)

    def _count_awaited(self, rows: list[Row], states: list[_RowSampling]) -> None:
        """Count the tokens that a step was fed on the device, for rows that look at them: this waits for the device."""
        awaiting = [(row, state) for row, state in zip(rows, states, strict=True) if state.awaits_token]
        if not awaiting:
            return
        assert self._last_token is not None, "a plan feeds a token that nobody drew"
        tokens = self._last_token.tolist()
        for row, state in awaiting:
            state.counts[tokens[row]] += 1
            state.awaits_token = False

    def _draws_of(self, sampled: list[tuple[_RowSampling, int]], device: torch.device) -> Draws:
        """Parameters and keys of a step's draws. While the same rows go on, the keys alone are new."""
        same = len(sampled) == len(self._drawn) and all(
            state is drawn for (state, _), drawn in zip(sampled, self._drawn, strict=True)
        )
        if self._draws is None or not same:
            self._drawn = [state for state, _ in sampled]
            self._draws = _parameters([state.params for state in self._drawn], device)
        if not self._draws.all_greedy:
            keys = [as_int64(step_key(state.params.seed, step)) for state, step in sampled]
            self._draws.key_R = to_device(torch.tensor(keys, dtype=torch.int64), device)
        return self._draws

    def guess(self, logits_RV: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
        """Draw for drafts, int64 [R], with the noise that output token ``steps`` of the rows will be drawn with.

        Penalties, biases and grammars are left out: a guess need not be right.

        Args:
            logits_RV: float32, changed in place.
            rows: in the batch.
            steps: of each row.
        """
        params = [self._rows[row].params for row in rows]
        if all(one.is_greedy for one in params):
            greedy = self._greedy.get(len(params)) or _parameters(params, logits_RV.device)
            self._greedy[len(params)] = greedy
            return sample(logits_RV, greedy)
        draws = _parameters(params, logits_RV.device)
        keys = [as_int64(step_key(one.seed, step)) for one, step in zip(params, steps, strict=True)]
        draws.key_R = to_device(torch.tensor(keys, dtype=torch.int64), logits_RV.device)
        return sample(logits_RV, draws)

    def prompt_logprobs_of(self, row: Row) -> int | None:
        """How many alternatives the row wants beside each prompt token; None: it does not ask."""
        return self._rows[row].params.prompt_logprobs

    def prompt_ids_of(self, row: Row) -> tuple[int, ...]:
        """The row's prompt."""
        return self._rows[row].prompt_ids

    def _touched(
        self, states: list[_RowSampling], device: torch.device, drafts: Mapping[int, Sequence[int]]
    ) -> Touched | None:
        """Which logits change; behind a draft, the drafts up to it count as output."""
        counted: dict[int, Counter[int]] = {}
        for first, proposed in drafts.items():
            if states[first].params.needs_history:
                for count in range(1, len(proposed) + 1):
                    counted[first + count] = states[first].counts + Counter(proposed[:count])
        rows: list[int] = []
        tokens: list[int] = []
        repetition: list[float] = []
        subtract: list[float] = []
        for i, state in enumerate(states):
            params = state.params
            if not params.needs_history and not state.bias:
                continue
            counts = counted.get(i, state.counts) if counted else state.counts
            ids = counts.keys() | state.penalised_prompt | state.bias.keys()
            for token_id in ids:
                count = counts[token_id]
                seen = count > 0 or token_id in state.penalised_prompt
                rows.append(i)
                tokens.append(token_id)
                repetition.append(params.repetition_penalty if seen else 1.0)
                penalty = params.presence_penalty + params.frequency_penalty * count if count else 0.0
                subtract.append(penalty - state.bias.get(token_id, 0.0))
        if not rows:
            return None
        return Touched(*(to_device(torch.tensor(column), device) for column in (rows, tokens, repetition, subtract)))


def _count_accepted(state: _RowSampling, start: int) -> None:
    """Count the drafts before the position from which a row goes on: they were right."""
    num_accepted = max(0, start - len(state.prompt_ids) - state.num_counted)
    state.counts.update(state.drafts[:num_accepted])
    state.num_counted += num_accepted
    state.drafts = ()


def token_logprobs(logprobs_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The log-probability, rank and ``num_top`` best alternatives of one token under float32 [V] log-probabilities."""
    chosen = logprobs_V[token_id]
    rank = int((logprobs_V > chosen).sum()) + 1
    entry = TokenLogprobs(token_id, float(chosen), rank)
    if num_top:
        best = logprobs_V.topk(num_top)
        # A grammar may leave fewer: a token that cannot come has no log-probability.
        kept = int(best.values.isfinite().sum())
        entry.top_ids, entry.top_logprobs = best.indices.tolist()[:kept], best.values.tolist()[:kept]
    return entry


def _new_row(admission: Admission) -> _RowSampling:
    request = admission.request
    params = request.sampling
    return _RowSampling(
        params=params,
        prompt_ids=request.prompt_ids,
        penalised_prompt=frozenset(request.prompt_ids if params.repetition_penalty != 1.0 else ()),
        bias=dict(params.logit_bias),
        counts=Counter(admission.output_ids),
        num_counted=len(admission.output_ids),
    )


def _parameters(params: list[SamplingParams], device: torch.device) -> Draws:
    """Draws without their keys."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor([getattr(p, name) for p in params], dtype=dtype), device)

    temperatures = [0.0 if p.is_greedy else p.temperature for p in params]
    # In float32 a smaller one would be 0, and keep no token at all.
    masses = [max(p.top_p, torch.finfo(torch.float32).tiny) for p in params]
    return Draws(
        temperature_R=to_device(torch.tensor(temperatures, dtype=torch.float32), device),
        top_k_R=column("top_k", torch.int32),
        top_p_R=to_device(torch.tensor(masses, dtype=torch.float32), device),
        min_p_R=column("min_p", torch.float32),
        xtc_probability_R=column("xtc_probability", torch.float32),
        xtc_threshold_R=column("xtc_threshold", torch.float32),
        key_R=torch.zeros(len(params), dtype=torch.int64, device=device),
        all_greedy=all(p.is_greedy for p in params),
    )
