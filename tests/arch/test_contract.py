"""Every architecture file, run: a tiny random model of each variant gives transformers' logits.

First through the plain reading of its `BlockSpec` in tests/arch_reference.py, which says whether the file is right;
then through the engine, which says whether the native core does what the file says.
"""

import numpy as np
import pytest
import torch
from arch_models import CONTEXT, VARIANTS, make_model, open_model
from arch_reference import ReferenceDecoder

from flashllm.arch.registry import ARCHITECTURES
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import UsageError
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.plan.resolve import check_mode

TOLERANCE = 2e-4  # of fp32 logits, which are of the order of 1 to 10
LENGTHS = (1, 5, 8, 9, 70, 150)  # about the few-token limit (8), over a KV block (64) and two


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """(transformers' model, model directory) of a variant, made once."""
    made = {}

    def get(name):
        if name not in made:
            source, directory = make_model(tmp_path_factory.mktemp("contract"), name)
            made[name] = open_model(source), directory
        return made[name]

    return get


def tokens(count, seed=0):
    return torch.randint(4, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def expected_logits(reference, ids):
    """[tokens, vocab] of one sequence, by transformers."""
    return reference(torch.tensor([ids])).logits[0]


def test_every_architecture_has_a_variant():
    assert {variant.model_type for variant in VARIANTS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_block_spec_means_what_transformers_computes(model_of, name):
    reference, directory = model_of(name)
    ids = tokens(CONTEXT)
    logits = expected_logits(reference, ids)
    assert float(logits.std()) > 0.1
    torch.testing.assert_close(ReferenceDecoder(directory).logits(ids), logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_without_sparsity_runs_densely_alone(model_of, name):
    _, directory = model_of(name)
    model = ModelDir.open(directory)
    check_mode("dense", model)
    assert (PREDICTORS in model.manifest.files) == model.architecture.sparse
    if model.manifest.sparse:
        check_mode("sparse", model)
        return
    for mode in ("sparse", "oracle"):
        with pytest.raises(UsageError, match=f"mode {mode} needs an activation of the ReLU family.*use --mode dense"):
            check_mode(mode, model)


def modes_of(directory):
    """The modes whose logits are transformers': untrained predictors leave neurons out, routers do not."""
    architecture = ModelDir.open(directory).architecture
    if architecture.experts:
        return ("dense",) if architecture.sparse else ("sparse", "dense")
    return ("dense", "oracle") if architecture.sparse else ("dense",)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_engine_gives_the_logits_of_transformers(model_of, name):
    reference, directory = model_of(name)
    for mode in modes_of(directory):
        with Model.open(directory, RunConfig(mode=mode, threads=1, io_threads=4)) as model:
            for length in LENGTHS:
                ids = tokens(length, seed=length)
                sequence = model.new_sequence()
                logits = model.step([(sequence, ids)], all_logits=True)
                np.testing.assert_allclose(logits, expected_logits(reference, ids).numpy(), atol=TOLERANCE, rtol=0)
                sequence.close()


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_goes_on_from_a_prompt(model_of, name):
    reference, directory = model_of(name)
    ids = tokens(75)
    logits = expected_logits(reference, ids).numpy()
    for mode in modes_of(directory):
        with Model.open(directory, RunConfig(mode=mode, threads=1, io_threads=4)) as model:
            sequence = model.new_sequence()
            found = model.step([(sequence, ids[:60])])  # over the edge of a KV block below
            np.testing.assert_allclose(found[0], logits[59], atol=TOLERANCE, rtol=0)
            for at in range(60, len(ids)):
                found = model.step([(sequence, [ids[at]])])
                np.testing.assert_allclose(found[0], logits[at], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_conversation_of_greedy_tokens(model_of, name):
    """Turns: a prompt, its answer, a longer prompt after both, its answer; each token is transformers' best."""
    reference, directory = model_of(name)
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        sequence, said = model.new_sequence(), []
        for turn in (tokens(7, seed=1), tokens(66, seed=2)):
            found, first = model.step([(sequence, turn)]), len(said) + len(turn) - 1
            said += turn
            for _ in range(4):
                said.append(int(found[0].argmax()))
                found = model.step([(sequence, said[-1:])])
            expected = expected_logits(reference, said).numpy()
            assert said[first + 1 :] == expected[first:-1].argmax(-1).tolist()


def outliers(found, expected, tolerance):
    """Tokens whose logits are further from what is expected."""
    return int((np.abs(found - expected).max(-1) > tolerance).sum())


@pytest.mark.parametrize("name", {variant.model_type: name for name, variant in VARIANTS.items()}.values())
def test_bfloat16_is_as_close_as_transformers(tmp_path, name):
    """To what fp32 makes of the same rounded weights, in one prompt and token by token."""
    source, directory = make_model(tmp_path, name, dtype="bfloat16")
    reference, ids = open_model(source), tokens(80)
    theirs = expected_logits(reference.to(torch.bfloat16), ids).float().numpy()
    exact = expected_logits(reference.to(torch.float32), ids).numpy()
    tolerance = 2.0 * np.abs(theirs - exact).max() + 0.02 * exact.std()
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        sequence = model.new_sequence()
        both = model.step([(sequence, ids[:72]), (model.new_sequence(), ids[:8])], all_logits=True)
        prompt, few = np.split(both, [72])
        tail = [model.step([(sequence, [token])])[0] for token in ids[72:]]
    found = np.concatenate([prompt, tail])
    if not ModelDir.open(directory).architecture.experts:
        assert outliers(found, exact, tolerance) == outliers(few, exact[:8], tolerance) == 0
        return
    # Where two experts are as good as each other, rounding decides: a few tokens go to another one than in fp32, which
    # is far off, and those behind them see it, which is less.
    assert np.median(np.abs(found - exact).max(-1)) <= tolerance
    assert outliers(found, exact, 5 * tolerance) <= 8


@pytest.mark.parametrize("name", VARIANTS)
def test_sequences_of_one_pass_do_not_see_each_other(model_of, name):
    reference, directory = model_of(name)
    with Model.open(directory, RunConfig(mode="dense", threads=1, io_threads=4)) as model:
        prompts = [tokens(length, seed=length) for length in (3, 12, 20)]
        found = model.step([(model.new_sequence(), ids) for ids in prompts])
        for logits, ids in zip(found, prompts, strict=True):
            np.testing.assert_allclose(logits, expected_logits(reference, ids).numpy()[-1], atol=TOLERANCE, rtol=0)
