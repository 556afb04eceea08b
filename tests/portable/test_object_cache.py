"""The object cache: bounded in bytes, used last goes last, leased stays, and made once for all who ask together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.portable.vocabularies import UNHURRIED
from troth.contracts.object_cache import ObjectCache
from troth.text.object_cache import BoundedObjects


def held(cache: BoundedObjects, keys: str) -> str:
    """Which of the keys are held, without using them."""
    return "".join(key for key in keys if key in cache._entries)


def test_objects_are_given_up_when_their_bytes_do_not_fit_the_least_recently_used_first() -> None:
    cache = BoundedObjects(30)
    for key in "abc":
        cache.put(key, key.upper(), 10).release()
    lease = cache.take("a")
    assert lease is not None
    assert lease.value == "A"
    lease.release()
    cache.put("d", "D", 15).release()
    assert held(cache, "abcd") == "ad"
    status = cache.status()
    assert (status.num_objects, status.num_bytes, status.max_bytes, status.num_evicted) == (2, 25, 30, 2)
    assert (status.num_hits, status.num_misses) == (1, 0)


def test_objects_that_are_leased_stay() -> None:
    cache = BoundedObjects(20)
    with cache.put("a", "A", 10) as lease:
        cache.put("b", "B", 10).release()
        cache.put("c", "C", 10).release()
        assert held(cache, "abc") == "ac"
        with cache.put("d", "D", 15) as unkept:
            assert unkept.value == "D"
        assert held(cache, "abcd") == "ac", "there was no room beside what is leased, and nothing went in vain"
        assert lease.value == "A"
    cache.put("d", "D", 15).release()
    assert held(cache, "abcd") == "d"


def test_objects_larger_than_the_cache_are_handed_out_and_not_kept() -> None:
    cache = BoundedObjects(10)
    cache.put("a", "A", 10).release()
    with cache.take_or_make("b", lambda: ("B", 11)) as lease:
        assert lease.value == "B"
    assert held(cache, "ab") == "a"


def test_lease_that_was_released_gives_nothing() -> None:
    lease = BoundedObjects(10).put("a", "A", 1)
    lease.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        _ = lease.value


def test_objects_asked_for_together_are_made_once() -> None:
    cache: ObjectCache = BoundedObjects(10)
    asked, go = threading.Barrier(9), threading.Event()
    made: list[int] = []

    def make() -> tuple[str, int]:
        made.append(1)
        assert go.wait(10)
        return "value", 1

    def ask() -> object:
        asked.wait(10)
        with cache.take_or_make("key", make) as lease:
            return lease.value

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask) for _ in range(8)]
        asked.wait(10)
        go.set()
        assert [answer.result(10) for answer in answers] == ["value"] * 8
    assert made == [1]


def test_objects_whose_making_fails_are_asked_for_again() -> None:
    cache = BoundedObjects(10)

    def fail() -> tuple[str, int]:
        raise KeyError("no")

    with pytest.raises(KeyError):
        cache.take_or_make("key", fail)
    with cache.take_or_make("key", lambda: ("value", 1)) as lease:
        assert lease.value == "value"


@UNHURRIED
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 12), st.booleans()), max_size=60))
def test_objects_never_take_more_than_their_bytes(puts: list[tuple[str, int, bool]]) -> None:
    cache, leases = BoundedObjects(20), []
    for key, num_bytes, keeps in puts:
        lease = cache.put(key, (key, num_bytes), num_bytes)
        if keeps:
            leases.append((lease, (key, num_bytes)))
        else:
            lease.release()
        assert cache.status().num_bytes == sum(one.num_bytes for one in cache._entries.values()) <= 20
    assert all(lease.value == value for lease, value in leases)
    for lease, _ in leases:
        lease.release()
    cache.put("last", 0, 20).release()
    assert held(cache, "abcdef") == ""
