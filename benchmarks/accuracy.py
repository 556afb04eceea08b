"""What formats of the KV cache and rounding inputs cost in accuracy: perplexity of a long text, error of its logits.

Everything is compared with the same weights as dense float32 numbers, multiplied by PyTorch, over a float32 cache. The
text is Python's own language reference as its help system ships it: the same on every machine with that Python. Every
window is read from its start, in chunks; each token but the first of a window is predicted.

Legend: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, get_args

import torch
from torch import Tensor

from benchmarks import lib
from troth import compose
from troth.cache.storage import CacheStorage
from troth.config.options import Inputs, KvDType, ModelOptions
from troth.config.resolve import ELEMENT_BYTES, SCALE_BYTES
from troth.contracts.cache_spec import attention_groups, with_scales
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import NO_SAMPLE, BlockUpdate, StepPlan
from troth.models.family import Model, Placement
from troth.models.registry import Recognised, recognise
from troth.ops import registry
from troth.ops.impl import cpu
from troth.ops.layer_kv import dtype_of
from troth.run.batch import BatchBuilder

TESTS = ("tests/cpu/test_op_attention.py", "tests/cpu/test_op_rotary_kv_write.py", "tests/cpu/test_kv_formats.py")
CPU: Final = torch.device("cpu")
CHUNK_TOKENS: Final = 256
REFERENCE: Final = ("torch",)
"""Op providers of the reference."""
WITHIN: Final = 0.005
"""How far a format's perplexity may lie from the reference's, relative."""


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", help="a folder or .gguf; default: the demo model")
    parser.add_argument("--text", type=Path, help="a file to read instead of Python's language reference")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--window", type=int, default=2048, help="tokens read together")
    parser.add_argument("--kv-dtypes", nargs="+", default=list(get_args(KvDType)), choices=get_args(KvDType))
    parser.add_argument("--inputs", choices=get_args(Inputs), help="what quantised layers round their inputs to")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    torch.set_num_threads(arguments.threads)
    artifact = compose.find(ModelOptions(model=arguments.model))
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else language_reference()
    ids = compose.load_text(artifact, ModelOptions()).tokenizer.encode(text)[: arguments.tokens]
    windows = [ids[at : at + arguments.window] for at in range(0, len(ids) - 1, arguments.window)]
    with torch.inference_mode():
        reference, scores = measure(recognise(artifact), windows, arguments)
    figures = {name: score.figures(reference) for name, score in scores.items()}
    show(reference, figures, len(ids))
    options = {
        "model": (artifact.gguf.path if artifact.gguf else artifact.root).name,
        "tokens": len(ids),
        "window": arguments.window,
        "inputs": arguments.inputs,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "kernels": cpu.description() if cpu.unavailable() is None else None,
    }
    result = lib.stamp(options) | {"reference_perplexity": reference.perplexity, "figures": figures}
    lib.finish("accuracy" + (f"-inputs-{arguments.inputs}" if arguments.inputs else ""), result, arguments)


def language_reference() -> str:
    """Topics of Python's help system, in order of their names."""
    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(slots=True)
class Score:
    """Sums over every predicted token."""

    num_tokens: int = 0
    loss: float = 0.0
    """Negative log-likelihood, nats."""
    squares: float = 0.0
    """Of differences of logits from the reference's."""
    num_logits: int = 0
    largest: float = 0.0
    num_same_best: int = 0

    def add(self, logits_TV: Tensor, wanted_TV: Tensor, next_T: Tensor) -> None:
        """Take in some positions: these logits, the reference's, and the tokens that followed."""
        self.num_tokens += len(next_T)
        self.loss += float(torch.nn.functional.cross_entropy(logits_TV, next_T, reduction="sum"))
        error_TV = logits_TV - wanted_TV
        self.squares += float(error_TV.square().sum(dtype=torch.float64))
        self.num_logits += error_TV.numel()
        self.largest = max(self.largest, float(error_TV.abs().max()))
        self.num_same_best += int((logits_TV.argmax(-1) == wanted_TV.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(self.loss / self.num_tokens)

    def figures(self, reference: Score) -> dict[str, float]:
        """What the JSON line holds."""
        return {
            "perplexity": self.perplexity,
            "perplexity_change": self.perplexity / reference.perplexity - 1,
            "logit_error_rms": math.sqrt(self.squares / self.num_logits),
            "logit_error_max": self.largest,
            "same_best_token": self.num_same_best / self.num_tokens,
        }


@dataclass(slots=True)
class Reader:
    """One model over one cache: reads a window in chunks and gives the logits of every position."""

    model: Model
    providers: tuple[str, ...] | None
    kv_dtype: str
    window_tokens: int
    _cache: CacheStorage = field(init=False)
    _batches: BatchBuilder = field(init=False)

    def __post_init__(self) -> None:
        plain = self.model.config.cache_specs(ELEMENT_BYTES[self.kv_dtype])
        groups = attention_groups(with_scales(plain, SCALE_BYTES.get(self.kv_dtype, 0)))
        blocks = -(-self.window_tokens // BLOCK_TOKENS)
        dtype = dtype_of(self.kv_dtype)
        self._cache = CacheStorage(plain, (blocks,) * len(groups), 1, dtype=dtype, device=CPU)
        self._batches = BatchBuilder(groups, 1, self.window_tokens)
        held = [BlockId(block) for block in range(blocks)]
        plan = StepPlan(0, block_updates=[BlockUpdate(Row(0), group, 0, held) for group in range(len(groups))])
        self._batches.follow(plan)

    def logits(self, chunk: Sequence[int], start: int) -> Tensor:
        """float32 [T, V] of the tokens at ``start`` .. of the window; what lies before has been read."""
        registry.activate(self.providers)
        plan = StepPlan(
            1,
            rows=[Row(0)],
            request_ids=[RequestId("window")],
            token_ids=list(chunk),
            starts=[start],
            num_new=[len(chunk)],
            num_draft=[0],
            sample_steps=[NO_SAMPLE],
        )
        hidden_TD = self.model.forward(self._batches.build(plan), self._cache)
        return self.model.logits(hidden_TD)


def measure(
    recognised: Recognised, windows: list[list[int]], arguments: argparse.Namespace
) -> tuple[Score, dict[str, Score]]:
    """The reference's score and that of each format."""
    place = Placement(device=CPU, dtype=torch.float32, context_tokens=arguments.window)
    registry.activate(REFERENCE)
    reference = Reader(recognised.load(place), REFERENCE, "float32", arguments.window)
    registry.activate()
    if cpu.unavailable() is None:
        cpu.start(arguments.threads)
    model = recognised.load(replace(place, inputs=arguments.inputs))
    readers = {name: Reader(model, None, name, arguments.window) for name in arguments.kv_dtypes}
    base, scores = Score(), {name: Score() for name in readers}
    for window, start in chunks(windows):
        chunk = window[start : start + CHUNK_TOKENS]
        next_T = torch.tensor(window[start + 1 : start + 1 + len(chunk)])
        wanted_TV = reference.logits(chunk, start)[: len(next_T)]
        base.add(wanted_TV, wanted_TV, next_T)
        for name, reader in readers.items():
            scores[name].add(reader.logits(chunk, start)[: len(next_T)], wanted_TV, next_T)
    return base, scores


def chunks(windows: list[list[int]]) -> Iterator[tuple[list[int], int]]:
    """Each window with where its next chunk starts; a last token alone predicts nothing."""
    for window in windows:
        for start in range(0, len(window) - 1, CHUNK_TOKENS):
            yield window, start


def show(reference: Score, figures: dict[str, dict[str, Any]], num_tokens: int) -> None:
    """Print the figures, a line for each format."""
    print(f"{num_tokens} tokens; perplexity of the float32 reference {reference.perplexity:.4f}")
    for name, figure in figures.items():
        within = "within" if abs(figure["perplexity_change"]) <= WITHIN else "BEYOND"
        print(
            f"KV {name:10} perplexity {figure['perplexity']:.4f} ({figure['perplexity_change']:+.4%}, {within} "
            f"{WITHIN:.1%})   logit error rms {figure['logit_error_rms']:.2e}, max {figure['logit_error_max']:.2e}   "
            f"same best token {figure['same_best_token']:.2%}"
        )


if __name__ == "__main__":
    main()
