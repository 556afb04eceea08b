"""Really trained models: how to decode them greedily in a batch, how far they are from golden files.

Where they lie says ``model_files.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from tests.cpu.tiny_models import CPU, Session, worst
from tests.shared_data import shared
from troth.artifact.resolve import resolve
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import TokenLogprobs
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.models.family import Model
from troth.ops import registry
from troth.run.batch import BatchBuilder
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler, SchedulerLimits
from troth.weights.source import WeightSource

DECIDED = 0.5
"""Difference of the two best logits from which on another engine's rounding does not change the choice."""


def reference_of_gguf(path: Path, config: Any, *, zero_centred: bool = False) -> Any:
    """The reference implementation, float32, with the numbers a GGUF stands for. Its own reader takes a minute."""
    source = WeightSource(resolve(path))
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = {name: source.tensor(name) for name in model.state_dict() if name != "lm_head.weight"}
    for name in state:
        if zero_centred and "norm" in name:
            state[name] = state[name] - 1.0
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    source.finish()
    return model


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of every position, float32 [T, V]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


ROUNDED_WORST: Final = 0.03
"""How far a logit may lie from float32 arithmetic where inputs of quantised products are rounded to 16 bits."""
ROUNDED_RMS: Final = 0.004


@contextmanager
def exact_products() -> Iterator[None]:
    """Float32 arithmetic on the numbers of a file, whatever the processor's kernels do."""
    registry.activate(("torch",))
    try:
        yield
    finally:
        registry.activate()


def check_rounded(logits: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """The CPU's kernels against a reference in float32."""
    assert max(map(worst, logits, wanted)) < ROUNDED_WORST
    for got, want in zip(logits, wanted, strict=True):
        assert (got - want).square().mean().sqrt() < ROUNDED_RMS


def check_greedy(reference: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    """Each token is the reference's choice after the prompt and the tokens before it: it would have said the same."""
    logits_TV = reference_logits(reference, [*prompt_ids, *token_ids[:-1]])
    assert logits_TV[len(prompt_ids) - 1 :].argmax(dim=-1).tolist() == list(token_ids)


@dataclass
class Answer:
    """What came back for one prompt."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


def greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    eos_ids: frozenset[int] = frozenset(),
    max_rows: int = 4,
) -> list[Answer]:
    """Decode prompts greedily through the scheduler and the runner, as many at once as there are rows."""
    context = max(map(len, prompts)) + num_tokens
    specs = model.config.cache_specs(4)
    groups = attention_groups(specs)
    num_blocks = (max_rows * -(-context // BLOCK_TOKENS),) * len(groups)
    cache = CacheStorage(specs, num_blocks, max_rows, dtype=torch.float32, device=CPU)
    runner = ModelRunner(model, cache, BatchBuilder(groups, max_rows, context))
    limits = SchedulerLimits(
        groups=groups,
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_waiting=len(prompts),
        chunk_tokens=64,
        step_tokens=128,
        context_tokens=context,
    )
    scheduler = Scheduler(limits)
    answers = {RequestId(str(i)): Answer([], []) for i in range(len(prompts))}
    for (request_id, _), ids in zip(answers.items(), prompts, strict=True):
        sampling = SamplingParams(temperature=0.0, logprobs=5)
        request = Request(
            request_id=request_id, prompt_ids=tuple(ids), max_tokens=num_tokens, sampling=sampling, eos_ids=eos_ids
        )
        scheduler.add(request)
    while plan := scheduler.plan(0.0):
        for outcome in scheduler.commit(runner.launch(plan).result()):
            answers[outcome.request_id].token_ids += outcome.token_ids
            answers[outcome.request_id].logprobs += outcome.logprobs
    return list(answers.values())


class Golden:
    """One file of ``golden/``: another engine's greedy tokens and log-probabilities, and a model's own beside them."""

    def __init__(self, name: str) -> None:
        self.rows: list[dict[str, Any]] = json.loads(shared(f"golden/{name}.json").read_text())["rows"]
        self.prompts: list[list[int]] = [row["prompt_ids"] for row in self.rows]
        self.fed: list[list[int]] = [row["prompt_ids"] + row["greedy_ids"][:-1] for row in self.rows]
        """The prompt and the golden tokens, so that every golden token has logits of its own."""

    def logits(self, model: Model) -> list[Tensor]:
        """A model's logits at every position of ``fed``: the prompt in one chunk, the rest in another."""
        prompts = zip(self.fed, map(len, self.prompts), strict=True)
        return [Session(model).run(0, ids, length, len(ids) - length) for ids, length in prompts]

    def choices(self, logits: list[Tensor]) -> tuple[list[int], list[int]]:
        """The golden token and the model's, at every position where the golden engine was decided."""
        theirs: list[int] = []
        ours: list[int] = []
        for row, prompt, logits_TV in zip(self.rows, self.prompts, logits, strict=True):
            best = logits_TV[len(prompt) - 1 :].argmax(dim=-1).tolist()
            for token, choice, gap in zip(row["greedy_ids"], best, row["greedy_gap_to_second"], strict=True):
                if gap > DECIDED:
                    theirs.append(token)
                    ours.append(choice)
        return theirs, ours

    def mean_difference(self, logits: list[Tensor]) -> float:
        """Mean absolute difference of all listed log-probabilities."""
        differences: list[float] = []
        for row, prompt, logits_TV in zip(self.rows, self.prompts, logits, strict=True):
            logprobs = logits_TV[: len(prompt)].log_softmax(dim=-1)
            following = zip(prompt[1:], row["prompt_token_logprobs"], strict=True)
            differences += [float(logprobs[i, token]) - value for i, (token, value) in enumerate(following)]
            differences += [float(logprobs[-1, token]) - value for token, value in row["next_top10_logprobs"]]
        return sum(map(abs, differences)) / len(differences)
