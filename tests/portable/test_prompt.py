"""From chats, texts and ids to prompts: BOS, boundary, continuation, refusals before the work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.portable.vocabularies import BOS, BOS_ID, EOS, IM_END, IM_START, UNHURRIED, byte_level, sentencepiece
from tests.shared_data import shared
from troth.errors import CapabilityUnavailable, ContextExceeded, RequestError
from troth.text.chat_template import ChatTemplate
from troth.text.messages import normalise_messages
from troth.text.prompt import PromptBuilder
from troth.text.tokenizer import Tokenizer

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
TALK = [*HELLO, {"role": "assistant", "content": "hello world"}]


def builder(
    source: str | None = TURNS, tokenizer: Tokenizer | None = None, context_tokens: int = 10_000
) -> PromptBuilder:
    tokenizer = tokenizer or byte_level()
    template = None
    if source is not None:
        template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return PromptBuilder(tokenizer, template, context_tokens=context_tokens)


def test_prompt_chat_is_the_encoded_render() -> None:
    prompt = builder().chat(HELLO)
    assert prompt.text == f"{IM_START}user\nhello{IM_END}\n{IM_START}assistant\n"
    assert list(prompt.ids) == byte_level().encode(prompt.text)


def test_prompt_of_a_template_that_leaves_out_what_a_user_says_is_refused_by_name() -> None:
    deaf = PromptBuilder(
        byte_level(), ChatTemplate("fixed", bos_token=None, eos_token=None), context_tokens=100, hears_nobody=True
    )
    with pytest.raises(CapabilityUnavailable, match="leaves out what a user says; use completions"):
        deaf.chat(HELLO)
    assert deaf.completion("hello").ids


def test_prompt_boundary_ends_before_the_generation_prompt() -> None:
    prompt = builder().chat(HELLO)
    assert prompt.boundary is not None
    tokenizer = byte_level()
    assert tokenizer.decode(prompt.ids[: prompt.boundary], skip_special=False) == f"{IM_START}user\nhello{IM_END}\n"
    assert tokenizer.decode(prompt.ids[prompt.boundary :], skip_special=False) == f"{IM_START}assistant\n"


CONVERSATIONS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant"]),
        st.lists(st.sampled_from(["hello", " ", "\n", "é", IM_START, "a"])).map("".join),
    ),
    min_size=1,
    max_size=4,
)
OPENINGS = st.sampled_from([IM_START, "<|im_start|>assistant\n", "hello", " ", "", "\n", "l", "\u0301"])


@UNHURRIED
@given(CONVERSATIONS, OPENINGS, st.booleans())
def test_prompt_boundary_is_the_own_encoding_of_the_conversation(
    messages: list[dict[str, Any]], opening: str, composing: bool
) -> None:
    """Read off the whole encoding or encoded apart: the ids before the boundary are those of the render without it."""
    history = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = history + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    tokenizer = byte_level(normalizer={"type": "NFC"} if composing else None)
    prompt = builder(source, tokenizer).chat(messages)
    own = list(builder(history, tokenizer).chat(messages).ids)
    strict = len(own) < len(prompt.ids) and list(prompt.ids[: len(own)]) == own
    assert prompt.boundary == (len(own) if strict and own else None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% if add_generation_prompt %}x{% endif %}{{ messages[0].content }}",
        "{{ messages[0].content }}{% if not add_generation_prompt %}y{% endif %}",
        "{% if not add_generation_prompt %}{{ raise_exception('half') }}{% endif %}hello",
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
    ],
    ids=["equal", "before", "longer", "refused", "empty"],
)
def test_prompt_has_no_boundary_where_the_conversation_is_no_strict_prefix(source: str) -> None:
    assert builder(source).chat(HELLO).boundary is None


@pytest.mark.parametrize("source", [TURNS, "{{ bos_token }}" + TURNS, "{{ bos_token }}{{ bos_token }}" + TURNS])
def test_prompt_has_exactly_one_bos_where_the_model_adds_one(source: str) -> None:
    tokenizer = byte_level(bos=True)
    prompt = builder(source, tokenizer).chat(HELLO)
    assert prompt.ids.count(BOS_ID) == 1
    assert prompt.ids[0] == BOS_ID
    assert prompt.boundary is not None
    shown = tokenizer.decode(prompt.ids[prompt.boundary :], skip_special=False)
    assert shown == f"{IM_START}assistant\n"


def test_prompt_leaves_bos_to_the_template_where_the_model_adds_none() -> None:
    assert BOS_ID not in builder(TURNS).chat(HELLO).ids
    assert builder("{{ bos_token }}" + TURNS).chat(HELLO).ids[0] == BOS_ID


def test_prompt_completion_has_one_bos_whatever_the_text_brings() -> None:
    tokenizer = byte_level(bos=True)
    build = builder(None, tokenizer)
    body = tuple(tokenizer.encode("hello", add_special=False))
    for text in ("hello", f"{BOS}hello", f"{BOS}{BOS}hello"):
        prompt = build.completion(text)
        assert (prompt.text, prompt.ids, prompt.boundary) == (text, (BOS_ID, *body), None)
    assert builder(None).completion(f"{BOS}{BOS}hello").ids == (BOS_ID, BOS_ID, *body)


def test_prompt_completion_of_sentencepiece_prefixes_bos_and_space() -> None:
    tokenizer = sentencepiece()
    assert builder(None, tokenizer).completion("hello").ids == (1, *tokenizer.encode("hello", add_special=False))


def test_prompt_token_ids_are_taken_as_they_are() -> None:
    prompt = builder(None).token_ids([5, BOS_ID, BOS_ID])
    assert (prompt.text, prompt.ids, prompt.boundary) == ("", (5, BOS_ID, BOS_ID), None)
    assert builder(None).token_ids([]).ids == ()


@pytest.mark.parametrize("token_id", [-1, 10**6, True, 1.0, "1", None])
def test_prompt_token_ids_outside_the_vocabulary_are_refused(token_id: Any) -> None:
    with pytest.raises(RequestError) as caught:
        builder(None).token_ids([1, token_id])
    assert caught.value.param == "prompt[1]"
    assert repr(token_id) in str(caught.value)


def test_prompt_chat_without_template_is_unavailable() -> None:
    with pytest.raises(CapabilityUnavailable) as caught:
        builder(None).chat(HELLO)
    assert (caught.value.capability, caught.value.param) == ("chat", "messages")


@pytest.mark.parametrize("vocabulary", [byte_level, sentencepiece], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("said", ["{0}", "hello{0}world", " {0} {0}", "a{0}{1}b{0}", "{1}"])
def test_prompt_control_tokens_in_messages_stay_text(vocabulary: Any, said: str) -> None:
    """Neither a message, nor a tool's description, nor a variable makes a control id; the template still does."""
    tokenizer = vocabulary()
    control = sorted(tokenizer.control_texts, key=len)[-2:]
    text = said.format(*control)
    source = "{% for m in messages %}" + control[0] + "{{ m.content }}{% endfor %}" + control[1]
    plain = builder(source, tokenizer).chat([{"role": "user", "content": "hello"}])
    prompt = builder(source, tokenizer).chat([{"role": "user", "content": text}])
    specials = [token_id for token_id in prompt.ids if tokenizer.is_special(token_id)]
    assert specials == [token_id for token_id in plain.ids if tokenizer.is_special(token_id)]
    assert prompt.text == control[0] + text + control[1]
    shown = tokenizer.decode(prompt.ids[tokenizer.add_bos :], skip_special=False)
    if tokenizer.drops_first_space:  # it may put a space behind each control token
        shown, text = shown.replace(" ", ""), text.replace(" ", "")
    assert shown == control[0] + text + control[1]


def test_prompt_control_tokens_in_tools_and_variables_stay_text() -> None:
    source = "{{ tools | tojson(ensure_ascii=true) }}{{ name }}{{ messages[0].content }}" + IM_END
    tool = {"type": "function", "function": {"name": "f", "description": f"{IM_START}é", "parameters": {}}}
    prompt = builder(source).chat(HELLO, [tool], {"name": IM_START})
    tokenizer = byte_level()
    assert [token_id for token_id in prompt.ids if tokenizer.is_special(token_id)] == tokenizer.encode(IM_END)
    assert tokenizer.decode(prompt.ids, skip_special=False) == prompt.text
    assert prompt.text.count(IM_START) == 2


def test_prompt_hands_tools_and_variables_to_the_template() -> None:
    source = "{{ tools[0].function.name }}{{ enable_thinking }}{{ messages[0].content }}"
    assert builder(source).chat(HELLO, [{"name": "f"}], {"enable_thinking": True}).text == "fTruehello"


def test_prompt_continues_the_final_message_at_its_end() -> None:
    prompt = builder().chat(TALK, continue_final=True)
    assert prompt.text == f"{IM_START}user\nhello{IM_END}\n{IM_START}assistant\nhello world"
    assert prompt.boundary is not None
    assert byte_level().decode(prompt.ids[: prompt.boundary], skip_special=False) == f"{IM_START}user\nhello{IM_END}\n"


def test_prompt_continues_a_final_message_that_the_template_trims() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    talk = [*HELLO, {"role": "assistant", "content": "  hello \n"}]
    assert builder(source).chat(talk, continue_final=True).text == "[hello][hello \n"


def test_prompt_continues_the_only_message() -> None:
    prompt = builder().chat([TALK[1]], continue_final=True)
    assert (prompt.text, prompt.boundary) == (f"{IM_START}assistant\nhello world", None)


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_prompt_continues_only_an_assistant_message_of_text(last: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        builder().chat([*HELLO, last], continue_final=True)
    assert caught.value.param == "messages[1]"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{% for m in messages %}{{ m.content * 2 }}{% endfor %}"]
)
def test_prompt_continuation_needs_a_template_that_writes_the_message_once(source: str) -> None:
    with pytest.raises(CapabilityUnavailable) as caught:
        builder(source).chat(TALK, continue_final=True)
    assert caught.value.param == "messages[1]"


def untouched() -> Tokenizer:
    """A tokenizer that must not be asked to encode."""

    def encode(*args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("encoded though it cannot fit")

    tokenizer = byte_level()
    tokenizer.min_num_tokens("")  # its own probe encodes once
    for method in ("encode", "encode_split"):
        setattr(tokenizer, method, encode)
    return tokenizer


HUGE = "hello " * 50_000


def _refuses(build: PromptBuilder, method: str, argument: Any, least: int) -> None:
    with pytest.raises(ContextExceeded) as caught:
        getattr(build, method)(argument)
    assert caught.value.num_prompt_tokens >= least
    assert "at least" in str(caught.value)
    assert (caught.value.limit, caught.value.code) == (1000, "context_length_exceeded")


def test_prompt_huge_text_is_refused_before_it_is_rendered_or_encoded() -> None:
    raising = "{{ raise_exception('rendered though it cannot fit') }}"
    build = builder(raising, untouched(), context_tokens=1000)
    _refuses(build, "completion", HUGE, 1000)
    _refuses(build, "chat", [{"role": "user", "content": HUGE}], 1000)
    _refuses(build, "chat", [{"role": "tool", "content": HUGE[:150_000]}, {"role": "system", "content": HUGE}], 1000)


def test_prompt_huge_render_is_refused_before_it_is_encoded() -> None:
    build = builder("{{ messages[0].content * 99999 }}", untouched(), context_tokens=1000)
    _refuses(build, "chat", HELLO, 1000)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_prompt_of_very_many_messages_is_refused_before_it_is_rendered(role: str) -> None:
    """Rendering 200,000 of them took ten seconds, to be refused then."""
    build = builder("{{ raise_exception('rendered though it cannot fit') }}", untouched(), context_tokens=1000)
    _refuses(build, "chat", [{"role": role, "content": "h"}] * 1000, 1000)
    with pytest.raises(RequestError, match="rendered though"):
        build.chat([{"role": role, "content": "h"}] * 999)


def test_prompt_of_too_many_ids_is_refused_before_they_are_read() -> None:
    with pytest.raises(ContextExceeded) as caught:
        builder(context_tokens=1000).token_ids([-1] * 1000)
    assert (caught.value.param, caught.value.num_prompt_tokens, caught.value.limit) == ("prompt", 1000, 1000)


@pytest.mark.parametrize("ids", [None, 5, b"hi", bytearray(b"hi"), {1: 2}, {1, 2}, iter([1])])
def test_prompt_refuses_what_is_no_list_of_ids(ids: Any) -> None:
    """Bytes were read as ids, and what has no length as nothing."""
    with pytest.raises(RequestError) as caught:
        builder().token_ids(ids)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_type")


def test_prompt_long_reasoning_that_the_template_drops_is_not_counted() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    talk = [*HELLO, {"role": "assistant", "content": HUGE + "</think>hello"}, *HELLO]
    assert builder(source, context_tokens=1000).chat(talk).text == "hellohellohello"
    padded = [{"role": "user", "content": " " * 10**6 + "hello"}]
    assert builder("{{ messages[0].content | trim }}", context_tokens=1000).chat(padded).text == "hello"


def test_prompt_that_fits_is_left_to_admission() -> None:
    """Only what is certain not to fit is refused here; exact counts are the scheduler's."""
    prompt = builder(context_tokens=10).chat(HELLO)
    assert len(prompt.ids) > 10


def test_prompt_names_the_field_of_half_a_surrogate_pair() -> None:
    for messages, param in (
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([*HELLO, {"role": "assistant", "content": "", "reasoning": "\udc00"}], "messages[1].reasoning"),
    ):
        with pytest.raises(RequestError) as caught:
            builder().chat(messages)
        assert caught.value.param == param
    with pytest.raises(RequestError) as caught:
        builder().completion("\ud800")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        builder("{{ x }}").chat(HELLO, variables={"x": "\ud800"})
    assert caught.value.param == "messages"


def test_prompt_eos_text_is_the_models() -> None:
    assert builder("{{ eos_token }}").chat(HELLO).text == EOS


def test_prompt_of_a_trained_model_equals_its_golden_ids() -> None:
    folder = shared("troth-tiny-hybrid")
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder, template=source)
    build = builder(source, tokenizer)
    template = ChatTemplate(source, bos_token=None, eos_token=tokenizer.eos_token)
    rows = json.loads((folder / "golden.json").read_text())["prompts"]
    assert len(rows) >= 40
    for row in rows:
        thinking = row["enable_thinking"]
        variables = {} if thinking is None else {"enable_thinking": thinking}
        prompt = build.chat(row["messages"], row["tools"], variables)
        assert (prompt.text, list(prompt.ids)) == (row["prompt"], row["prompt_ids"])
        history = template.render(
            normalise_messages(row["messages"]), tools=row["tools"], variables=variables, add_generation_prompt=False
        )
        own = tokenizer.encode(history)
        assert prompt.boundary == len(own) < len(prompt.ids)
        assert list(prompt.ids[: prompt.boundary]) == own


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_prompt_chat_refuses_by_name_what_nests_deeper_than_it_can_be_read(field: str) -> None:
    """Python's own JSON reader goes deeper than a walk over what it read: past calls, schemas, variables."""
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps(deep)}}]}
    given: dict[str, Any] = {
        "messages": {"messages": [*HELLO, call]},
        "tools": {"messages": HELLO, "tools": [deep]},
        "chat_template_kwargs": {"messages": HELLO, "variables": deep},
    }[field]
    with pytest.raises(RequestError, match="nested too deeply") as refusal:
        builder().chat(**given)
    assert refusal.value.param == field
