"""Grammars over the tokens of one model: compiled once, then a session per request that says which tokens may come.

llguidance does the parsing and works on bytes; this file gives it the bytes of our own tokens and bounds what a
grammar may cost. Refuses to know tensors, rows and HTTP. Read next: ``grammar_schema.py`` (what a schema may hold),
``run/grammar.py`` (masks beside the forward pass).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from troth.contracts.grammar import Grammar
from troth.contracts.object_cache import ObjectCacheStatus
from troth.errors import RequestError
from troth.text.grammar_lark import choice_lark, read_lark
from troth.text.grammar_parts import GrammarPart, parts_of
from troth.text.grammar_schema import AnswerSchema, read_schema
from troth.text.grammar_session import GrammarSession, TokenVocabulary
from troth.text.grammar_start import GrammarStart, Matchers
from troth.text.object_cache import BoundedObjects
from troth.text.pattern_trial import suspects, takes_too_much

JSON_SPACE: Final = r" |\r?\n[ \t]{0,32}"
"""White space between the parts of JSON: one space, or one line end with its indentation. A model cannot dawdle."""
COMPILE_TIMEOUT_S: Final = 10.0
MAX_CACHED: Final = 64
"""Compiled grammars kept."""
GRAMMAR_BYTES: Final = 256 << 10
"""What one counts for: a few hundred kilobytes, which the compiler does not tell."""
MAX_LEXER_STATES: Final = 50_000
"""Of one compiled grammar, two thirds of a kilobyte each; hostile patterns make as many as there may be."""
_TERMINAL: Final = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
"""A regular expression in a Lark grammar; what lies between two quoted slashes, too, which is tried in vain."""
_STACK_BYTES: Final = 256 << 20
"""Address space, hardly touched. The compiler recurses: 10,000 chained references overflow the usual 8 MiB."""

Result = TypeVar("Result")


class GrammarTokens(Protocol):
    """What a grammar needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids below this may have a token."""

    @property
    def drops_first_space(self) -> bool:
        """Whether a space before the first word of an answer is not shown."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of a text."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of a token; a control token's are its own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether it is a control token."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over one vocabulary. Any number of sessions may start from it, in any thread."""

    not_enforced: tuple[str, ...]
    """Pointers of the schema's keywords that were left out."""
    _vocabulary: TokenVocabulary
    _start: GrammarStart

    @property
    def is_spent(self) -> bool:
        """Whether it must be compiled anew before another session starts."""
        return self._start.is_spent

    def session(self, eos_ids: frozenset[int], begins_after: str = "") -> GrammarSession:
        """A fresh session.

        Args:
            eos_ids: Ids that end the answer; they may come where the grammar is satisfied, and nowhere else.
            begins_after: Text in the output after which the grammar begins; empty: at once.
        """
        return GrammarSession(self._start, self._vocabulary, eos_ids, begins_after)


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the last ones. Safe to use from several threads.

    Args:
        tokenizer: whose tokens they are.
        vocab_size: logits of the model; ids from the tokenizer's own size on are never allowed.
    """

    def __init__(self, tokenizer: GrammarTokens, vocab_size: int) -> None:
        self._tokens = tokenizer
        self._vocab_size = vocab_size
        self._compiled = BoundedObjects(MAX_CACHED * GRAMMAR_BYTES)
        self._vocabulary: TokenVocabulary | None = None
        self._vocabulary_lock = threading.Lock()

    def status(self) -> ObjectCacheStatus:
        """Of what is kept."""
        return self._compiled.status()

    def compile(self, grammar: Grammar, *, continues_text: bool = False, param: str = "grammar") -> CompiledGrammar:
        """Compile a grammar, or find it compiled; those who ask for one at the same time wait for the first.

        Args:
            grammar: what to compile.
            continues_text: the answer goes on in the middle of a text: a space at its start counts.
            param: where it stands in the request, for errors.

        Raises:
            RequestError: it cannot be compiled, or allows no answer at all; the message says where.
        """
        takes_space = self._tokens.drops_first_space and not continues_text
        key = (grammar.kind, grammar.source, grammar.choices, grammar.strict, grammar.frame, takes_space)

        def make() -> tuple[CompiledGrammar, int]:
            return _in_a_roomy_thread(lambda: self._compile(grammar, takes_space, param), param), GRAMMAR_BYTES

        with self._compiled.take_or_make(key, make) as lease:
            compiled: CompiledGrammar = lease.value
        if compiled.is_spent:
            with self._compiled.put(key, *make()) as lease:
                compiled = lease.value
        return compiled

    def _compile(self, grammar: Grammar, takes_space: bool, param: str) -> CompiledGrammar:
        schema: AnswerSchema | None = None
        if grammar.kind == "json_schema":
            schema = read_schema(grammar.source, strict=grammar.strict, param=param)
        source = _source_of(grammar, schema, param)
        if grammar.frame:
            source = _framed(source, "answer", grammar.frame, param)
        parts = list(parts_of(grammar, schema, param))

        def make() -> Matchers:
            spaced = self._matcher(_framed(source, "spaced", _AFTER_SPACE, param)) if takes_space else None
            return Matchers(self._matcher(source), spaced)

        for part in parts:
            error = part.contradiction(self._schema_fault)
            if error is not None:
                raise error
        patterns = self._tried(grammar, parts, param)
        start = GrammarStart(lambda: _in_a_roomy_thread(make, param), _advice(patterns))
        for matcher in start.matchers.both:
            if matcher.is_error():
                raise self._refusal(parts, matcher, param)
        not_enforced = schema.not_enforced if schema is not None else ()
        compiled = CompiledGrammar(not_enforced, self._ready_vocabulary(), start)
        self._require_an_answer(compiled, param)
        return compiled

    def _tried(self, grammar: Grammar, parts: list[GrammarPart], param: str) -> list[tuple[str, str]]:
        """The largest patterns, each with its place. Raises RequestError for one that a text can make too much work."""
        if grammar.kind == "regex":
            own = suspects([("", grammar.source)])
            if own and self._takes_too_much(LLMatcher.grammar_from_regex(grammar.source), grammar.source):
                raise RequestError(f"{param}: {_advice(own)}", param=param, code="invalid_grammar")
            return own
        if grammar.kind == "lark":
            for _, pattern in suspects(("", pattern) for pattern in _TERMINAL.findall(grammar.source)):
                if self._takes_too_much(LLMatcher.grammar_from_regex(pattern), pattern):
                    raise RequestError(f"{param}: {_advice([('', pattern)])}", param=param, code="invalid_grammar")
        found = suspects(((part, pointer), pattern) for part in parts for pointer, pattern in part.schema.patterns())
        for (part, pointer), pattern in found:
            source = _schema_source({"type": "string", "pattern": pattern}, strict=True)
            if self._takes_too_much(source, pattern, '"'):
                raise part.refusal(pointer, _advice([("", pattern)]))
        return [(f"{part.param}{part.where} at {pointer}", pattern) for (part, pointer), pattern in found]

    def _takes_too_much(self, source: str, pattern: str, opening: str = "") -> bool:
        matcher = self._matcher(source)
        return not matcher.is_error() and takes_too_much(matcher, self._ready_vocabulary().matched, pattern, opening)

    def _require_an_answer(self, compiled: CompiledGrammar, param: str) -> None:
        """References that lead round in a circle, and sets that do not meet, compile: no token could ever come."""
        first = compiled.session(frozenset())
        first.mask()
        if first.fault is not None:
            raise RequestError(f"{param}: {first.fault}", param=param, code="invalid_grammar")

    def _matcher(self, source: str) -> LLMatcher:
        # Of the default limits, those of one step are lower: 200 ms of a hostile one would be every row's.
        limits = LLParserLimits(
            step_max_items=10_000, step_lexer_fuel=100_000, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        return LLMatcher(self._ready_vocabulary().matched, source, log_level=0, limits=limits)

    def _schema_fault(self, schema: Any, strict: bool) -> str | None:
        """Why a schema does not compile by itself, or None."""
        matcher = self._matcher(_schema_source(schema, strict=strict))
        return _sentence(matcher.get_error()) if matcher.is_error() else None

    def _refusal(self, parts: list[GrammarPart], failed: LLMatcher, param: str) -> RequestError:
        """The error for a grammar that does not compile: where a schema in it is at fault, by tool and pointer."""
        error = next(filter(None, (part.fault(self._schema_fault) for part in parts)), None)
        if error is not None:
            return error
        message = f"{param}: cannot be compiled: {_sentence(failed.get_error())}"
        return RequestError(message, param=param, code="invalid_grammar")

    def _ready_vocabulary(self) -> TokenVocabulary:
        """The tokens as llguidance holds them, made when the first grammar comes: 0.3 s for 50,000 tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                given: Any = _Vocabulary(self._tokens, self._vocab_size)
                given.matched = LLTokenizer(given, eos_token=self._vocab_size)
                self._vocabulary = TokenVocabulary(self._tokens, self._vocab_size, given.matched)
            return self._vocabulary


class _Vocabulary:
    """The attributes that llguidance reads of a tokenizer; the last token is one of our own, the grammar's end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: GrammarTokens, vocab_size: int) -> None:
        num_tokens = min(tokens.vocab_size, vocab_size)
        held = [tokens.token_bytes(token_id) for token_id in range(num_tokens)]
        self.tokens = [*held, *[b""] * (vocab_size - num_tokens), b"<|the end of the grammar|>"]
        self.special_token_ids = [token_id for token_id in range(num_tokens) if tokens.is_special(token_id)]
        self.special_token_ids.append(vocab_size)
        self.eos_token_id = vocab_size
        self.matched: LLTokenizer | None = None
        """What was made of it."""
        self._tokens = tokens

    def __call__(self, text: str) -> list[int]:
        """The usual spelling of a text in the middle of an answer, which forced tokens should have.

        Of a long text that of its beginning: it is asked for at every token on the way.
        """
        text = text[:_MAX_SPELLED_CHARACTERS]
        try:
            first = self._encode(_NO_START)
            ids = self._encode(_NO_START + text)[len(first) :]
        except RequestError:  # it spells a control token, which this vocabulary cannot do in ordinary ones
            ids = []
        if b"".join(map(self._tokens.token_bytes, ids)) == text.encode() or self.matched is None:
            return ids
        return self.matched.greedy_tokenize(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokens.encode(text, add_special=False, parse_special=False)


_MAX_SPELLED_CHARACTERS: Final = 512
_NO_START: Final = "\x02"
"""Before a text, where a tokenizer that puts a space before the first word puts it. Nothing merges with it."""


def _source_of(grammar: Grammar, schema: AnswerSchema | None, param: str) -> str:
    match grammar.kind:
        case "json_schema":
            assert schema is not None, grammar.kind
            return _schema_source(schema.schema, strict=grammar.strict)
        case "json_object":
            return _schema_source({"type": "object"}, strict=True)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_lark(choice_lark(grammar.choices))
        case "lark" | "calls":
            return LLMatcher.grammar_from_lark(read_lark(grammar.source, settings=_spelled, param=param))


def _schema_source(schema: Any, *, strict: bool) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_spelled(schema, strict)))


def _spelled(schema: Any, strict: bool) -> Any:
    """A schema with llguidance's settings for how its JSON is written, and whether all of it must be enforced."""
    settings = {"whitespace_pattern": JSON_SPACE, "lenient": not strict}
    return (
        {"x-guidance": settings, **schema} if isinstance(schema, dict) else {"x-guidance": settings, "allOf": [schema]}
    )


_AFTER_SPACE: Final = 'start: " " @spaced\n'


def _framed(source: str, name: str, frame: str, param: str) -> str:
    """A grammar inside another one, a Lark grammar that calls it by ``name``."""
    inner, *others = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    outer = {"lark_grammar": read_lark(frame, settings=_spelled, param=param)}
    return json.dumps({"grammars": [outer, {**inner, "name": name}, *others]})


def _advice(patterns: list[tuple[str, str]]) -> str:
    """What to do about a grammar that takes too much work."""
    if not patterns:
        return "make the grammar simpler"
    place, pattern = patterns[0]
    at = f" ({place[:200]})" if place else ""
    return (
        f"the pattern {pattern[:120]!r}{at} takes too much work to follow; write it with fewer repetitions that can "
        "match the same text"
    )


def _sentence(error: str) -> str:
    """An error of the compiler without its pictures of the source and of itself."""
    lines = error.partition("<state>")[0].partition("<backtrace>")[0].strip().splitlines() or ["no reason is known"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not causes:
        return lines[0][:300]
    # A regular expression is shown with a caret under the place: four columns in.
    shown = next((line for line in lines if line.strip(" ^") == "" and "^" in line), "")
    place = f"character {shown.index('^') - 4}: " if shown.startswith("    ") else ""
    return f"{place}{causes[0]}"[:300]


def _in_a_roomy_thread(work: Callable[[], Result], param: str) -> Result:
    """Run ``work`` with room for deep recursion, and not longer than COMPILE_TIMEOUT_S."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        # The edge of a thread: whatever fails belongs to who asked.
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="troth-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    try:
        return outcome.result(COMPILE_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(
            f"{param}: did not compile within {COMPILE_TIMEOUT_S:g} s; make it simpler",
            param=param,
            code="invalid_grammar",
        ) from None


_STACK_LOCK: Final = threading.Lock()
"""The size of the stack is a setting of the whole process."""
