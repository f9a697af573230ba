"""The slot table against sets and a list of rows, over random exchanges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm._core import SlotTable


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_neurons=st.integers(1, 30), capacity=st.integers(1, 35))
def test_rows_hold_exactly_what_was_exchanged(data, num_neurons, capacity):
    table = SlotTable(num_neurons, capacity)
    assert table.capacity == min(capacity, num_neurons)
    cached: set[int] = set()
    rows: dict[int, int] = {}  # slot -> the neuron whose bytes lie there
    for _ in range(data.draw(st.integers(1, 8))):
        leaving = data.draw(st.lists(st.sampled_from(sorted(cached)), unique=True)) if cached else []
        absent = sorted(set(range(num_neurons)) - cached)
        room = table.capacity - len(cached) + len(leaving)
        coming = data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=room)) if absent else []

        moves = table.exchange(leaving, coming)

        for source, target in moves:
            assert source < len(cached)
            rows[target] = rows[source]
        cached = cached - set(leaving) | set(coming)
        for neuron in coming:
            rows[table.slot_of(neuron)] = neuron
        assert table.num_used == len(cached)
        assert sorted(table.pointers()) == sorted(cached)
        assert [rows[slot] for slot in range(table.num_used)] == table.pointers()
        assert all(table.slot_of(n) == (table.pointers().index(n) if n in cached else -1) for n in range(num_neurons))
        # Rows move only when more leave than come, and then no more often than there are holes left.
        assert len(moves) <= max(0, len(leaving) - len(coming))


def test_incoming_neurons_take_the_freed_rows():
    table = SlotTable(10, 4)
    table.exchange([], [5, 6, 7, 8])
    assert table.exchange([6, 8], [1, 2]) == []
    assert table.pointers() == [5, 1, 7, 2]


def test_the_last_row_moves_into_a_hole():
    table = SlotTable(10, 4)
    table.exchange([], [5, 6, 7, 8])
    assert table.exchange([5, 7], [9]) == [(3, 2)]
    assert table.pointers() == [9, 6, 8]


@pytest.mark.parametrize(
    ("leaving", "coming", "message"),
    [([], [2, 3], "cannot hold"), ([2], [], "not cached"), ([], [10], "no such unit"), ([-1], [], "no such unit")],
)
def test_impossible_exchanges_are_refused(leaving, coming, message):
    table = SlotTable(10, 2)
    table.exchange([], [0])
    with pytest.raises(ValueError, match=message):
        table.exchange(leaving, coming)


@pytest.mark.parametrize(("num_neurons", "capacity"), [(0, 1), (1, 0), (-3, 4)])
def test_refuses_a_cache_of_nothing(num_neurons, capacity):
    with pytest.raises(ValueError, match="at least one"):
        SlotTable(num_neurons, capacity)
