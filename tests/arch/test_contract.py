"""Every variant of every architecture, and every way a sequence can go: each cell is green, or refuses in a sentence.

First through the plain reading of its `BlockSpec` in tests/arch_reference.py, which says whether the architecture's
file is right; then through both engines. What a token computes is compared with transformers; what a sequence does on
its way there (pieces, cuts, failures, copies, parking, drafts) must not change a bit, with keys and values plain and
packed.
"""

import dataclasses
import itertools
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import pytest
import torch
from arch_models import CONTEXT, VARIANTS, make_model, open_model, tokens
from arch_reference import ReferenceDecoder
from offload_runs import MIXED, answers, policy
from planned import saved_pages

from flashllm import _core
from flashllm.arch.registry import ARCHITECTURES
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import ContextFull, FlashIOError, UnsupportedModelError, UsageError
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.offload.runtime.accelerator.torch_ops import lacking
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.plan.memory import state_shape
from flashllm.plan.resolve import check_mode, resolve

TOLERANCE = 2e-4  # of fp32 logits, which are of the order of 1 to 10
PAGE = 64
RUN = {"threads": 1, "io_threads": 4}


@torch.no_grad()
def expected_logits(reference, ids):
    """[tokens, vocab] of one sequence, by transformers."""
    return reference(torch.tensor([ids])).logits[0].float().numpy()


class Made:
    """A variant; its models are opened when a cell needs them, and closed after the last."""

    def __init__(self, name, folders, stack):
        self.name, self.variant, self._stack = name, VARIANTS[name], stack
        self.source, self.directory = folders
        self.reference = open_model(self.source)
        self._bare, self._expected = {}, {}
        self.ids = tokens(CONTEXT)
        self.logits = self.expected(self.ids)  # of a sequence's beginning they are the first

    def expected(self, ids):
        """transformers' logits, computed once."""
        key = tuple(ids)
        if key not in self._expected:
            self._expected[key] = expected_logits(self.reference, ids)
        return self._expected[key]

    @cached_property
    def architecture(self):
        return ModelDir.open(self.directory).architecture

    @property
    def modes(self):
        """The modes whose logits are transformers': untrained predictors leave neurons out, routers do not."""
        if self.architecture.experts:
            return ("dense",) if self.architecture.sparse else ("sparse", "dense")
        return ("dense", "oracle") if self.architecture.sparse else ("dense",)

    def opened(self, config, **memory):
        """The model; `memory`: fields of its plan that are otherwise."""
        plan = resolve(config, ModelDir.open(self.directory), available=10**12, process=10**8)
        plan = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, **memory))
        return self._stack.enter_context(Model(ModelDir.open(self.directory), plan, config))

    @cached_property
    def ways(self):
        """By bits of the keys and values: the model, and its logits after every token of a prompt of all ids."""
        models = {bits: self.opened(RunConfig(**RUN, cache_bits=bits)) for bits in (None, 8)}
        return {bits: (model, run(model, self.ids)) for bits, model in models.items()}

    def bare(self, bits, *, lends=True):
        """The model that caches no row, whose prompts go in parts of 32 tokens; all of them through a layer before the
        next one where it lends memory for that."""
        if (bits, lends) not in self._bare:
            none = {"levels": np.zeros((1, self.architecture.num_layers), np.int32), "level_pages": 100}
            none |= {"prompt_tokens": 32} | ({} if lends else {"stretch_nbytes": 10**12})
            self._bare[bits, lends] = self.opened(RunConfig(**RUN, cache_bits=bits), **none)
        return self._bare[bits, lends]


@pytest.fixture(scope="module", params=VARIANTS)
def made(request, variant_of):
    with ExitStack() as stack:
        yield Made(request.param, variant_of(request.param), stack)


@pytest.fixture(params=[None, 8], ids=["plain", "packed"])
def way(request, made):
    """(bits, model, its logits of a prompt of all ids)"""
    return request.param, *made.ways[request.param]


def run(model, ids, sequence=None):
    """Logits after each of a prompt's tokens, which are computed as a prompt however few they are."""
    with ExitStack() as stack:
        sequence = sequence if sequence is not None else stack.enter_context(model.new_sequence())
        return model.step([(sequence, ids)], all_logits=True, as_prompt=True)


def one_by_one(model, sequence, ids):
    return np.concatenate([model.step([(sequence, [token])]) for token in ids])


def close(found, expected):
    """Of fp32 logits; the likeliest tokens are the same."""
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    same(found.argmax(-1), expected.argmax(-1))


def same(found, expected):
    assert np.array_equal(found, expected)


def test_every_architecture_has_a_variant():
    assert {variant.model_type for variant in VARIANTS.values()} == set(ARCHITECTURES)


def test_the_block_spec_means_what_transformers_computes(made):
    assert made.logits.std() > 0.1
    close(ReferenceDecoder(made.directory).logits(made.ids), made.logits)


def test_a_model_without_sparsity_runs_densely_alone(made):
    model = ModelDir.open(made.directory)
    check_mode("dense", model)
    assert (PREDICTORS in model.manifest.files) == model.architecture.sparse
    if model.manifest.sparse:
        check_mode("sparse", model)
        return
    for mode in ("sparse", "oracle"):
        with pytest.raises(UsageError, match=f"mode {mode} needs an activation of the ReLU family.*use --mode dense"):
            check_mode(mode, model)


# The columns: what is computed


def test_few_tokens(made):
    """From nothing, and behind a prompt; a conversation's second turn is a prompt again."""
    for mode in made.modes:
        model = made.opened(RunConfig(**RUN, mode=mode))
        for count in (1, 5, 8):
            with model.new_sequence() as sequence:
                close(model.step([(sequence, made.ids[:count])], all_logits=True), made.logits[:count])
        with model.new_sequence() as sequence:
            found = [model.step([(sequence, made.ids[:60])], all_logits=True)]
            found += [one_by_one(model, sequence, made.ids[60:70])]  # over the edge of a page
            found += [model.step([(sequence, made.ids[70:140])], all_logits=True)]
            found += [one_by_one(model, sequence, made.ids[140:144])]
        close(np.concatenate(found), made.logits[:144])


def test_prompts(made):
    """Several in a pass do not see each other, nor the few tokens beside them: each has the bits it has alone."""
    other = tokens(20, seed=1)
    entries = [made.ids[:9], other, made.ids[:70], made.ids[:3], made.ids[:150]]
    lengths = [len(ids) for ids in entries]
    for mode in made.modes:
        model = made.opened(RunConfig(**RUN, mode=mode))
        found = model.step([(model.new_sequence(), ids) for ids in entries], all_logits=True)
        alone = [model.step([(model.new_sequence(), ids)], all_logits=True) for ids in entries]
        for ids, together, one in zip(entries, np.split(found, np.cumsum(lengths)[:-1]), alone, strict=True):
            same(together, one)
            close(together, made.expected(other) if ids is other else made.logits[: len(ids)])


# The columns: a sequence's ways


def test_packed_pages_are_seen_from_the_next_page_on(made):
    _, packed = made.ways[8]
    same(packed[:PAGE], made.ways[None][1][:PAGE])
    error = np.abs(packed - made.logits)[PAGE:].mean() / made.logits.std()
    assert 1e-5 < error < 0.05
    model = made.opened(RunConfig(**RUN, mode="dense", cache_bits=8))
    with model.new_sequence() as sequence:  # by few tokens too, up to the page's last
        run(model, made.ids[:120], sequence)
        close(one_by_one(model, sequence, made.ids[120:128]), packed[120:128])


def test_a_prompt_in_pieces(made, way):
    _, model, expected = way
    with model.new_sequence() as sequence:
        cuts = (0, 1, 3, 36, 64, 100, 127, CONTEXT)
        pieces = [made.ids[start:end] for start, end in itertools.pairwise(cuts)]
        same(np.concatenate([run(model, piece, sequence) for piece in pieces]), expected)


def test_a_prompt_in_stretches(made, way):
    """Layer by layer, in parts of at most 32 tokens, however many at a time; with another prompt in the pass."""
    bits, _, expected = way
    model = made.bare(bits)
    for stretches in (1, 2, 3, 0):
        with model.new_sequence() as sequence, model.new_sequence() as other:
            entries = [(sequence.native, made.ids), (other.native, made.ids[:45])]
            found = _core.Pass(model.parts.native, entries, "prompt", True, None, 0, stretches).advance(1e9)
            same(found[:CONTEXT], expected)
            same(found[CONTEXT:], expected[:45])


def test_a_cut(made, way):
    """Exactly, or where that page is packed to the page before: the one that the last pass began in is not.

    A state cannot be cut: back to the last whole page behind a prompt, each of which leaves a checkpoint."""
    bits, model, expected = way
    of_state = {150: 128, 100: 64, 63: 0} if model.directory.block.recurrent else {}
    for length in (150, 100, 63):
        with model.new_sequence() as sequence:
            run(model, made.ids[:120], sequence)
            run(model, made.ids[120:], sequence)
            can = sequence.can_keep(length)
            assert sequence.keep(length) == sequence.length == can
            assert can == of_state.get(length, length if bits is None or length >= PAGE else 0)
            same(run(model, made.ids[can:], sequence), expected[can:])


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "packed"])
@pytest.mark.parametrize("lends", [True, False], ids=["a stretch", "parts"])
def test_a_long_prompt_that_ends_in_its_middle(made, bits, lends):
    """Nothing has changed, and again it succeeds; in parts, with every row read, it has the bits it has elsewhere."""
    (whole, expected), model = made.ways[bits], made.bare(bits, lends=lends)
    with model.new_sequence() as sequence, model.new_sequence() as other:
        same(run(model, made.ids[:20], sequence), expected[:20])
        held = model._memory.pool.nbytes
        entries = [(sequence, made.ids[20:]), (other, made.ids[:3])]  # the few come first

        def changes_nothing(error):
            with pytest.raises(error):
                model.step(entries, all_logits=True)
            assert (sequence.length, other.length, model._memory.pool.nbytes) == (20, 0, held)

        # Of at least 6 reads, or 18: three layers of the few tokens, and of one stretch or of five parts.
        for first in (0, 2, 5) if lends else (0, 5, 10, 17):
            model.parts.file.inject("error", first, count=10**6, argument=5)
            changes_nothing(FlashIOError)
        model.parts.file.inject("interrupt", 5)
        changes_nothing(KeyboardInterrupt)
        plan = model.plan.memory
        model.keep_to(plan.least_limit_nbytes(-(-held // plan.page_nbytes)))
        changes_nothing(ContextFull)
        model.keep_to(plan.limit_nbytes)
        model.parts.file.inject("error", 2**60)
        found = model.step(entries, all_logits=True)
        same(found[:-3], expected[20:])
        same(found[-3:], whole.step([(whole.new_sequence(), made.ids[:3])], all_logits=True))


def test_a_copy(made, way):
    """It goes its own way; what both have is there once."""
    _, model, expected = way
    with model.new_sequence() as first, model.new_sequence() as second:
        run(model, made.ids[:100], first)
        held = model._memory.pool.nbytes
        second.copy_from(first)
        assert model._memory.pool.nbytes == held
        run(model, tokens(20, seed=2), first)
        same(run(model, made.ids[100:], second), expected[100:])
        state = model.directory.block.state_nbytes + 4096  # that before the first one's last pass
        assert model._memory.pool.nbytes < 2 * held + model.plan.memory.page_nbytes + state
        assert first.keep(100) == 100
        same(run(model, made.ids[100:140], first), expected[100:140])


def test_what_a_conversation_holds_is_in_the_plan(made):
    """Prompts that each leave a checkpoint, and tokens between them."""
    model, _ = made.ways[None]
    if not model.directory.block.recurrent:
        return
    shape = state_shape(model.manifest, model.directory.block, CONTEXT, None)
    with model.new_sequence() as sequence:
        others = model._memory.pool.nbytes
        for first, end in itertools.pairwise((0, 30, 31, 66, 67, 100, 132, 133, 134)):
            most = model._memory.pool.nbytes - others + sequence.nbytes_to_add(end - first)
            assert most <= shape.nbytes(end)
            run(model, made.ids[first:end], sequence)


def test_parked_and_taken_up(made, way):
    """By another process, as far as bits go."""
    bits, model, expected = way
    with model.new_sequence() as sequence:
        run(model, made.ids[:100], sequence)
        kept, fill = saved_pages(sequence)
    bare = made.bare(bits)
    with bare.new_sequence() as other:
        other.restore(100, [len(pages) for pages in kept], fill, prompted=100)
        same(run(bare, made.ids[100:], other), expected[100:])


def test_speculation(made, way):
    """Drafts that fill a page, of which some are wrong, and what follows them: as token by token."""
    _, model, _ = way
    if model.directory.block.recurrent:
        assert model.most_drafted == 0
        with model.new_sequence() as sequence, pytest.raises(UsageError, match="drafted tokens are at most 0"):
            model.step([(sequence, made.ids[:3])], drafted=2)
        asked = resolve(RunConfig(**RUN, speculate="lookup"), model.directory, available=10**12, process=10**8)
        assert "no tokens are drafted" in asked.notices[-1]
        assert not any("drafted" in notice for notice in model.notices)
        return
    with model.new_sequence() as sequence, model.new_sequence() as drafting:
        run(model, made.ids[:60], sequence)
        run(model, made.ids[:60], drafting)
        expected = one_by_one(model, sequence, made.ids[60:76])
        found = []
        for at, right in ((60, 6), (66, 1), (67, 4), (71, 5)):
            drafted = [*made.ids[at : at + right], *tokens(model.most_drafted + 1 - right, seed=at)]
            rows = model.step([(drafting, drafted)], all_logits=True, drafted=len(drafted) - 1)
            model.accept(drafting, right - 1)
            assert drafting.keep(at + right) == at + right
            found.append(rows[:right])
        same(np.concatenate(found), expected)


@pytest.mark.parametrize("accelerator", [None, "cpu"], ids=["native", "torch"])
def test_offload(made, tmp_path, accelerator):
    """The throughput engine's greedy tokens are transformers', with weights, cache and hidden states in all tiers.

    Its weights are the model directory's, or with torch's operations the checkpoint's.
    """
    path = made.directory if accelerator is None else made.source
    block = ModelDir.open(made.directory).block
    if block.per_layer is not None:
        with pytest.raises(UnsupportedModelError, match="per-layer embeddings"):
            open_weights(path)
        return
    refused = False
    if accelerator is not None:
        with open_weights(made.source) as source:
            refused = bool(lacking(source.block))
    prompts = [made.ids[:1], made.ids[5:68], tokens(100, seed=3), tokens(7, seed=4)]
    chosen = policy(MIXED, MIXED, MIXED, cpu_attention=accelerator is not None)
    if refused:
        with pytest.raises(UnsupportedModelError, match="use --device cpu"):
            answers(path, prompts[:1], tmp_path, chosen, new=1, accelerator=accelerator)
        return
    found = answers(path, prompts, tmp_path, chosen, new=6, accelerator=accelerator)
    for prompt, said in zip(prompts, found, strict=True):
        expected = made.expected([*prompt, *said[:-1]])[len(prompt) - 1 :]
        assert said == expected.argmax(-1).tolist()


def outliers(found, expected, tolerance):
    """Tokens whose logits are further from what is expected."""
    return int((np.abs(found - expected).max(-1) > tolerance).sum())


@pytest.mark.parametrize("name", {variant.model_type: name for name, variant in VARIANTS.items()}.values())
def test_bfloat16_is_as_close_as_transformers(tmp_path, name):
    """To what fp32 makes of the same rounded weights, in one prompt and token by token."""
    source, directory = make_model(tmp_path, name, dtype="bfloat16")
    reference, ids = open_model(source), tokens(80)
    theirs = expected_logits(reference.to(torch.bfloat16), ids)
    exact = expected_logits(reference.to(torch.float32), ids)
    tolerance = 2.0 * np.abs(theirs - exact).max() + 0.02 * exact.std()
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        sequence = model.new_sequence()
        both = model.step([(sequence, ids[:72]), (model.new_sequence(), ids[:8])], all_logits=True)
        prompt, few = np.split(both, [72])
        tail = [model.step([(sequence, [token])])[0] for token in ids[72:]]
        block = model.directory.block
        if any(layer.recurrent and layer.recurrent.kind != "short_convolution" for layer in block.layers):
            state = np.concatenate(sequence.save()[-1]).view(np.uint32)  # in fp32, but for a convolution's inputs
            assert ((state & 0xFFFF) != 0).sum() > 0.3 * (state != 0).sum()
    found = np.concatenate([prompt, tail])
    if not ModelDir.open(directory).architecture.experts:
        assert outliers(found, exact, tolerance) == outliers(few, exact[:8], tolerance) == 0
        return
    # Where two experts are as good as each other, rounding decides: a few tokens go to another one than in fp32, which
    # is far off, and those behind them see it, which is less.
    assert np.median(np.abs(found - exact).max(-1)) <= tolerance
    assert outliers(found, exact, 5 * tolerance) <= 8
