"""The prompt cache under random traffic: conversations that share, branch, retry, fail and press for room.

The runner's answers depend on every token it reads back, so a wrong block or state shows; what must hold between calls
is in ``schedule/invariants.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.portable.test_scheduler import FULL, WINDOW, limits
from tests.portable.test_scheduler_laws import Traffic
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.request import Request
from troth.errors import Busy, ContextExceeded
from troth.schedule import invariants
from troth.testing.fake_runner import FakeRunner

TOPOLOGIES: dict[str, tuple[tuple[AttentionSpec, ...], bool]] = {
    "full": ((FULL,), False),
    "sliding": ((WINDOW,), False),
    "full and sliding": ((FULL, WINDOW), False),
    "full and recurrent": ((FULL,), True),
    "recurrent": ((), True),
    "all": ((FULL, WINDOW), True),
}

calls = st.lists(
    st.one_of(
        # family, branch point, prompt tokens, most tokens, cached?, salt
        st.tuples(
            st.just("ask"),
            st.integers(0, 2),
            st.integers(0, 200),
            st.integers(1, 200),
            st.integers(1, 70),
            st.sampled_from([True, True, True, False]),
            st.sampled_from(["", "", "salt"]),
        ),
        st.tuples(st.just("again"), st.integers(0, 30), st.integers(1, 30)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("hold"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("fail")),
        st.tuples(st.just("break_row"), st.integers(0, 3)),
        # request whose text comes back from elsewhere, blocks of it
        st.tuples(st.just("reserve"), st.integers(0, 30), st.integers(1, 14)),
        st.tuples(st.just("arrive"), st.integers(0, 3), st.sampled_from([True, True, False])),
    ),
    max_size=40,
)


class Conversations(Traffic):
    """Traffic whose prompts share beginnings and go on where answers ended."""

    @staticmethod
    def length_of(request: Request) -> int | None:
        return 1 + len(request.prompt_ids) * 7 % 60

    def ask(self, family: int, branch: int, length: int, most: int, cached: bool, salt: str) -> None:
        trunk = [(family * 131 + 7 * i) % 900 for i in range(min(branch, length))]
        own = [(len(self.requests) * 37 + 11 * i) % 900 for i in range(length - len(trunk))]
        self.submit(tuple(trunk + own), most, prompt_cache=cached, namespace=salt)

    def again(self, number: int, most: int) -> None:
        """The next turn of a conversation: its prompt, its answer, and something new."""
        before = self.requests.get(f"r{number}")
        if before is not None:
            answer = [token for token in self.answers.get(before.request_id, []) if token != 999]
            prompt = (*before.prompt_ids, *answer, 901, 902)
            self.submit(prompt, most, prompt_cache=True, namespace=before.namespace)

    def submit(self, prompt: tuple[int, ...], most: int, **values: object) -> None:
        name = f"r{len(self.requests)}"
        one = Request(
            request_id=RequestId(name),
            prompt_ids=prompt,
            max_tokens=most,
            eos_ids=frozenset({999}),
            boundary=max(0, len(prompt) - 3),
            checkpoint_positions=(20,),
            **values,  # type: ignore[arg-type]
        )
        self.requests[name] = one
        try:
            self.scheduler.add(one)
        except (Busy, ContextExceeded):
            self.ends[name] = "refused"

    def reserve(self, number: int, num_blocks: int) -> None:
        """What an earlier request had is on its way back."""
        one = self.requests.get(f"r{number}")
        if one is not None:
            known = (*one.prompt_ids, *self.answers.get(one.request_id, []))
            whole = known[: min(num_blocks, len(known) // BLOCK_TOKENS) * BLOCK_TOKENS]
            if whole:
                self.scheduler.reserve(one.namespace, whole)
            invariants.check(self.scheduler)

    def arrive(self, index: int, whole: bool) -> None:
        """It is there, or will not come."""
        under_way = self.scheduler.reservations()
        if index < len(under_way):
            one = under_way[index]
            if whole:
                self.runner.fill(one)
                self.scheduler.adopt(one.reservation_id)
            else:
                self.scheduler.abandon(one.reservation_id)
            invariants.check(self.scheduler)

    def break_row(self, index: int) -> None:
        """The oldest step under way gave bad logits for one of its rows."""
        if self.flights and index < len(self.flights[0][0].rows):
            plan, result = self.flights[0]
            self.flights[0] = (plan, replace(result, failures={index: "not finite"}))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(calls=calls, blocks=st.integers(8, 60), checkpoints=st.integers(0, 9), depth=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_prompt_cache_keeps_its_laws_under_random_traffic(
    topology: str,
    calls: list[tuple],  # type: ignore[type-arg]
    blocks: int,
    checkpoints: int,
    depth: int,
) -> None:
    groups, recurrent = TOPOLOGIES[topology]
    world = Conversations(
        limits(
            groups=groups,
            num_blocks=tuple(max(8, blocks - 9 * group) for group in range(len(groups))),
            prompt_cache=True,
            num_checkpoints=checkpoints if recurrent else None,
            checkpoint_interval_tokens=48,
        ),
        depth,
    )
    world.runner = FakeRunner(
        groups, world.limits.num_blocks, answer_length=Conversations.length_of, recurrent=recurrent
    )
    for name, *arguments in calls:
        getattr(world, name)(*arguments)
    while world.scheduler.reservations():
        world.arrive(0, True)
    world.drain()
    world.require_answers(recurrent=recurrent)
