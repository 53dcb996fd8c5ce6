from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.context.stores.splices import spliced, splices

lists = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(lists, lists)
def test_what_is_told_makes_the_list_again(old: list[str], new: list[str]) -> None:
    changes = splices(old, new)
    assert spliced(old, changes) == tuple(new)
    stops = [0, *(stop for _, stop, _ in changes)]
    assert all(start >= stop for (start, _, _), stop in zip(changes, stops, strict=False))
    assert splices(new, new) == ()


def test_changes_far_apart_are_told_apart() -> None:
    old = list(range(200))
    new = [*old[:3], "new", *old[4:90], *old[91:], "last"]
    assert splices(old, new) == ((3, 4, ("new",)), (90, 91, ()), (200, 200, ("last",)))


def test_a_moved_block_is_told_once() -> None:
    old = list(range(100))
    new = [*old[:10], *old[11:], 10]
    assert splices(old, new) == ((10, 11, ()), (100, 100, (10,)))


def test_many_equal_items_take_linear_time() -> None:
    old, new = ["a", *["same"] * 20_000, "b"], ["b", *["same"] * 20_000, "a"]
    changes = splices(old, new)
    assert spliced(old, changes) == tuple(new)
    assert sum(len(items) for _, _, items in changes) <= 20_002
