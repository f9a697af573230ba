"""The memory plan: what fits is planned to the last row, what does not is refused with numbers."""

import dataclasses
import itertools
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import memory_plan

from flashllm._core import PAGE_TOKENS
from flashllm.errors import BudgetError, UsageError
from flashllm.format.manifest_values import Calibration
from flashllm.format.model_dir import ModelDir
from flashllm.format.rows import RowLayout, checksum_rows
from flashllm.plan.memory import LIBRARY_GROWTH
from flashllm.plan.requests import PROMPT_NBYTES, body_nbytes, requests_nbytes
from flashllm.plan.shares import levels_by_blocks, levels_by_need, levels_by_popularity

PLENTY, PROCESS = 10**12, 300_000_000


@pytest.fixture(scope="module")
def model(tiny):
    return ModelDir.open(tiny().path("random"))


def plan_of(model, manifest=None, **options):
    return memory_plan(model, manifest, **{"available": PLENTY, "process": PROCESS, **options})


def resized(manifest, **changes):
    """The manifest of a model of another d_ff or number of layers."""
    architecture = dataclasses.replace(manifest.architecture, **changes)
    rows = dataclasses.replace(manifest.rows, d_ff=architecture.d_ff)
    return dataclasses.replace(manifest, architecture=architecture, rows=rows)


def calibrated(model, req, window=5):
    calibration = Calibration(window=window, mean_active=(1.0,) * len(req), req=req, tokens=10, text="a test")
    return dataclasses.replace(model.manifest, calibration=calibration)


# Shares


def share_rows(available, needs):
    return tuple(levels_by_need([available], needs, [1] * len(needs))[0].tolist())


def share_by_popularity(available, minimum, popularity):
    return tuple(levels_by_popularity([available], minimum, popularity, [1] * len(minimum))[0].tolist())


@given(st.integers(0, 10_000), st.lists(st.integers(0, 3000), min_size=1, max_size=12))
def test_shares_are_fair_and_whole(available, needs):
    rows = share_rows(available, needs)
    assert all(0 <= row <= need for row, need in zip(rows, needs, strict=True))
    assert sum(rows) <= available
    if sum(needs) <= available:
        assert rows == tuple(needs)
    else:
        assert available - sum(rows) < len(needs)  # nothing is left over that a layer could use
        hungry = [row for row, need in zip(rows, needs, strict=True) if row < need]
        assert max(rows) - min(hungry) <= 1  # nobody has more than one who wants more


def test_rows_go_to_the_highest_shares_of_all_layers():
    popularity = np.array([[0.9, 0.1, 0.5, 0.0], [0.8, 0.7, 0.6, 0.2]], np.float32)
    expected = {0: (1, 1), 2: (1, 1), 3: (1, 2), 4: (1, 3), 5: (2, 3), 6: (2, 4), 7: (3, 4), 8: (4, 4), 9: (4, 4)}
    for available, rows in expected.items():
        assert share_by_popularity(available, (1, 1), popularity) == rows
    nothing = np.zeros((3, 100), np.float32)
    assert share_by_popularity(60, (10, 10, 10), nothing) == (20, 20, 20)
    assert share_by_popularity(1000, (10, 10, 10), nothing) == (100, 100, 100)


@given(st.integers(0, 200), st.lists(st.integers(5, 30), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_no_other_shares_save_more(available, widths, seed):
    random = np.random.default_rng(seed)
    popularity = [random.random(width).astype(np.float32) ** 3 for width in widths]
    minimum = tuple(int(n) for n in random.integers(0, 5, 3))
    rows = share_by_popularity(available, minimum, popularity)
    assert all(low <= row <= width for low, row, width in zip(minimum, rows, widths, strict=True))
    assert sum(rows) == min(sum(widths), max(available, sum(minimum)))
    best = [np.sort(shares)[::-1] for shares in popularity]
    for giver in range(3):  # moving one row elsewhere saves nothing
        for taker in range(3):
            if rows[giver] > minimum[giver] and rows[taker] < widths[taker]:
                assert best[giver][rows[giver] - 1] >= best[taker][rows[taker]]


@given(st.integers(0, 5000), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([1, 7, 64]))
def test_rows_are_given_by_whole_units(available, units, unit):
    needs = [unit * each for each in units]
    (rows,) = levels_by_need([available], needs, [1] * len(needs), unit).tolist()
    assert rows == [unit * each for each in share_rows(available // unit, units)]
    popularity = np.random.default_rng(available).random((len(units), 40)).astype(np.float32).repeat(unit, axis=1)
    nothing = [0] * len(units)
    (rows,) = levels_by_popularity([available], nothing, popularity, [1] * len(nothing), unit).tolist()
    assert rows == [
        unit * each for each in share_by_popularity(available // unit, nothing, [each[::unit] for each in popularity])
    ]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 1500))
def test_no_layer_has_more_rows_of_less_memory(layers, most):
    needs, sizes = zip(*layers, strict=True)
    levels = levels_by_need(range(most, -1, -1), needs, sizes)
    assert (np.diff(levels, axis=0) <= 0).all()
    assert (levels @ np.array(sizes) <= np.arange(most, -1, -1)).all()


def test_shorter_rows_take_less_and_are_worth_more():
    """Rows of 3 and 2: as many of each layer; whole blocks of 4; by popularity, what saves most for its size."""
    assert levels_by_need([50, 49, 7], [12, 12], [3, 2]).tolist() == [[10, 10], [9, 10], [1, 2]]
    blocks = [levels_by_blocks([memory], [8, 6], [3, 2], 4).tolist()[0] for memory in (11, 12, 20, 31, 32, 36)]
    assert blocks == [[0, 0], [4, 0], [4, 4], [4, 4], [8, 4], [8, 6]]
    # For their size 0.3, 0.2; 0.35, 0.15.
    popularity = [np.array([0.9, 0.6], np.float32), np.array([0.7, 0.3], np.float32)]
    found = levels_by_popularity([10, 9, 8, 5, 4, 2, 1], (0, 0), popularity, [3, 2])
    assert found.tolist() == [[2, 2], [2, 1], [2, 1], [1, 1], [0, 1], [0, 1], [0, 0]]


# Plans


def test_an_expert_is_kept_track_of_as_one(model):
    """Qwen3-Next's experts: 262,656 neurons in each of 48 layers, with slot, counts and checksum 315 MB one by one."""
    sizes = {"num_layers": 48, "d_model": 128, "d_ff": 513 * 512, "activation": "silu", "gated": True}
    mixture = {"experts": 512, "chosen_experts": 10, "shared_neurons": 512}
    architecture = dataclasses.replace(model.architecture, **sizes, **mixture)
    rows = RowLayout(encoding="int4_32", d_model=128, d_ff=513 * 512, matrices=("up", "gate", "down"))
    together = max(checksum_rows(rows, architecture))
    changes = {"architecture": architecture, "rows": rows, "calibration": None, "stream_block_rows": 1152}
    manifest = dataclasses.replace(model.manifest, **changes, checksum_rows=together)
    room = {"available": 2 * 10**10}  # for all rows
    all_kept = plan_of(model, manifest, **room)
    assert all_kept.cache_rows == (513 * 512,) * 48
    assert all_kept.bookkeeping < 2 * 10**6
    least = plan_of(model, manifest, memory=all_kept.minimum_nbytes)
    assert least.checksums == 8 * 48 * 513
    assert least.bookkeeping + least.checksums < 10**6
    relu = dataclasses.replace(architecture, activation="relu")
    one_by_one = plan_of(model, dataclasses.replace(manifest, architecture=relu, checksum_rows=1), **room)
    assert one_by_one.checksums == 8 * 48 * 513 * 512
    assert one_by_one.bookkeeping > 214 * 10**6


def test_the_parts_make_the_total(model):
    plan = plan_of(model)
    starts, ends = ([row[end] for row in plan.rows()] for end in (1, 2))
    assert sum(starts) < sum(ends) == plan.total_nbytes <= plan.limit_nbytes
    document = plan.as_dict()
    parts = (
        *("process", "resident", "checksum", "predictor", "request"),
        *("staging", "workspace", "bookkeeping", "page_table"),
    )
    fixed = sum(document[f"{part}_bytes"] for part in parts)
    assert fixed + document["kv_cache_bytes_full"] + document["neuron_cache_bytes_full"] == document["total_bytes"]
    assert fixed + document["kv_cache_bytes"] + document["neuron_cache_bytes"] == sum(starts)
    assert json.loads(json.dumps(document)) == document
    assert plan.process == PROCESS + LIBRARY_GROWTH
    assert plan.limit_nbytes == (PROCESS + PLENTY) * 4 // 5
    assert not plan.limit_is_given


def test_a_servers_requests_are_in_the_plan(model):
    """The largest bodies, the values in one, the text that becomes tokens, connections."""
    alone, served = plan_of(model), plan_of(model, serves=True)
    assert alone.requests == PROMPT_NBYTES
    assert served.requests - alone.requests == requests_nbytes(alone.context) > 5 * body_nbytes(alone.context)
    # And logits of those that are answered at once.
    more = served.requests - alone.requests + served.workspace - alone.workspace
    assert served.minimum_nbytes - alone.minimum_nbytes == more > served.requests - alone.requests
    assert 1 << 20 == body_nbytes(1) < body_nbytes(20_000) < body_nbytes(10**7) == 8 << 20


def test_text_that_is_certain_has_logits_in_the_plan(model):
    """Those of eight tokens, now and of the pass before: of answers with a form as of drafts."""
    alone, formed = plan_of(model), plan_of(model, has_form=True)
    assert formed.workspace - alone.workspace == 4 * 2 * 7 * model.block.vocab_size
    assert formed.workspace == plan_of(model, speculate="lookup").workspace


def test_every_limit_from_the_minimum_on_is_kept(model):
    least = plan_of(model).minimum_nbytes
    before = (0, 0, 0)
    for extra in (0, 1, 511, 512, 100_000, 300_000, 10**6, 10**8):
        plan = plan_of(model, memory=least + extra)
        assert plan.limit_nbytes == least + extra
        assert plan.limit_is_given
        assert kept(plan)
        assert all(now >= then for now, then in zip(plan.full_cache_rows, before, strict=True))
        assert plan.minimum_nbytes == least
        before = plan.full_cache_rows
    plan = plan_of(model, memory=least)
    assert plan.full_cache_rows == plan.min_cache_rows == (64, 64, 64)
    assert plan.max_pages == plan.context_pages == 2
    assert before == (512, 512, 512)


def kept(plan):
    """Whether the limit holds, and every layer its minimum, with any number of pages in use."""
    for pages in range(plan.max_pages + 1):
        rows = plan.cache_rows_at(pages)
        nbytes = max(1, pages) * plan.page_nbytes + plan.neuron_cache_nbytes(pages)
        if plan.fixed_nbytes + nbytes > plan.limit_nbytes:
            return False
        if any(row < least for row, least in zip(rows, plan.min_cache_rows, strict=True)):
            return False
    return True


# The KV cache and the neuron caches share what is left


@pytest.mark.parametrize("options", [{}, {"popularity": True}, {"cache_policy": "window"}], ids=str)
def test_each_page_takes_rows_from_the_layers_that_need_them_least(model, options):
    random = np.random.default_rng(0)
    popularity = random.random((3, 512)).astype(np.float32) * np.array([[1], [0.5], [0.1]], np.float32)
    options = options | {"popularity": popularity} if options.get("popularity") else options
    least = plan_of(model, **options).minimum_nbytes
    plan = plan_of(model, memory=least + 500_000, **options)
    assert kept(plan)
    assert plan.cache_rows == plan.cache_rows_at(0) == plan.cache_rows_at(1)
    at_most = (plan.limit_nbytes - plan.fixed_nbytes) // plan.row_nbytes
    for pages in range(1, plan.max_pages):
        rows, after = plan.cache_rows_at(pages), plan.cache_rows_at(pages + 1)
        assert all(now >= then for now, then in zip(rows, after, strict=True))
        left = at_most - plan.bypass_rows - pages * plan.page_nbytes // plan.row_nbytes
        assert sum(rows) == pytest.approx(min(left, 3 * 512), abs=1)
        if "popularity" in options:
            assert rows == share_by_popularity(sum(rows), plan.min_cache_rows, popularity)
        else:
            assert rows == share_rows(sum(rows), [512] * 3)
    assert sum(plan.cache_rows_at(plan.max_pages)) < 3 * 64 + plan.page_nbytes // plan.row_nbytes + 1
    with pytest.raises(ValueError, match=f"the plan holds 0 to {plan.max_pages} pages, not"):
        plan.cache_rows_at(plan.max_pages + 1)


@given(st.integers(0, 3_000_000), st.integers(1, 96), st.booleans(), st.integers(0, 99))
def test_any_plan_keeps_its_limit_at_any_length(model, extra, context, popular, seed):
    popularity = np.random.default_rng(seed).random((3, 512)).astype(np.float32) if popular else None
    least = plan_of(model, context=context).minimum_nbytes
    plan = plan_of(model, memory=least + extra, context=context, popularity=popularity)
    assert kept(plan)
    assert plan.max_pages >= plan.context_pages == -(-context // PAGE_TOKENS)


def test_a_page_is_64_positions_of_all_layers(model):
    plan = plan_of(model)  # keys and values, 3 layers, 2 heads of 32, fp32
    assert plan.page_nbytes == 2 * 3 * 2 * 32 * 4 * 64
    assert plan.rows()[-2][1:] == (plan.page_nbytes, 2 * plan.page_nbytes)


def test_a_long_context_costs_nothing_at_the_start(model):
    limit = plan_of(model).minimum_nbytes + 600_000
    long, short = (plan_of(model, memory=limit, context=context) for context in (96, 64))
    scores = long.workspace - short.workspace
    assert sum(short.cache_rows) - sum(long.cache_rows) <= scores // long.row_nbytes + 1
    assert sum(long.full_cache_rows) < sum(long.cache_rows)


def test_the_workspace_is_that_of_a_block_of_tokens(model):
    manifest = dataclasses.replace(model.manifest, prefill_block_tokens=16)
    scores = 4 * model.block.heads  # bytes of a position
    assert plan_of(model, manifest).workspace < plan_of(model).workspace
    assert plan_of(model, manifest).workspace == plan_of(model, manifest, context=32).workspace + 64 * scores


def test_prompts_take_less_where_memory_is_short(model):
    """Shorter parts, fewer blocks ahead, and what that spares are the neurons'; the minimum is that of the least."""
    manifest = resized(model.manifest, d_ff=200_000)
    model = SimpleNamespace(block=dataclasses.replace(model.block, context=512))
    options = {"context": 300}
    roomy = plan_of(model, manifest, **options)
    tight = plan_of(model, manifest, memory=roomy.minimum_nbytes + 10**6, **options)
    assert (roomy.prompt_tokens, roomy.read_ahead) == (256, 6)
    assert (tight.prompt_tokens, tight.read_ahead) == (128, 3)
    assert tight.minimum_nbytes == roomy.minimum_nbytes
    assert tight.fixed_nbytes + roomy.work_extra + roomy.bookkeeping - tight.bookkeeping == roomy.fixed_nbytes
    assert tight.bookkeeping - tight.bookkeeping_extra == roomy.bookkeeping - roomy.bookkeeping_extra
    assert roomy.work_extra > 3 * manifest.stream_block_rows * manifest.rows.stride

    dense = plan_of(model, manifest, memory=tight.limit_nbytes, dense=True, **options)
    assert (dense.prompt_tokens, dense.read_ahead, dense.work_extra) == (256, 6, 0)
    experts = resized(manifest, experts=8, chosen_experts=2)
    least = plan_of(model, experts, **options).minimum_nbytes
    mixed = plan_of(model, experts, memory=least, **options)
    assert (mixed.prompt_tokens, mixed.read_ahead) == (256, 3)


def test_experts_are_guessed_where_some_do_not_fit_and_there_is_room(model):
    manifest = resized(model.manifest, d_ff=12_800, experts=200, chosen_experts=2, activation="silu")
    least = plan_of(model, manifest).minimum_nbytes
    stride = manifest.rows.stride
    buffers, every = 2 * 2 * 64 * stride, sum(manifest.architecture.every_width) * stride
    for more, guessed in ((0, False), (10 * buffers, False), (every // 2, True), (2 * every, False)):
        plain, plan = (plan_of(model, manifest, memory=least + more, prefetch=prefetch) for prefetch in (False, True))
        assert plan.minimum_nbytes == least
        assert plan.prefetch_rows == (2 * 64 if guessed else 0)
        assert plan.staging - plain.staging == (buffers if guessed else 0)
        assert plan.total_nbytes <= plan.limit_nbytes


@given(st.integers(1, 5000), st.integers(1, 300), st.data())
def test_a_stretch_has_no_more_tokens_than_it_borrows_for(model, tokens, part, data):
    plan = dataclasses.replace(plan_of(model), prompt_tokens=part)
    parts = -(-tokens // part)
    stretches = data.draw(st.integers(1, parts))
    cuts = [tokens * (parts * i // stretches) // parts for i in range(stretches + 1)]  # as csrc/model/model.cpp
    longest = max(end - begin for begin, end in itertools.pairwise(cuts))
    assert longest <= plan.longest_stretch(tokens, stretches) <= part * -(-parts // stretches)
    assert plan.lent_nbytes(longest) == max(0, longest - min(part, plan.context)) * plan.stretch_nbytes


def test_a_prompt_borrows_of_the_neuron_caches(model):
    """A third of them at most."""
    plan = dataclasses.replace(plan_of(model), prompt_tokens=32, context=10**6)
    assert plan.prompt_tokens < plan.stretch_tokens < plan.context
    assert plan.lent_nbytes(plan.stretch_tokens) <= plan.neuron_cache // 3
    assert plan.lent_nbytes(plan.prompt_tokens) == 0
    assert plan.as_dict()["stretch_tokens"] == plan.stretch_tokens


def test_requests_at_once_leave_the_neurons_half_of_their_memory(model):
    found = set()
    minimum = plan_of(model).minimum_nbytes
    for limit in range(minimum, minimum + 6_000_000, 100_000):
        plan = plan_of(model, memory=limit)
        found.add(plan.shared_tokens)
        pages, half = plan.shared_tokens // 64, plan.neuron_cache_nbytes(1) / 2
        assert plan.neuron_cache_nbytes(pages) >= half
        assert pages == plan.max_pages or plan.neuron_cache_nbytes(pages + 1) < half
        assert plan.as_dict()["shared_tokens"] == plan.shared_tokens
    assert len(found) > 8


def test_more_conversations_than_the_machine_holds_are_not_planned(model):
    """A limit above what the machine has: one conversation fits, and others get what is really there."""
    plan = plan_of(model, memory=10**12, available=10**9)
    assert plan.cache_rows == plan.full_cache_rows == (512, 512, 512)
    assert plan.fixed_nbytes + plan.max_pages * plan.page_nbytes <= PROCESS + 10**9


def test_many_layers_and_the_least_memory(model):
    """Where a tenth of the rows would be bypass rows at the layers' cost."""
    manifest = resized(model.manifest, d_ff=2048, num_layers=40)
    plan = plan_of(model, manifest, memory=plan_of(model, manifest).minimum_nbytes)
    assert kept(plan)
    assert (plan.full_cache_rows, plan.bypass_rows) == ((64,) * 40, 64)


def test_a_plan_of_a_large_model_is_made_in_a_moment(model):
    manifest = resized(model.manifest, d_ff=16384, num_layers=32)
    popularity = np.random.default_rng(0).random((32, 16384)).astype(np.float32)
    begun = time.perf_counter()
    plan = plan_of(model, manifest, memory=plan_of(model, manifest).minimum_nbytes + 10**8, popularity=popularity)
    assert time.perf_counter() - begun < 2
    assert len(plan.levels) > 50


def test_a_calibrated_layer_gets_no_more_than_its_need(model):
    """Under the window; other policies make use of every row."""
    manifest = calibrated(model, (10, 600, 100))
    assert plan_of(model, manifest).cache_rows == (512, 512, 512)
    plan = plan_of(model, manifest, cache_policy="window")
    assert plan.bypass_rows == 0
    assert plan.cache_rows == plan.full_cache_rows == (10, 512, 100)
    assert plan.min_cache_rows == (10, 64, 64)
    wider = plan_of(model, manifest, cache_policy="window", window=6)
    assert wider.cache_rows == (512, 512, 512)  # measured for a smaller window
    limit = plan.minimum_nbytes + 100 * plan.row_nbytes
    tight = plan_of(model, manifest, cache_policy="window", memory=limit)
    free = limit - tight.fixed_nbytes - tight.context_pages * tight.page_nbytes
    assert 10 + 64 + 64 < sum(tight.full_cache_rows) == free // tight.row_nbytes < 10 + 64 + 64 + 100
    assert tight.cache_rows[0] == tight.full_cache_rows[0] == 10


def test_a_calibrated_need_of_nothing_still_has_a_row(model):
    manifest = calibrated(model, (0, 5, 5))
    plan = plan_of(model, manifest, cache_policy="window")
    assert min(plan.cache_rows) >= 1
    least = plan_of(model, manifest, cache_policy="window", memory=plan.minimum_nbytes)
    assert min(least.cache_rows) >= 1


def test_bypass_rows_are_planned_and_shared_by_the_layers(model):
    manifest = resized(model.manifest, d_ff=4096)
    plan = plan_of(model, manifest)
    assert (plan.bypass_rows, plan.min_bypass_rows) == (256, 64)
    assert plan.neuron_cache == (sum(plan.cache_rows) + 256) * plan.row_nbytes
    tight = plan_of(model, manifest, memory=plan.minimum_nbytes + 1000 * plan.row_nbytes)
    free = tight.limit_nbytes - tight.fixed_nbytes - tight.context_pages * tight.page_nbytes
    assert 64 < tight.bypass_rows == free // plan.row_nbytes // 10 < 256  # a tenth of what a full context leaves
    assert sum(tight.full_cache_rows) + tight.bypass_rows == free // plan.row_nbytes


def test_context_and_threads_are_paid_for(model):
    plan = plan_of(model)
    assert (plan.context, plan.context_pages) == (96, 2)
    assert plan_of(model, context=64).context_pages == 1
    assert plan_of(model, io_threads=4).staging < plan.staging
    assert plan_of(model, context=1).minimum_nbytes < plan.minimum_nbytes
    assert plan_of(model, prefetch=True).staging == plan.staging + 2 * (512 // 32) * plan.row_nbytes


# Refusals


def test_below_the_minimum_is_refused_with_what_would_do(model):
    least = plan_of(model).minimum_nbytes
    with pytest.raises(BudgetError) as refusal:
        plan_of(model, memory=least - 1)
    message = str(refusal.value)
    assert "cannot hold this model: it needs at least" in message
    assert "neuron cache" in message
    assert "shorten --context (now 96 tokens)" in message
    named = int(re.search(r"use --memory (\d+)MB or more", message)[1]) * 10**6
    assert least + 10**6 < named <= least + 2 * 10**6  # what the libraries take varies from start to start
    assert plan_of(model, memory=named).cache_rows


def test_a_machine_that_is_too_small_is_named(model):
    with pytest.raises(BudgetError, match="this machine has 1 MB left; close other programs"):
        plan_of(model, available=10**6)


def test_more_than_the_machine_has_is_refused(model):
    least = plan_of(model).minimum_nbytes
    short = least - PROCESS - 1
    with pytest.raises(BudgetError, match=r"lower --memory to at most .*, or close other programs"):
        plan_of(model, memory=least, available=short)
    assert plan_of(model, memory=least, available=short + 1).total_nbytes == least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "--context must be at least 1, not 0"),
        ({"context": 97}, "--context must be 1 to 96 tokens for this model, not 97"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(model, options, message):
    with pytest.raises(UsageError, match=message):
        plan_of(model, **options)
