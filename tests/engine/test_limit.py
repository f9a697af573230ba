"""A memory limit that is lowered, and raised again, while a model is loaded: by its own interface or by its group."""

import pytest

from flashllm.base.machine import process_nbytes
from flashllm.chat.conversation import Chat, Memory
from flashllm.config import RunConfig
from flashllm.engine.group_limit import FreeMemory, GroupLimit
from flashllm.engine.model import Model
from flashllm.errors import BudgetError, ContextFull

SPARE = 600_000  # bytes above the minimum
PROMPT = [5 + 7 * i % 290 for i in range(30)]


@pytest.fixture
def model(tiny):
    """A model with a little more memory than it needs."""
    path, process = tiny().path(), process_nbytes() + 100_000_000  # nothing that is allocated meanwhile changes it
    config = RunConfig(threads=1, io_threads=4)
    with Model.open(path, config, process=process) as any_limit:
        least = any_limit.plan.memory.minimum_nbytes
    config = RunConfig(threads=1, io_threads=4, memory=least + SPARE)
    with Model.open(path, config, process=process) as model:
        yield model


def rows(model):
    return sum(cache.capacity for cache in model.parts.caches)


def answer(model):
    """Tokens after a prompt, greedily."""
    with model.new_sequence() as sequence:
        tokens = [int(model.step([(sequence, PROMPT)]).argmax())]
        while len(tokens) < 6:
            tokens.append(int(model.step([(sequence, tokens[-1:])]).argmax()))
    return tokens


def test_a_lowered_limit_takes_rows_from_the_caches_and_changes_no_token(model):
    expected, all_rows = answer(model), rows(model)
    start = model.memory_limit
    model.keep_to(start - SPARE // 2)
    assert model.memory_limit == start - SPARE // 2
    plan = model.plan.memory
    held = (rows(model) + plan.bypass_rows) * plan.row_nbytes
    assert plan.fixed_nbytes + plan.page_nbytes + held <= model.memory_limit
    assert rows(model) < all_rows
    assert answer(model) == expected
    model.keep_to(start * 2)  # never above the plan
    assert model.memory_limit == start
    assert answer(model) == expected
    assert rows(model) == all_rows


def test_a_limit_that_is_too_low_is_refused_and_changes_nothing(model):
    start, all_rows = model.memory_limit, rows(model)
    with pytest.raises(BudgetError, match=r"cannot hold this model and the 98.3 kB of context .* at least \d+ MB"):
        model.keep_to(model.plan.memory.fixed_nbytes)
    assert (model.memory_limit, rows(model)) == (start, all_rows)


def test_what_is_in_use_stays_and_more_is_refused(model):
    plan = model.plan.memory
    with model.new_sequence() as one, model.new_sequence() as other:
        model.step([(one, PROMPT)])
        model.keep_to(plan.least_limit_nbytes(1))
        model.step([(one, [5])])
        with pytest.raises(ContextFull, match="the memory is full"):
            model.step([(other, PROMPT)])
        model.keep_to(model.plan.memory.limit_nbytes)
        model.step([(other, PROMPT)])
        with pytest.raises(BudgetError, match="the 197 kB of context"):
            model.keep_to(plan.least_limit_nbytes(1))


def test_the_groups_limit_is_kept_to(model):
    """Simulated: what the kernel does when a group's limit falls below what it holds differs by version."""
    now, limit = [0.0], [None]
    model._group = GroupLimit(lambda: limit[0], lambda: now[0])
    expected, all_rows, start = answer(model), rows(model), model.memory_limit
    limit[0] = start - SPARE // 2
    assert answer(model) == expected
    assert rows(model) == all_rows  # not looked at within the second
    now[0] += 2
    assert answer(model) == expected
    assert rows(model) < all_rows
    assert model.memory_limit == limit[0]
    limit[0], now[0] = 1_000_000, now[0] + 2
    for _ in range(2):
        with pytest.raises(BudgetError, match="1 MB cannot hold this model"):
            answer(model)
    limit[0], now[0] = start * 2, now[0] + 2
    assert answer(model) == expected
    assert rows(model) == all_rows


def test_a_group_that_was_small_from_the_start_says_nothing():
    now, limit = [0.0], [5000]
    group = GroupLimit(lambda: limit[0], lambda: now[0])
    seen = []
    for value in (5000, 4000, 6000, None):
        limit[0], now[0] = value, now[0] + 1
        seen.append(group.lowered())
    assert seen == [None, 4000, None, None]


def test_the_chat_s_command(model):
    limit = model.memory_limit
    chat = Chat(None, lambda: Memory(used=1, limit=model.memory_limit), True, None, model.keep_to, None)
    assert "of" in chat.command("/memory")
    assert "from here on" in chat.command(f"/memory {limit - SPARE // 2}")
    assert model.memory_limit == limit - SPARE // 2
    assert "cannot hold this model" in chat.command("/memory 1MB")
    assert "is not a size" in chat.command("/memory much")
    assert model.memory_limit == limit - SPARE // 2


def test_a_limit_that_follows_leaves_others_a_fifth_and_changes_no_token(model):
    expected, all_rows, start = answer(model), rows(model), model.memory_limit
    now, free = [0.0], [10 * start]
    model._free = FreeMemory(lambda: free[0], lambda: now[0])
    assert answer(model) == expected
    assert model.memory_limit == start
    free[0] = 0  # other programs took it all: what the sequences need stays, and no pass fails
    now[0] += 2
    assert answer(model) == expected
    assert model.memory_limit == model._memory.least_limit([1])
    assert rows(model) < all_rows
    with model.new_sequence() as sequence:  # also one that needs more than is in use now
        now[0] += 2
        model.step([(sequence, PROMPT * 3)])
    free[0], now[0] = 10 * start, now[0] + 2
    assert answer(model) == expected
    assert (model.memory_limit, rows(model)) == (start, all_rows)


def test_free_memory_is_looked_at_once_a_second_and_small_changes_are_not_followed():
    now, found = [0.0], [1000]
    free = FreeMemory(lambda: found[0], lambda: now[0])
    assert free.limit(900, 2000) == 800
    found[0] = 500
    assert free.limit(800, 2000) == 800
    now[0] = 1.0
    assert free.limit(800, 2000) == 400
    now[0], found[0] = 2.0, 510
    assert free.limit(400, 2000) == 400
    now[0], found[0] = 3.0, 9000
    assert free.limit(400, 2000) == 2000
