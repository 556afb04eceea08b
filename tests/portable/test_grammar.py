"""Grammars over tokens: what they accept and reject, with every kind of tokenizer, forwards and back."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.portable.vocabularies import UNHURRIED, byte_level, sentencepiece
from tests.shared_data import shared
from troth.contracts.grammar import MAX_CHOICE_BYTES, MAX_GRAMMAR_CHOICES, MAX_SOURCE_BYTES, Grammar
from troth.errors import RequestError
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from troth.text.grammar import MAX_CACHED, GrammarCompiler
from troth.text.grammar_schema import MAX_OPTIONAL, MAX_PROPERTIES
from troth.text.grammar_session import GrammarSession
from troth.text.tokenizer import Tokenizer

BYTES = ByteTokenizer()
COMPILER = GrammarCompiler(BYTES, BYTES.vocab_size)
EOS = frozenset({EOS_ID})
OBJECT = Grammar(kind="json_object")


def schema(value: Any, *, strict: bool = True) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value), strict=strict)


def session(grammar: Grammar, compiler: GrammarCompiler = COMPILER, eos_ids: frozenset[int] = EOS) -> GrammarSession:
    return compiler.compile(grammar).session(eos_ids, grammar.begins_after)


def allowed(mask: bytes | None, token_id: int) -> bool:
    assert mask is not None
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def allowed_ids(mask: bytes | None) -> set[int]:
    assert mask is not None
    return {token_id for token_id in range(8 * len(mask)) if allowed(mask, token_id)}


def feed(one: GrammarSession, token_ids: Iterable[int]) -> bool:
    """Whether the mask allowed each of the tokens in turn."""
    for token_id in token_ids:
        if not allowed(one.mask(), token_id):
            return False
        one.advance(token_id)
        assert one.fault is None
    return True


def accepts(grammar: Grammar, text: str, compiler: GrammarCompiler = COMPILER, encode: Any = BYTES.encode) -> bool:
    """Whether a whole text is an answer."""
    one = session(grammar, compiler, frozenset({min(BYTES.eos_ids)}))
    if not feed(one, encode(text)):
        return False
    mask = one.mask()
    assert one.fault is None
    return one.is_complete or allowed(mask, min(BYTES.eos_ids))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (OBJECT, ["{}", '{"a": [1, null]}', '{\n  "a": {}\n}'], ["", "[]", "{", '{"a"}', " {}", "{} ", '{"a":  1}']),
        (Grammar(kind="regex", source=r"\d{2,3}"), ["12", "123"], ["", "1", "1234", "12a", "ab"]),
        (Grammar(kind="regex", source='^a/[b/]"\n$'), ['a/b"\n', 'a//"\n'], ["a/b"]),
        (
            Grammar(kind="choice", choices=("a", "ab", 'q"\\\n', "日本")),
            ["a", "ab", 'q"\\\n', "日本"],
            ["b", "abc", "日"],
        ),
        (Grammar(kind="lark", source='start: "x" y+\ny: "y" | "z"\n'), ["xy", "xyzzy"], ["x", "y", "xa"]),
        (Grammar(kind="lark", source='start: "a" %json {"type": "integer"} "%json"\n'), ["a1%json"], ["ax%json", "a1"]),
    ],
    ids=["object", "regex", "anchored", "choice", "lark", "lark-json"],
)
def test_grammar_accepts_what_matches_and_nothing_else(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def is_written_otherwise(value: Any, schema_value: Any) -> bool:
    """Valid values a grammar does not write: 1.0 for an integer, keys in another order, text of no such format."""
    text = json.dumps(value)
    return bool(re.search(r"\d\.0", text)) or isinstance(value, dict) or "format" in json.dumps(schema_value)


def test_grammar_of_every_suite_schema_rejects_every_invalid_value() -> None:
    """Of a schema that is taken, nothing invalid is ever accepted; what is valid is, but for how it is written."""
    num_schemas = num_invalid = num_valid = 0
    for path in shared("schemas/json-schema-test-suite/draft2020-12").glob("*.json"):
        for group in json.loads(path.read_text()):
            grammar = schema(group["schema"])
            try:
                COMPILER.compile(grammar)
            except RequestError:
                continue
            num_schemas += 1
            for case in group["tests"]:
                taken = accepts(grammar, json.dumps(case["data"], ensure_ascii=False))
                name = f"{path.stem}: {group['description']}: {case['description']}"
                if not case["valid"]:
                    num_invalid += 1
                    assert not taken, name
                elif not is_written_otherwise(case["data"], group["schema"]):
                    num_valid += 1
                    assert taken, name
    assert num_schemas >= 150
    assert num_invalid >= 200
    assert num_valid >= 150


def test_grammar_of_shared_schemas_agrees_with_a_validator() -> None:
    """Rows of another decoder's tests; where it disagrees with the schema itself, the schema decides."""
    refused, num_texts = [], 0
    for line in shared("schemas/grammar_accept_reject.jsonl").read_text().splitlines():
        row = json.loads(line)
        grammar = schema(row["schema"])
        try:
            COMPILER.compile(grammar)
        except RequestError as error:
            refused.append((row["name"], error.code))
            continue
        for text in row["accept"]:
            assert accepts(grammar, text["text"]), (row["name"], text)
        for text in row["reject"]:
            if text["schema_valid"] is not True:
                assert not accepts(grammar, text["text"]), (row["name"], text)
        num_texts += len(row["accept"]) + len(row["reject"])
    # A list of schemas in items is draft 4; that items differ cannot be enforced.
    assert refused == [("exotic formats (list)", "invalid_schema"), ("required props", "unsupported_schema")]
    assert num_texts > 80


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=6)
"""A grammar writes delete (0x7F) as an escape alone."""
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@cache
def of_tokenizer(name: str) -> tuple[Tokenizer, GrammarCompiler]:
    """A tokenizer, and the compiler of a model with a few more logits than it has tokens."""
    tokenizer = TOKENIZERS[name]()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size + 5)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(value=st.dictionaries(st.text('ab é\\"\n', max_size=4), st.integers() | TEXTS, max_size=3))
@settings(deadline=None, max_examples=30)
def test_grammar_takes_any_spelling_in_tokens(name: str, value: dict[str, Any]) -> None:
    tokenizer, compiler = of_tokenizer(name)
    one = compiler.compile(OBJECT).session(tokenizer.eos_ids)
    for token_id in tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special=False, parse_special=False):
        mask = one.mask()
        assert not {i for i in allowed_ids(mask) if i >= tokenizer.vocab_size or tokenizer.is_special(i)}
        assert allowed(mask, token_id), tokenizer.token_bytes(token_id)
        one.advance(token_id)
    assert one.is_complete


def test_grammar_lets_a_space_precede_the_answer_where_the_tokenizer_drops_it() -> None:
    """Models with such a vocabulary begin every answer with a word mark, which nobody sees."""
    tokenizer = sentencepiece()
    assert tokenizer.drops_first_space
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = Grammar(kind="choice", choices=("hello", "world"))
    ids = tokenizer.encode("hello", add_special=False)
    assert tokenizer.token_bytes(ids[0]) == b" hello"
    assert feed(compiler.compile(grammar).session(frozenset()), ids)
    assert not feed(compiler.compile(grammar, continues_text=True).session(frozenset()), ids)


def test_session_lets_eos_come_only_where_the_grammar_is_satisfied() -> None:
    grammar = Grammar(kind="regex", source="a{2,3}")
    one = session(grammar)
    assert allowed_ids(one.mask()) == {ord("a")}
    one.advance(ord("a"))
    assert allowed_ids(one.mask()) == {ord("a")}
    one.advance(ord("a"))
    assert allowed_ids(one.mask()) == {ord("a"), EOS_ID}
    assert (one.is_accepting, one.is_complete) == (True, False)
    one.advance(EOS_ID)
    assert one.is_complete
    assert allowed_ids(one.mask()) == set()
    assert one.fault is None


def test_session_without_eos_goes_on_while_it_can_and_is_then_complete() -> None:
    one = session(Grammar(kind="regex", source="a{2,3}"), eos_ids=frozenset())
    assert feed(one, b"aa")
    assert allowed_ids(one.mask()) == {ord("a")}
    one.advance(ord("a"))
    assert allowed_ids(one.mask()) == set()
    assert one.is_complete


def test_session_takes_a_text_token_that_ends_answers_as_the_end_alone() -> None:
    """An id that the request calls an end may also be an ordinary token; in the middle it must not come."""
    one = session(Grammar(kind="regex", source="ab?b"), eos_ids=frozenset({ord("b")}))
    assert allowed_ids(one.mask()) == {ord("a")}
    one.advance(ord("a"))
    mask = one.mask()
    assert (allowed_ids(mask), one.is_complete) == (set(), False)
    assert one.fault is not None
    assert "after 1 token" in one.fault


def test_session_of_an_empty_answer_is_complete_before_any_token() -> None:
    one = session(Grammar(kind="regex", source="(?:)"), eos_ids=frozenset())
    assert allowed_ids(one.mask()) == set()
    assert one.is_complete
    assert one.fault is None


def test_session_keeps_a_token_that_is_not_allowed_as_a_fault() -> None:
    one = session(OBJECT)
    one.advance(ord("["))
    assert one.fault is not None
    assert "after 1 token" in one.fault
    assert (one.is_accepting, one.is_complete, one.forced_ids()) == (False, False, [])
    assert allowed_ids(one.mask()) == set()


def test_session_begins_after_its_marker_wherever_tokens_are_cut() -> None:
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = Grammar(kind="choice", choices=("he", "hello"), begins_after="</think>")
    for before in ("", "so </thin", "</think", "日本 <think> "):
        one = compiler.compile(grammar).session(tokenizer.eos_ids, grammar.begins_after)
        for token_id in tokenizer.encode(before + "</think>", add_special=False):
            assert not one.begun
            assert one.mask() is None
            one.advance(token_id)
        assert one.begun
        assert feed(one, tokenizer.encode("hello", add_special=False))
        assert one.is_complete


def test_session_takes_the_first_bytes_of_an_answer_from_the_token_of_its_marker() -> None:
    tokenizer = byte_level(added=[{"content": "</x>\n", "special": False}, {"content": "</x>he", "special": False}])
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = Grammar(kind="choice", choices=("hello",), begins_after="</x>")
    spaced, glued = (tokenizer.encode(text, add_special=False) for text in ("</x>\nhello", "</x>hello"))
    for ids in (spaced, glued):
        one = compiler.compile(grammar).session(tokenizer.eos_ids, grammar.begins_after)
        one.advance(ids[0])
        assert one.begun
        assert feed(one, ids[1:])
        assert one.is_complete


TEXT = '{"a": [1, {"b": "hello"}], "c": null}'


@UNHURRIED
@given(
    cuts=st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=6),
    marker=st.sampled_from(["", "<m>"]),
    end=st.booleans(),
)
def test_session_rolled_back_stands_where_it_stood(cuts: list[int], marker: str, end: bool) -> None:
    grammar = Grammar(kind="json_object", begins_after=marker)
    before = f"thinking {marker}" if marker else ""
    ids = BYTES.encode(before + TEXT) + [EOS_ID] * end
    one = session(grammar)
    for cut in cuts:
        for token_id in ids[one.num_tokens :]:
            one.advance(token_id)
        assert one.is_complete
        one.rollback(len(ids) - cut)
        fresh = session(grammar)
        for token_id in ids[:cut]:
            fresh.advance(token_id)
        assert one.num_tokens == cut
        assert one.mask() == fresh.mask()
        assert (one.begun, one.is_accepting, one.is_complete) == (fresh.begun, fresh.is_accepting, fresh.is_complete)


def test_session_proposes_the_tokens_that_must_come() -> None:
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = Grammar(kind="choice", choices=("hello world", "hello there"))
    one = compiler.compile(grammar).session(tokenizer.eos_ids)
    forced = one.forced_ids()
    assert forced
    assert b"hello there".startswith(b"".join(map(tokenizer.token_bytes, forced)))
    assert feed(one, forced)
    assert b"".join(map(tokenizer.token_bytes, one.forced_ids())) in (b"", b" ")


@given(draws=st.lists(st.integers(0, 10**9), min_size=40, max_size=40))
@settings(deadline=None, max_examples=60)
def test_session_led_by_any_choices_ends_in_json_that_matches(draws: list[int]) -> None:
    """Whatever a model would pick among the allowed tokens, the whole is JSON of the schema."""
    grammar = schema(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["x", "yy"]},
                "n": {"type": "integer", "minimum": -5, "maximum": 120},
                "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["kind", "n"],
            "additionalProperties": False,
        }
    )
    one, text = session(grammar), bytearray()
    for draw in [*draws, *draws, *draws]:
        if one.is_complete:
            break
        choices = sorted(allowed_ids(one.mask()) - {EOS_ID} - set(b" \n\r\t")) or [EOS_ID]
        token_id = choices[draw % len(choices)]
        one.advance(token_id)
        text += bytes([token_id]) if token_id != EOS_ID else b""
    assert one.is_complete
    value = json.loads(text)
    assert value["kind"] in ("x", "yy")
    assert -5 <= value["n"] <= 120
    assert set(value) <= {"kind", "n", "list"}
    assert all(isinstance(item, bool) for item in value.get("list", []))


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (Grammar(kind="regex", source="ab(c"), "character 2: unclosed group"),
        (Grammar(kind="regex", source="a(?=b)"), "look-around"),
        (Grammar(kind="lark", source="start: foo\n"), 'at 1(8): unknown name: "foo"'),
        (Grammar(kind="lark", source='start: "a"\nb: ((\n'), "2("),
        (Grammar(kind="lark", source="start: /a{1000000}/\n"), "a{1000000}"),
        (Grammar(kind="lark", source='start: "a"\nb: %json {"not": {}}\n'), "line 2: the schema at #/not:"),
        (Grammar(kind="lark", source='start: %json {"a"\n'), "line 1 is not JSON"),
        (Grammar(kind="lark", source='start: %json {\n"type":\n"object"} "b"\nc: d e (\n'), "4("),
        (Grammar(kind="lark", source="start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    ],
    ids=lambda value: None if isinstance(value, str) else value.source[:30],
)
def test_grammar_that_cannot_be_compiled_is_refused_by_its_place(grammar: Grammar, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(grammar, param="guided_grammar")
    assert caught.value.param == "guided_grammar"
    assert place in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", source="(a|aa)+b"),
        Grammar(kind="regex", source="((a{1,100}){1,100}){1,100}"),
        Grammar(kind="regex", source=".*a.{200}b"),
        schema({"type": "string", "allOf": [{"pattern": f"^(.*{c}.{{2{c}}}b)*$"} for c in "0123456789"]}),
        Grammar(kind="lark", source="start: a*\na: b*\nb: c*\nc: /[a-z]/*\n"),
        Grammar(kind="lark", source='start: s\ns: s s | s s s | "a" |\n'),
        Grammar(kind="lark", source="start: " + "|".join(f'"a{i}"' for i in range(3000)) + "\n"),
        Grammar(kind="lark", source="".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"\nstart: a0\n'),
        Grammar(kind="choice", choices=tuple(f"choice {i}" for i in range(MAX_GRAMMAR_CHOICES))),
    ],
    ids=lambda grammar: grammar.source[:30] or "choices",
)
def test_hostile_grammar_gives_masks_or_a_fault(grammar: Grammar) -> None:
    """Never an endless step, a crash, or a row without its constraint."""
    try:
        one = session(grammar)
    except RequestError:
        return
    for _ in range(30):
        choices = allowed_ids(one.mask())
        if one.fault is not None or one.is_complete:
            return
        one.advance(max(choices - EOS, default=EOS_ID))
    assert one.fault is None


def follow(one: GrammarSession, text: str) -> None:
    """Take a text in, with the mask before each byte, which must allow it."""
    for byte in text.encode():
        mask = one.mask()
        assert one.fault is None, one.fault
        assert allowed(mask, byte)
        one.advance(byte)


WINDOW = Grammar(kind="json_schema", source='{"type": "string", "pattern": "^(a|x)*x(a|x){30}$"}')
"""Every text leads to states that no other does."""


def test_session_goes_on_where_others_used_up_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some dozen answers of one pattern once filled its automaton; all later ones then ended where they began."""
    monkeypatch.setattr("troth.text.grammar.MAX_LEXER_STATES", 600)
    compiler, rng = GrammarCompiler(BYTES, BYTES.vocab_size), random.Random(0)
    for _ in range(8):
        one, other = session(WINDOW, compiler), session(WINDOW, compiler)
        text = '"' + "".join(rng.choices("ax", k=80))
        follow(one, text)
        twin = one.fork()
        one.rollback(30)
        follow(one, text[-30:])
        assert (one.mask(), one.token_ids) == (twin.mask(), twin.token_ids)
        assert not allowed(one.mask(), ord("b"))
        follow(other, text[:40])


def test_session_that_cannot_go_on_names_the_pattern_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troth.text.grammar.MAX_LEXER_STATES", 80)
    monkeypatch.setattr("troth.text.grammar.takes_too_much", lambda *trial: False)
    one = session(WINDOW, GrammarCompiler(BYTES, BYTES.vocab_size))
    text = '"' + "".join(random.Random(0).choices("ax", k=400))
    for byte in text.encode():
        mask = one.mask()
        if one.fault is not None:
            break
        assert allowed(mask, byte)
        one.advance(byte)
    assert one.fault is not None
    assert "the pattern '^(a|x)*x(a|x){30}$' (grammar at #/pattern) takes too much work" in one.fault
    assert "fewer repetitions" in one.fault
    assert (allowed_ids(one.mask()), one.is_complete, one.is_accepting, one.forced_ids()) == (set(), False, False, [])


def test_grammar_that_takes_long_to_compile_is_made_anew_before_the_next_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("troth.text.grammar.MAX_LEXER_STATES", 600)
    monkeypatch.setattr("troth.text.grammar_start.MAX_RENEWAL_S", -1.0)
    compiler, rng = GrammarCompiler(BYTES, BYTES.vocab_size), random.Random(0)
    first = compiler.compile(WINDOW)
    while not first.is_spent:
        one = first.session(EOS)
        for byte in ('"' + "".join(rng.choices("ax", k=80))).encode():
            one.mask()
            one.advance(byte)
    assert one.fault is not None
    assert "takes too much work" in one.fault
    again = compiler.compile(WINDOW)
    assert again is not first
    follow(again.session(EOS), '"axaxax')
    assert compiler.compile(WINDOW) is again


NESTED = "^(([a-z0-9]{1,10}[-_ ]?){1,20},?){1,10}$"


@pytest.mark.parametrize(
    ("grammar", "place", "code"),
    [
        (schema({"type": "string", "pattern": NESTED}), "field at #/pattern: ", "invalid_schema"),
        (schema({"items": {"pattern": NESTED}}, strict=False), "field at #/items/pattern: ", "invalid_schema"),
        (schema({"patternProperties": {NESTED: {}}}), "field at #/patternProperties/^", "invalid_schema"),
        (Grammar(kind="regex", source=NESTED.strip("^$")), "field: ", "invalid_grammar"),
    ],
    ids=["pattern", "loose", "names", "regex"],
)
def test_pattern_that_a_text_makes_too_much_work_is_refused_before_there_is_one(
    grammar: Grammar, place: str, code: str
) -> None:
    """It once ended the answer at a token in its midst."""
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(grammar, param="field")
    assert (caught.value.param, caught.value.code) == ("field", code)
    assert str(caught.value).startswith(place)
    assert NESTED.strip("^$") in str(caught.value)
    assert "takes too much work to follow; write it with fewer repetitions" in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[\w.+-]{1,64}@([\w-]{1,63}\.){1,8}[a-z]{2,24}$",
        r"^(https?://)?([\w-]+\.)+[a-z]{2,6}(/[\w./-]*)*/?$",
        r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        "^.{0,5000}$",
        r"^\p{L}{3,500}(?:ab|cd)+$",
        '^("|b)+[^\\s]{20}$',
    ],
)
def test_pattern_of_common_use_is_taken(pattern: str) -> None:
    assert session(schema({"type": "string", "pattern": pattern})).mask()


def test_session_inside_a_long_constant_proposes_its_next_tokens_alone() -> None:
    """The whole rest was once spelled at each of its tokens: a third of a second for 200,000 characters."""
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    one = compiler.compile(Grammar(kind="choice", choices=("hello " * 2000,))).session(tokenizer.eos_ids)
    forced = one.forced_ids()
    assert 20 < len(forced) <= 512
    assert ("hello " * 2000).startswith(b"".join(map(tokenizer.token_bytes, forced)).decode())
    assert feed(one, forced)
    assert one.forced_ids()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "yaml"},
        {"kind": "regex"},
        {"kind": "regex", "source": 5},
        {"kind": "regex", "source": "a" * (MAX_SOURCE_BYTES["regex"] + 1)},
        {"kind": "lark", "source": "a" * (MAX_SOURCE_BYTES["lark"] + 1)},
        {"kind": "json_object", "source": "{}"},
        {"kind": "json_schema", "source": "{}" + " " * MAX_SOURCE_BYTES["json_schema"]},
        {"kind": "json_schema", "source": "\ud800"},
        {"kind": "json_schema", "source": "{}", "strict": 1},
        {"kind": "choice"},
        {"kind": "choice", "choices": ["a"]},
        {"kind": "choice", "choices": ("a", 5)},
        {"kind": "choice", "choices": ("a", "")},
        {"kind": "choice", "choices": ("a",) * (MAX_GRAMMAR_CHOICES + 1)},
        {"kind": "choice", "choices": ("a" * (MAX_CHOICE_BYTES + 1),)},
        {"kind": "regex", "source": "a", "choices": ("a",)},
        {"kind": "json_object", "begins_after": "x" * 1000},
        {"kind": "json_object", "begins_after": None},
    ],
    ids=lambda fields: str(fields)[:50].encode("ascii", "backslashreplace").decode(),
)
def test_grammar_refuses_what_no_engine_could_use(fields: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Grammar(**fields)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 250


def test_compiler_keeps_the_last_grammars() -> None:
    compiler = GrammarCompiler(BYTES, BYTES.vocab_size)
    first = compiler.compile(OBJECT)
    for i in range(MAX_CACHED - 1):
        compiler.compile(Grammar(kind="regex", source=f"a{i}"))
    assert compiler.compile(Grammar(kind="json_object", begins_after="x")) is first
    compiler.compile(Grammar(kind="regex", source="b"))
    compiler.compile(Grammar(kind="regex", source="c"))
    assert compiler.compile(OBJECT) is first, "it was used last but two"
    for i in range(MAX_CACHED):
        compiler.compile(Grammar(kind="regex", source=f"d{i}"))
    assert compiler.compile(OBJECT) is not first


def test_sessions_of_one_grammar_know_nothing_of_each_other() -> None:
    compiled = COMPILER.compile(Grammar(kind="choice", choices=("ab", "cd")))
    one, other = compiled.session(EOS), compiled.session(EOS)
    one.advance(ord("a"))
    assert allowed_ids(one.mask()) == {ord("b")}
    assert allowed_ids(other.mask()) == {ord("a"), ord("c")}


def test_error_of_a_compiler_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troth.text.grammar.COMPILE_TIMEOUT_S", 0.0)
    slow = GrammarCompiler(BYTES, BYTES.vocab_size)
    asked = threading.Event()
    monkeypatch.setattr(slow, "_compile", lambda *rest: asked.wait(10))
    try:
        with pytest.raises(RequestError, match="did not compile within 0 s"):
            slow.compile(OBJECT)
    finally:
        asked.set()


def test_object_with_as_many_properties_as_are_allowed_can_be_written() -> None:
    """Of 500 that may be left out none could: the grammar compiled, and died where the object began."""
    optional = schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_OPTIONAL)}})
    assert accepts(optional, '{"p3": "a", "p470": "b", "other": 1}')
    names = [f"p{i}" for i in range(MAX_PROPERTIES)]
    required = schema({"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names})
    assert accepts(required, json.dumps(dict.fromkeys(names, 1)))
