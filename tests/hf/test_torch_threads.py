"""Torch has one thread while tokens are generated, and the threads it had afterwards, in every thread."""

from threading import Barrier, Thread

import pytest
import torch
from generating import greedy, ids_of

from flashllm.hf.torch_threads import one_torch_thread


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)  # conftest puts back what it was


def test_within_itself_and_after_an_error():
    with one_torch_thread:
        with pytest.raises(KeyError), one_torch_thread:
            raise KeyError
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_in_threads_that_leave_in_the_order_they_came():
    entered, left, counts = Barrier(2), Barrier(2), []

    def second():
        entered.wait()
        with one_torch_thread:
            left.wait()  # the first is about to leave
            left.wait()  # it has left
            counts.append(torch.get_num_threads())
        counts.append(torch.get_num_threads())

    thread = Thread(target=second)
    thread.start()
    with one_torch_thread:
        entered.wait()
        left.wait()
    left.wait()
    thread.join()
    third = Thread(target=lambda: counts.append(torch.get_num_threads()))
    third.start()
    third.join()
    assert counts == [1, 2, 2]
    assert torch.get_num_threads() == 2


def test_generate_uses_it(tiny, shared):
    flash, counts = shared(), []

    def watch(ids, scores, **kwargs):
        counts.append(torch.get_num_threads())
        return torch.zeros(len(ids), dtype=torch.bool)

    greedy(flash, ids_of(4), 3, stopping_criteria=[watch])
    assert counts == [1, 1, 1]
    assert torch.get_num_threads() == 2
    greedy(flash, ids_of(4), 3, stopping_criteria=[watch], assistant_model=tiny().reference)
    assert set(counts[3:]) == {2}
