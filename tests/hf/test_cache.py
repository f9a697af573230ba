"""FlashCache: rows that share sequences, part, come and go; and that its memory goes back."""

import copy
import gc

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, Variant, make_checkpoint
from generating import greedy, ids_of
from transformers import DynamicCache

from flashllm.errors import ChecksumError, UsageError
from flashllm.hf.model import FlashModel


@pytest.fixture
def flash(shared):
    return shared("random", "bfloat16")


def after(flash, *parts):
    """Logits [rows, vocab] after the last of some batches of ids, run one after the other over one cache."""
    cache = flash.new_cache()
    for ids in parts:
        logits = flash(ids, past_key_values=cache).logits[:, -1]
    return logits


def num_pages(flash):
    gc.collect()
    return flash.engine._memory.pages


def test_rows_of_the_same_tokens_are_computed_once_and_part_later(flash):
    prompt, tokens = ids_of(30), torch.tensor([[7], [8], [7]])
    cache = flash.new_cache()
    flash.engine.meter.restart()
    flash(prompt, past_key_values=flash.new_cache())
    once = flash.engine.meter.take().bytes_read
    logits = flash(prompt.repeat(3, 1), past_key_values=cache).logits
    assert flash.engine.meter.take().bytes_read == once > 0
    assert torch.equal(logits[0], logits[1])
    assert num_pages(flash) == 1
    flash(tokens, past_key_values=cache)
    assert num_pages(flash) == 2
    assert cache.lengths == [31, 31, 31]
    parted = flash(torch.tensor([[9], [9], [10]]), past_key_values=cache).logits[:, -1]
    for row, (first, second) in enumerate([(7, 9), (8, 9), (7, 10)]):
        assert torch.equal(
            parted[row : row + 1], after(flash, prompt, torch.tensor([[first]]), torch.tensor([[second]]))
        )


def test_rows_are_selected_reordered_repeated(flash):
    prompts, then = ids_of(12, rows=3), ids_of(1, rows=3, seed=1)
    expected = [after(flash, prompts[row : row + 1], then[row : row + 1]) for row in range(3)]
    cache = flash.new_cache()
    flash(prompts, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(flash(then[[2, 0, 1]], past_key_values=cache).logits[1, -1:], expected[0])
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([True, False, False, False, False, True]))
    assert cache.batch_size == 2
    logits = flash(then[[2, 1]], past_key_values=cache).logits[:, -1]
    assert torch.equal(logits, torch.cat([expected[2], expected[1]]))
    with pytest.raises(UsageError, match=r"has 2 rows and input_ids 3.*batch_repeat_interleave"):
        flash(then, past_key_values=cache)
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor([2, 0]))


def test_a_cropped_cache_goes_on_as_if_nothing_had_been(flash):
    ids, mask = ids_of(12, rows=2), torch.ones((2, 12), dtype=torch.long)
    mask[1, :8] = 0
    cache = flash.new_cache()
    flash(ids, attention_mask=mask, past_key_values=cache)
    assert cache.lengths == [12, 4]
    then = ids_of(3, rows=2, seed=1)
    expected = flash(then, past_key_values=cache).logits
    cache.crop(-3)
    assert torch.equal(flash(then, past_key_values=cache).logits, expected)
    cache.crop(12)  # how many stay, as older transformers say it
    assert torch.equal(flash(then, past_key_values=cache).logits, expected)
    cache.crop(0)
    assert cache.get_seq_length() == 15
    cache.crop(-9)  # into the padding of row 1
    assert cache.lengths == [6, 0]
    cache.crop(-100)
    assert (cache.lengths, cache.get_seq_length()) == ([0, 0], 0)


def test_a_deep_copy_is_independent(flash):
    """A prefix computed once, gone on from twice."""
    prefix, first, second = ids_of(20), ids_of(3, seed=1), ids_of(3, seed=2)
    cache = flash.new_cache()
    flash(prefix, past_key_values=cache)
    other = copy.deepcopy(cache)
    assert torch.equal(flash(first, past_key_values=cache).logits[:, -1], after(flash, prefix, first))
    assert torch.equal(flash(second, past_key_values=other).logits[:, -1], after(flash, prefix, second))
    assert (len(cache), str(other)) == (3, "FlashCache(rows=1, columns=23, tokens=[23])")


def test_memory_goes_back_with_the_cache(flash):
    assert num_pages(flash) == 0
    held = [flash(ids_of(70)).past_key_values for _ in range(3)]
    assert num_pages(flash) == 6
    held[0].crop(-10)
    assert num_pages(flash) == 5
    held[1].reset()
    assert not held[1].is_initialized
    assert num_pages(flash) == 3
    del held
    assert num_pages(flash) == 0
    flash(ids_of(70), use_cache=False)
    flash.generate(ids_of(70), max_new_tokens=3, num_beams=3)
    assert num_pages(flash) == 0


def test_a_pass_that_fails_leaves_the_cache_as_it_was(flash):
    ids = ids_of(20)
    expected = greedy(flash, ids)
    cache = flash.new_cache()
    flash(ids.repeat(2, 1), past_key_values=cache)
    file = flash.engine.parts.file
    file.inject("flip", 0, count=10**6, argument=77)
    with pytest.raises(ChecksumError):
        flash(ids_of(20, rows=2, seed=1), past_key_values=cache)
    file.inject("error", 2**60)
    assert (cache.get_seq_length(), cache.lengths, num_pages(flash)) == (20, [20, 20], 1)
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1]))
    again = flash.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert len(again[0]) == len(expected)


def test_an_interruption_right_after_a_pass_leaves_the_cache_as_it_was(flash, monkeypatch):
    prompt, first, second = ids_of(20), ids_of(3, seed=1), ids_of(3, seed=2)
    cache, step = flash.new_cache(), flash.engine.step

    def interrupted(*args, **kwargs):
        step(*args, **kwargs)
        raise KeyboardInterrupt

    flash(prompt, past_key_values=cache)
    monkeypatch.setattr(flash.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flash(first, past_key_values=cache)
    monkeypatch.undo()
    assert cache.lengths == [20]
    assert torch.equal(flash(second, past_key_values=cache).logits[:, -1], after(flash, prompt, second))


def test_what_is_no_cache_of_this_model_is_refused(tiny, shared, flash):
    ids, other = ids_of(3), shared("random", "bfloat16", mode="sparse")
    for cache in (DynamicCache(), other.new_cache()):
        with pytest.raises(UsageError, match=r"not of this model: take one from model\.new_cache"):
            flash(ids, past_key_values=cache)
    with pytest.raises(UsageError, match="not of this model"):
        flash.generate(ids, past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(UsageError, match="give it to a FlashModel"):
        tiny("bfloat16").reference(ids, past_key_values=flash.new_cache())
    with pytest.raises(UsageError, match="cache_implementation is not supported"):
        flash.generate(ids, cache_implementation="static")


def test_columns_say_which_are_tokens(flash):
    ids, mask = ids_of(4, rows=2), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    cache = flash(ids, attention_mask=mask).past_key_values
    flash(ids[:, :2], past_key_values=cache)
    assert np.array_equal(cache.columns, [[True] * 6, [False] * 2 + [True] * 4])
    assert cache.get_mask_sizes(3) == (9, 0)
    assert cache.get_max_length() == flash.engine.context


def test_columns_that_a_window_no_longer_holds_are_computed_again(tmp_path):
    config = {**VARIANTS["mistral window"].config, "max_position_embeddings": 400}
    source = make_checkpoint(tmp_path / "hf", Variant("mistral", config))
    with FlashModel.from_pretrained(source, mode="dense", store=tmp_path / "store") as flash:
        ids = ids_of(300)
        cache = flash.new_cache()
        flash(ids, past_key_values=cache)
        for token in ids_of(3)[0]:
            flash(token.reshape(1, 1), past_key_values=cache)
        cache.crop(100)
        assert cache.lengths == [100]
        again = flash(ids[:, 100:110], past_key_values=cache).logits[:, -1]
        assert torch.equal(again, flash(ids[:, :110]).logits[:, -1])
