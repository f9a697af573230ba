"""Sequences of models with sliding windows: their layers give up what lies behind, and no bit changes by it."""

import dataclasses

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint, open_model
from planned import ids_of, saved_pages
from talking import Letters

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.parked.folder import ParkingFolder
from flashllm.serve.conversations import Conversations

NAMES = ("mistral window", "gemma3", "gpt_oss")
CONTEXT, PAGE = 1400, 64
BEGINNING = 500  # tokens that prompts begin with alike


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(Hugging Face folder, model directory) of a variant with a long context, made once."""
    folders = {}

    def get(name):
        if name not in folders:
            root, variant = tmp_path_factory.mktemp("state"), VARIANTS[name]
            config = {**variant.config, "max_position_embeddings": CONTEXT}
            source = make_checkpoint(root / "hf", dataclasses.replace(variant, config=config))
            convert(source, root / "model")
            folders[name] = source, root / "model"
        return folders[name]

    return get


@pytest.fixture(params=NAMES)
def model(made, request):
    with Model.open(made(request.param)[1], RunConfig(mode="dense", threads=1, io_threads=4, direct=False)) as model:
        yield model


def logits_of(model, *passes):
    """After each pass of a sequence that has the model to itself."""
    with model.new_sequence() as sequence:
        return [model.step([(sequence, ids)], as_prompt=True)[0] for ids in passes]


def held(model):
    return model._memory.pool.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_long_contexts_have_transformers_logits(made, name):
    source, directory = made(name)
    ids = ids_of(CONTEXT)
    with torch.no_grad():
        expected = open_model(source)(torch.tensor([ids])).logits[0].numpy()
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        sequence = model.new_sequence()
        found = [model.step([(sequence, ids[:1000])], all_logits=True)]
        found += [model.step([(sequence, [token])]) for token in ids[1000:1070]]
        found += [model.step([(sequence, ids[1070:])], all_logits=True)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=4e-4, rtol=0)


def test_what_lies_behind_a_window_is_given_up(model):
    plan = model.plan.memory
    all_pages = -(-CONTEXT // PAGE) * plan.page_nbytes
    assert plan.context_pages * plan.page_nbytes < all_pages
    assert plan.rows()[-2][2] == plan.context_pages * plan.page_nbytes
    ids = ids_of(CONTEXT)
    with model.new_sequence() as sequence:
        for first in range(0, CONTEXT, 350):
            model.step([(sequence, ids[first : first + 350])])
            assert held(model) <= plan.context_pages * plan.page_nbytes
        sequence.keep(sequence.length - 1)
        model.step([(sequence, [7])])
        assert held(model) < 0.7 * all_pages
    assert held(model) == 0


def test_going_back(model):
    """Within a window exactly; behind it to the last checkpoint; where there is none, to nothing."""
    ids = ids_of(900)
    expected = logits_of(model, ids[:300], ids[300:700], ids[700:800], [9, 8, 7])
    with model.new_sequence() as sequence:
        found = [model.step([(sequence, ids[:300])], as_prompt=True)[0]]
        found += [model.step([(sequence, ids[300:700])], as_prompt=True)[0]]
        for token in ids_of(5):
            model.step([(sequence, [token])])
        assert (sequence.can_keep(700), sequence.keep(700)) == (700, 700)
        found += [model.step([(sequence, ids[700:800])], as_prompt=True)[0]]
        found += [model.step([(sequence, [9, 8, 7])], as_prompt=True)[0]]
        assert np.array_equal(found, expected)
        assert sequence.can_keep(600) == sequence.keep(600) == 300 // PAGE * PAGE
        assert np.array_equal(model.step([(sequence, ids[256:300])], as_prompt=True)[0], expected[0])
        for token in ids_of(200):
            model.step([(sequence, [token])])
        assert sequence.keep(40) == sequence.length == 0
        assert np.array_equal(model.step([(sequence, ids[:300])], as_prompt=True)[0], expected[0])


def test_the_last_pass_can_be_undone(model):
    ids = ids_of(900)
    expected = logits_of(model, ids[:300], [9])[1]
    with model.new_sequence() as sequence:
        model.step([(sequence, ids[:300])], as_prompt=True)
        for _ in range(2):
            model.step([(sequence, ids[300:])])
            assert sequence.keep(300) == 300
        assert np.array_equal(model.step([(sequence, [9])], as_prompt=True)[0], expected)


def test_a_copy_of_a_beginning(model):
    ids = ids_of(700)
    expected = logits_of(model, ids[:300], ids[256:320])[1]
    with model.new_sequence() as sequence, model.new_sequence() as copy:
        model.step([(sequence, ids[:300])], as_prompt=True)
        model.step([(sequence, ids[300:])], as_prompt=True)
        before = held(model)
        copy.copy_from(sequence)
        assert copy.keep(300) == 256
        assert held(model) == before
        assert np.array_equal(model.step([(copy, [*ids[256:300], *ids[256:320]])], as_prompt=True)[0], expected)


class Fails:
    """An observer that ends a pass in a layer of one of its parts."""

    def __init__(self, part, layer):
        self.part, self.layer, self.seen = part, layer, 0

    def input(self, layer, x):
        self.seen += layer == 0
        if (self.seen, layer) == (self.part, self.layer):
            raise ZeroDivisionError

    def activations(self, layer, first, h):
        pass


@pytest.mark.parametrize(("name", "bits"), [("mistral window", None), ("gemma3", None), ("gemma3", 8)])
@pytest.mark.parametrize("begun", [0, 100, 400])
def test_a_long_prompt_that_fails_in_its_middle_changes_nothing(made, name, bits, begun):
    """The first parts have given up pages of the pass itself, and would give up those that were there before."""
    ids = ids_of(1300)
    with Model.open(made(name)[1], RunConfig(mode="dense", threads=1, io_threads=4, cache_bits=bits)) as model:
        expected = logits_of(model, *([ids[:begun]] if begun else []), ids[begun:1000], [9, 10])
        sequence, other = model.new_sequence(), model.new_sequence()
        if begun:
            model.step([(sequence, ids[:begun])], as_prompt=True)
        before = held(model)
        for part, layer in ((1, 0), (2, 1), (3, 2)):
            with pytest.raises(ZeroDivisionError):
                model.step([(sequence, ids[begun:]), (other, [5])], observer=Fails(part, layer))
            assert (sequence.length, other.length) == (begun, 0)
            assert held(model) <= before
        found = [model.step([(sequence, ids[begun:1000])], as_prompt=True)[0]]
        found += [model.step([(sequence, [9, 10])], as_prompt=True)[0]]
        assert np.array_equal(found, expected[-2:])


def test_what_is_kept_elsewhere_comes_back(model):
    """The pages that its windows see alone."""
    ids = ids_of(900)
    expected = logits_of(model, ids, [9, 8])[1]
    with model.new_sequence() as sequence, model.new_sequence() as other:
        model.step([(sequence, ids)], as_prompt=True)
        kept, fill = saved_pages(sequence)
        assert min(len(pages) for pages in kept) < -(-900 // PAGE)
        for wrong in ([1] * len(kept), [99] * len(kept), []):
            with pytest.raises(UsageError, match="KV cache"):
                other.restore(900, wrong, fill)
        other.restore(900, [len(pages) for pages in kept], fill)
        assert np.array_equal(model.step([(other, [9, 8])], as_prompt=True)[0], expected)
        assert other.keep(300) == 0


def session(model):
    return Session(model, Letters(), SamplingOptions(max_new_tokens=4))


def conversations(model, **options):
    return Conversations(lambda: session(model), model, budget=10**9, **options)


def asked(model, store, seed, **options):
    """A prompt of a beginning that all have and 300 tokens of its own: how many tokens of it were there already. The
    answer is that of a session that has the model to itself."""
    ids = [*ids_of(BEGINNING), *ids_of(300, seed)]
    expected = [each.token_id for each in session(model).stream_ids(ids) if isinstance(each, TokenRecord)]
    place = store.take(ids, **options)
    first, *records = place.session.stream_prompt(ids, keep=place.keep)
    assert first.tokens + first.reused_tokens == len(ids)
    assert [each.token_id for each in records] == expected
    store.give_back(place, bytes([seed]))
    return first.reused_tokens


def test_prompts_that_begin_alike_share_what_the_windows_left(model):
    """The first leaves no state where they part; the second does, and the third goes on from it."""
    store = conversations(model)
    assert [asked(model, store, seed) for seed in (1, 2, 3)] == [0, 0, BEGINNING // PAGE * PAGE]
    store.close()


def test_prompts_that_are_told_to_begin_alike_share_it_at_once(model, tmp_path):
    """The first leaves a state where the beginning ends, within its one pass; it stays when the first is gone, and is
    parked by itself."""

    def opened():
        return conversations(model, parking=ParkingFolder(tmp_path, "model", max_nbytes=10**9, daily_nbytes=10**9))

    store = opened()
    assert [asked(model, store, seed, marks=[BEGINNING]) for seed in (1, 2)] == [0, 448]
    assert store.make_room()
    assert store.make_room()
    assert len(store) == 1  # what both begin with
    assert asked(model, store, 3, marks=[BEGINNING]) == 448
    store.close()
    assert held(model) == 0
    store = opened()  # as after a restart
    assert asked(model, store, 4, marks=[BEGINNING]) == 448
    store.close()


# Packed pages


@pytest.fixture(params=[8, 4])
def packed(made, request):
    """A model one of whose kinds of layers has a window, and whose keys and values are packed."""
    config = RunConfig(mode="dense", threads=2, io_threads=4, cache_bits=request.param)
    with Model.open(made("gemma3")[1], config) as model:
        yield model


def test_packed_pages_change_no_bit_by_how_a_prompt_is_cut(packed, made):
    """In pieces of any size, with steps back between them; and tokens one by one as in a pass of several."""
    ids, random = ids_of(1300), np.random.default_rng(3)
    with packed.new_sequence() as sequence, packed.new_sequence() as pieces, packed.new_sequence() as other:
        expected = packed.step([(sequence, ids[:1200])], all_logits=True, as_prompt=True)
        found = np.empty_like(expected)
        while pieces.length < 1200:
            at, size = pieces.length, int(random.choice([1, 7, 40, 64, 100, 300]))
            piece = ids[at : min(at + size, 1200)]
            found[at : at + len(piece)] = packed.step([(pieces, piece)], all_logits=True, as_prompt=True)
            back = max(0, pieces.length - int(random.choice([0, 0, 3, 30, 200])))
            kept = pieces.keep(back)
            assert kept in (back, back // PAGE * PAGE, at) or kept % PAGE == 0
        assert np.array_equal(found, expected)
        other.copy_from(pieces)
        single = [packed.step([(sequence, [token])]) for token in ids[1200:]]
        several = [packed.step([(other, ids[at : at + 4])], all_logits=True) for at in range(1200, 1300, 4)]
        assert np.array_equal(np.concatenate(single), np.concatenate(several))
    with Model.open(made("gemma3")[1], RunConfig(mode="dense", threads=1, io_threads=4)) as plain:
        exact = plain.step([(plain.new_sequence(), ids[:1200])], all_logits=True)
        assert np.array_equal(expected[:PAGE], exact[:PAGE])  # they see no page but their own
        error = np.abs(expected - exact)[PAGE:].mean() / exact.std()
        assert 1e-4 < error < (0.005 if packed.config.cache_bits == 8 else 0.08)
        assert packed.plan.memory.context_pages < plain.plan.memory.context_pages
        assert packed.arithmetic != plain.arithmetic
