"""``prediction`` of a chat: what becomes of it, what is refused, and what usage and the troth object say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.portable.serving import CHAT, asking, error_of, hello
from troth.contracts.events import Completed, Usage
from troth.contracts.speculation import SpeculationStats
from troth.serve.fields import Fields
from troth.serve.prediction import prediction_counts, read_prediction, speculation_object
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_answer import FakeAnswer
from troth.testing.fake_engine import FakeEngine


def read(prediction: Any) -> Any:
    return read_prediction(Fields({"prediction": prediction}), ByteTokenizer())


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]])
def test_prediction_becomes_tokens_that_are_proposed(content: Any) -> None:
    wanted = read({"type": "content", "content": content})
    assert wanted.predicted_ids == tuple(b"abc")
    assert wanted.sources == ("external", "ngram")
    assert wanted.adaptive


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
def test_prediction_of_nothing_asks_for_nothing(prediction: Any) -> None:
    assert read(prediction) is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("abc", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "file", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
    ],
)
def test_prediction_of_another_form_is_refused(prediction: Any, param: str) -> None:
    with asking() as client:
        response = client.post(CHAT, json=hello(prediction=prediction))
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def ended(**stats: Any) -> Completed:
    speculation = SpeculationStats(**stats) if stats else None
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=9)
    return Completed(finish_reason="stop", usage=usage, speculation=speculation)


def test_usage_counts_predicted_tokens_alone() -> None:
    one = ended(num_drafted_by_source={"external": 7, "ngram": 5}, num_accepted_by_source={"external": 4, "ngram": 1})
    other = ended(num_drafted_by_source={"external": 2}, num_accepted_by_source={})
    counts = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 5}
    assert prediction_counts([one, other, ended()]) == counts
    assert prediction_counts([ended(num_drafted_by_source={"ngram": 5}), ended()]) == {}


def test_troth_object_adds_the_drafts_of_all_choices_up() -> None:
    one = ended(num_verifies=3, num_drafted=9, num_accepted=4, accepted_by_depth=(1, 0, 1))
    other = ended(num_verifies=2, num_drafted=2, num_accepted=1, accepted_by_depth=(1,), disabled_reason="too dear")
    assert speculation_object([one, other, ended()]) == {
        "speculation": {
            "rounds": 5,
            "drafted": 11,
            "accepted": 5,
            "accepted_by_depth": [2, 0, 1],
            "sources": [],
            "disabled_reason": "too dear",
            "uncertified": False,
        }
    }
    assert speculation_object([ended()]) == {}


def test_replies_say_what_became_of_a_prediction() -> None:
    stats = SpeculationStats(
        num_verifies=1,
        num_drafted=3,
        num_accepted=2,
        accepted_by_depth=(0, 1),
        num_drafted_by_source={"external": 3},
        num_accepted_by_source={"external": 2},
    )
    with asking(FakeEngine(FakeAnswer(text="abc", speculation=stats))) as client:
        body = client.post(CHAT, json=hello(prediction={"type": "content", "content": "abd"})).json()
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 2
    assert body["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 1
    assert body["troth"]["speculation"]["accepted_by_depth"] == [0, 1]
    assert body["troth"]["speculation"]["sources"] == ["external"]
