"""Which blocks of a text are worth having on disk, and how far those that are there reach."""

from __future__ import annotations

import pytest

from troth.cache.disk_names import block_names, cache_namespace
from troth.cache.disk_reach import DiskReach, runs
from troth.contracts.cache_spec import AttentionSpec

FULL = AttentionSpec(layers=(0,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=2)
WINDOW = AttentionSpec(layers=(1,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=2, window=40)


def test_disk_reach_wants_all_of_full_attention_and_what_ends_need_of_the_rest() -> None:
    reach = DiskReach((FULL, WINDOW), has_states=True)
    assert reach.kinds == ("kv0", "kv1", "state")
    assert reach.wanted("kv0", (3, 9)) == list(range(9))
    assert reach.wanted("kv1", (3, 9)) == [0, 1, 2, 6, 7, 8]
    assert reach.wanted("state", (3, 9)) == [2, 8]


@pytest.mark.parametrize(
    ("held", "most", "deepest"),
    [
        ({"kv0": range(9), "kv1": (0, 1, 2, 6, 7, 8), "state": (2, 8)}, 20, 9),
        ({"kv0": range(9), "kv1": (0, 1, 2, 6, 7, 8), "state": (2, 8)}, 8, 3),
        ({"kv0": range(9), "kv1": (0, 1, 2, 7, 8), "state": (2, 8)}, 20, 3),
        ({"kv0": range(9), "kv1": range(9), "state": ()}, 20, 0),
        ({"kv0": (0, 1, 3, 4), "kv1": range(9), "state": range(9)}, 20, 2),
        ({"kv0": (1, 2), "kv1": range(9), "state": range(9)}, 20, 0),
    ],
)
def test_disk_reach_is_the_deepest_place_where_nothing_is_missing(
    held: dict[str, tuple[int, ...]], most: int, deepest: int
) -> None:
    assert DiskReach((FULL, WINDOW), has_states=True).deepest(held, most) == deepest


def test_disk_reach_of_windows_alone_needs_no_beginning() -> None:
    assert DiskReach((WINDOW,), has_states=False).deepest({"kv0": (6, 7, 8)}, 20) == 9


def test_runs_are_consecutive_and_short_enough() -> None:
    assert runs([0, 1, 2, 3, 4, 7, 9, 10], 3) == [range(3), range(3, 5), range(7, 8), range(9, 11)]
    assert runs([], 3) == []


def test_namespaces_keep_models_numbers_and_devices_apart() -> None:
    values = {"artifact": "a", "dtype": "float32", "kv_dtype": "float16", "compute": "cpu"}
    spaces = {cache_namespace(**values), *(cache_namespace(**values | {name: "other"}) for name in values)}
    assert len(spaces) == len(values) + 1
    assert len({block_names(space, "", range(16))[0] for space in spaces}) == len(spaces)
