"""What grammars cost: a mask per token at the demo model's vocabulary, and their share of decode time on it.

Targets: under 1 ms per token; under 5 % of decode time, alone and with eight rows together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import troth
from benchmarks import lib
from benchmarks.engine.figures import prompt_ids
from troth import compose
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.grammar import Grammar
from troth.run.grammar import GrammarStep, RowGrammars
from troth.text.grammar import GrammarCompiler
from troth.text.tokenizer import Tokenizer

TESTS = ("tests/portable/test_grammar.py", "tests/cpu/test_grammar_rows.py")
TARGET_MASK_US, TARGET_SHARE = 1000.0, 0.05
ROWS = 8
NUM_TOKENS = 48

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["city", "country", "river"]},
        "population": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["lat", "lon"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "population", "tags", "place"],
    "additionalProperties": False,
}
VALUE = {
    "name": "Paris, the capital of France",
    "kind": "city",
    "population": 2102650,
    "tags": ["seine", "eiffel tower", "light", "Île-de-France"],
    "place": {"lat": 48.8566, "lon": 2.3522},
}
WORDS = "the quick brown fox jumps over the lazy dog and runs into the wide open fields of summer " * 4


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


CASES = {
    "schema": (Grammar(kind="json_schema", source=json.dumps(RECORD), strict=True), _text(VALUE)),
    "any object": (Grammar(kind="json_object"), _text({"text": WORDS, "more": VALUE})),
    "regular expression": (Grammar(kind="regex", source="([a-z]+ ){20,200}"), WORDS),
    "1,000 choices": (
        Grammar(kind="choice", choices=tuple(f"the choice number {i} of them" for i in range(1000))),
        "the choice number 777 of them",
    ),
}
LONG = Grammar(kind="json_schema", source=json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 1000}))


def main() -> None:
    """Measure and print."""
    arguments = lib.parser(__doc__).parse_args()
    lib.gate(TESTS, arguments)
    options = ModelOptions(context_tokens=512)
    tokenizer = compose.load_text(compose.find(options), options).tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    figures = {"vocabulary_s": lib.timed(lambda: compiler.compile(Grammar(kind="json_object")))}
    lib.line("first grammar, with vocabulary", figures["vocabulary_s"], "s")
    for name, (grammar, text) in CASES.items():
        compile_ms = lib.timed(partial(compiler.compile, grammar)) * 1e3
        costs = sorted(cost * 1e6 for _ in range(20) for cost in token_costs(compiler, tokenizer, grammar, text))
        figures |= {f"compile_ms_{name}": compile_ms, f"mask_us_{name}": median(costs)}
        figures[f"mask_p99_us_{name}"] = p99 = costs[int(len(costs) * 0.99)]
        lib.line(f"compile, {name}", compile_ms, "ms")
        lib.line(f"token, {name}", median(costs), "us", TARGET_MASK_US, (costs[0], p99))
    figures |= shares(options)
    lib.finish("grammar", lib.stamp({"vocab_size": tokenizer.vocab_size}) | {"figures": figures}, arguments)


def token_costs(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> Iterator[float]:
    """Seconds from a token to the mask of the next, for every token of an answer."""
    session = compiler.compile(grammar).session(tokenizer.eos_ids)
    session.mask()
    for token_id in tokenizer.encode(text, add_special=False, parse_special=False):
        begun = time.perf_counter()
        session.advance(token_id)
        session.mask()
        yield time.perf_counter() - begun
        assert session.fault is None, session.fault


def shares(options: ModelOptions) -> dict[str, float]:
    """The part of decode time that the engine's thread spends on grammars, waiting for masks included."""
    found: dict[str, float] = {}
    clock = _Stopwatch()
    clock.follow(RowGrammars, "mask")
    clock.follow(RowGrammars, "advance")
    clock.follow(GrammarStep, "tell")
    engine_options = EngineOptions(max_rows=ROWS, threads=1)
    with troth.Engine.open(model_options=options, engine_options=engine_options) as engine:
        for rows in (1, ROWS):
            values = [share(engine, rows, clock) for _ in range(6)][1:]
            found[f"share_{rows}_rows"] = median(values)
            percent = [100 * value for value in values]
            lib.line(f"share of decode time, {rows} rows", median(percent), "%", 100 * TARGET_SHARE, percent)
    return found


class _Stopwatch:
    """Seconds spent in methods that it follows."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def follow(self, owner: type, name: str) -> None:
        """Count what a method takes."""
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun

        setattr(owner, name, timed)


def share(engine: troth.Engine, rows: int, clock: _Stopwatch) -> float:
    """The part for ``rows`` answers together."""

    def one(_: int) -> float:
        ids = prompt_ids(16, engine.info.vocab_size)
        reply = engine.complete(ids, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, grammar=LONG)
        assert reply.usage.num_completion_tokens == NUM_TOKENS
        return reply.timings.decode_s

    clock.seconds = 0.0
    with ThreadPoolExecutor(rows) as pool:
        decode_s = max(pool.map(one, range(rows)))
    return clock.seconds / decode_s


if __name__ == "__main__":
    main()
