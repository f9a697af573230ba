"""Latent attention of prompts: keys and values of every head, made from the cache's rows once a stretch. That they are
right the contract test says; here that nothing depends on how many are made at a time, and when they are made."""

import numpy as np
import pytest
from planned import ids_of, planned

from flashllm import _core
from flashllm.config import RunConfig

PART = 32


def opened(directory, bits=None, **fields):
    config = RunConfig(threads=2, io_threads=4, mode="dense", cache_bits=bits)
    return planned(directory, config, **{"prompt_tokens": PART, **fields})


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "packed"])
@pytest.mark.parametrize("name", ["youtu", "deepseek_v3"])
def test_heads_at_a_time_change_no_bit(variant_of, name, bits):
    """Of four; in parts and stretches, beside another prompt, behind a page and a half that are there already."""
    ids, short = ids_of(150), ids_of(40, seed=1)
    found = []
    with opened(variant_of(name)[1], bits) as model:
        for heads, stretches in ((0, 1), (1, 1), (2, 3), (3, 0), (9, 2)):
            with model.new_sequence() as sequence, model.new_sequence() as other:
                _core.Pass(model.parts.native, [(sequence.native, ids[:100])], "prompt", expanded=heads).advance(1e9)
                entries = [(sequence.native, ids[100:]), (other.native, short)]
                one = _core.Pass(
                    model.parts.native, entries, "prompt", all_logits=True, stretches=stretches, expanded=heads
                )
                found.append(one.advance(1e9))
    for each in found[1:]:
        assert np.array_equal(each, found[0])


def test_a_prompt_behind_tokens_is_absorbed(variant_of):
    """Nobody computes it otherwise, so it need not make the keys of a whole conversation; in pieces it has its bits."""
    with opened(variant_of("deepseek_v2")[1]) as model, model.new_sequence() as sequence:
        made = lambda: model._claim_expanded([(sequence, ids_of(50))], 0)  # noqa: E731
        assert made()[0] == 4
        model.step([(sequence, ids_of(70))])
        assert made() == (4, model.plan.memory.expansion_nbytes(120, 4))
        model.step([(sequence, [5])])
        assert made() == (0, 0)
        whole = model.step([(sequence, ids_of(50))], all_logits=True)
        assert sequence.keep(71) == 71
        for first in range(0, 50, 10):
            piece = model.step([(sequence, ids_of(50)[first : first + 10])], all_logits=True, as_prompt=True)
            assert np.array_equal(piece, whole[first : first + 10])
        assert sequence.keep(70) == 70
        assert made()[0] == 4


def test_heads_are_as_many_as_the_neuron_caches_lend_memory_for(variant_of):
    with opened(variant_of("deepseek_v2")[1]) as model:
        memory, layers = model.plan.memory, model.manifest.architecture.num_layers
        of_head = memory.expansion_nbytes(150, 1)
    assert (memory.expanded_heads, memory.expanded_nbytes) == (4, 4 * (12 + 8 + 20))
    assert memory.as_dict()["expanded_token_bytes"] == 4 * memory.expanded_nbytes
    logits = []
    for pages, heads in ((1, 1), (2, 2), (3, 2), (4, 4), (100, 4)):
        fields = {"levels": np.zeros((1, layers), np.int32), "page_nbytes": of_head}
        directory = variant_of("deepseek_v2")[1]
        with opened(directory, level_pages=pages, **fields) as model, model.new_sequence() as sequence:
            assert model._claim_expanded([(sequence, ids_of(150))], 0) == (heads, heads * of_head * (heads > 1))
            if pages >= 4:
                logits.append(model.step([(sequence, ids_of(150))]))
    assert np.array_equal(logits[0], logits[1])


def test_what_is_made_is_in_the_plan(variant_of):
    """Of one head and the whole context, and the matrices that make keys."""
    plans = []
    for context in (96, 160):
        with planned(variant_of("youtu")[1], RunConfig(threads=1, mode="dense", context=context)) as model:
            plans.append(model.plan.memory)
    scores = 4 * model.directory.block.heads
    assert plans[1].workspace - plans[0].workspace >= 64 * (scores + plans[0].expanded_nbytes)
