"""Mixtures of experts: the router's experts are read, each once, and nothing that the cache does changes a bit."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from arch_models import LAYERS, open_model
from damage import flip
from safetensors.torch import load_file, save_file

from flashllm import _core
from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import Cancelled, ChecksumError, FormatError, NonFiniteError, UnsupportedModelError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, RESIDENT, ffn_tensor
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.format.rows import widened_rows
from flashllm.format.safetensors import open_safetensors
from flashllm.plan.resolve import resolve

COUNT, CHOSEN, SIZE = 8, 3, 48  # of arch_models' tiny mixtures
RUN = {"threads": 2, "io_threads": 4}


@pytest.fixture(scope="module")
def tiny(variant_of):
    """(Hugging Face folder, model directory) of a tiny OLMoE."""
    return variant_of("olmoe")


@pytest.fixture
def directory(tiny):
    return tiny[1]


def opened(directory, *, cache_rows=None, prompt_tokens=256, guessed=0, **config):
    """The model; with `cache_rows`, every layer caches so many rows, and there are at most 64 bypass rows; `guessed`
    experts of the next layer are read before its turn."""
    model_dir = ModelDir.open(directory)
    plan = resolve(RunConfig(**RUN, **config), model_dir, available=10**12, process=10**8)
    memory = {"prompt_tokens": prompt_tokens}
    if guessed:
        plan = dataclasses.replace(plan, prefetch=True, loads=False)
        memory["prefetch_rows"] = guessed * SIZE
    if cache_rows is not None:
        levels = np.full((1, LAYERS), cache_rows, np.int32)
        memory |= {"levels": levels, "bypass_rows": min(64, plan.memory.bypass_rows), "level_pages": 10}
    plan = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, **memory))
    return Model(model_dir, plan, RunConfig(**RUN, **config))


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(4, 300, count).tolist()


def read_by(model, prompt):
    """Bytes that a prompt of a new sequence reads."""
    model.meter.take()
    with model.new_sequence() as sequence:
        model.step([(sequence, prompt)])
    return model.meter.take().bytes_read


def generated(model, prompt, count=12):
    """Logits [count, vocab] after a prompt and greedy tokens, one by one."""
    with model.new_sequence() as sequence:
        rows = [model.step([(sequence, prompt)])[0]]
        for _ in range(count - 1):
            rows.append(model.step([(sequence, [int(rows[-1].argmax())])])[0])
    return np.stack(rows)


@pytest.mark.parametrize("policy", ["frequency", "window"])
@pytest.mark.parametrize("cache_rows", [SIZE, 200, COUNT * SIZE])
def test_what_the_cache_holds_changes_no_bit(directory, policy, cache_rows):
    with opened(directory) as model:
        expected = generated(model, ids(20))
    for guessed in (0, 2):
        with opened(directory, cache_rows=cache_rows, cache_policy=policy, guessed=guessed) as model:
            np.testing.assert_array_equal(generated(model, ids(20)), expected)
            times = model.meter.take()
        assert times.prefetched >= times.prefetch_used
        assert (times.prefetch_used > 0) == (guessed > 0)
        assert times.prefetched % SIZE == times.prefetch_used % SIZE == 0


def without_shared_checksums(monkeypatch, source, target):
    """The model as versions before units converted it: with a checksum for each row."""
    for module in ("plan", "run", "storage"):
        monkeypatch.setattr(f"flashllm.convert.{module}.checksum_rows", lambda _, architecture: [1] * LAYERS)
    convert(source, target)
    monkeypatch.undo()
    return target


def test_the_plan_has_experts_guessed_where_some_do_not_fit(directory, monkeypatch):
    monkeypatch.setattr("flashllm.plan.memory._GUESSED_SHARE", 1)  # a tiny model's buffers are a large part
    model, machine = ModelDir.open(directory), {"available": 10**12, "process": 10**8}

    def plan(limit, **config):
        return resolve(RunConfig(**RUN, memory=limit, **config), model, **machine)

    roomy = plan(None)
    least, expert = roomy.memory.minimum_nbytes, SIZE * model.manifest.rows.stride
    limits = [least + number * expert for number in range(6 * COUNT)]
    guessed = [limit for limit in limits if plan(limit).prefetch]
    assert not roomy.prefetch
    assert guessed
    assert guessed[0] > least
    assert plan(guessed[0]).memory.prefetch_rows == 2 * SIZE
    with Model(model, plan(guessed[0]), RunConfig(**RUN, memory=guessed[0])) as opened_model:
        generated(opened_model, ids(20))
        assert opened_model.meter.take().prefetched > 0


def test_directories_with_a_checksum_a_row_open_as_they_are(tiny, directory, tmp_path, monkeypatch):
    old = without_shared_checksums(monkeypatch, tiny[0], tmp_path / "old")
    assert "checksum_rows" not in Manifest.load(old).to_json()
    assert Manifest.load(directory).to_json()["checksum_rows"] == SIZE
    assert (old / FFN).read_bytes() == (directory / FFN).read_bytes()
    assert verify(old).ok
    with opened(directory) as model:
        expected = generated(model, ids(20))
        shared = model.plan.memory.checksums
    with opened(old, cache_rows=SIZE) as model:
        np.testing.assert_array_equal(generated(model, ids(20)), expected)
        assert model.plan.memory.checksums == SIZE * shared == 8 * LAYERS * COUNT * SIZE


def test_directories_with_padded_rows_open_as_they_are(tiny, directory, tmp_path, monkeypatch):
    monkeypatch.setattr("flashllm.convert.storage.packed", lambda layout, _: layout)
    convert(tiny[0], tmp_path / "old")
    monkeypatch.undo()
    old = Manifest.load(tmp_path / "old").rows
    assert (old.stride, Manifest.load(directory).rows.stride) == (1024, 768)
    assert verify(tmp_path / "old").ok
    with opened(directory, cache_rows=SIZE) as model:
        expected = generated(model, ids(20))
    with opened(tmp_path / "old", cache_rows=SIZE) as model:
        np.testing.assert_array_equal(generated(model, ids(20)), expected)


@pytest.mark.parametrize("form", ["a checksum an expert", "a checksum a row"])
def test_a_wrong_byte_of_an_expert_is_found(tiny, tmp_path, monkeypatch, form):
    if form == "a checksum a row":
        model_dir = without_shared_checksums(monkeypatch, tiny[0], tmp_path / "model")
        first, said = 5 * SIZE + 7, "layer 1, neuron 247: wrong checksum"
    else:
        convert(tiny[0], model_dir := tmp_path / "model")
        first, said = 5 * SIZE, "layer 1, neurons 240 to 287: wrong checksum"
    layout = Manifest.load(model_dir).rows
    flip(model_dir / FFN, -2 * layout.layer_nbytes + (5 * SIZE + 7) * layout.stride + 100)
    problems = verify(model_dir).problems
    assert [problem.neuron for problem in problems] == [first]
    assert said in problems[0].message
    for count in (120, 1):  # as a prompt streams by, and token by token
        wrong = pytest.raises(ChecksumError, match=f"layer 1, neuron {first}: ")
        with opened(model_dir) as model, model.new_sequence() as sequence, wrong:
            for step in range(140 // count):
                model.step([(sequence, ids(count, seed=step))])


def test_memory_is_given_by_whole_experts(directory):
    model = ModelDir.open(directory)
    config = {"available": 10**12, "process": 10**8}
    least = resolve(RunConfig(**RUN), model, **config).memory.minimum_nbytes
    for policy in ("frequency", "window"):
        for more in (0, 10**5, 3 * 10**5, 10**6, 10**8):
            memory = resolve(RunConfig(**RUN, cache_policy=policy, memory=least + 10**6 + more), model, **config).memory
            held = [*memory.levels.reshape(-1).tolist(), *memory.min_cache_rows, memory.bypass_rows]
            assert all(rows % SIZE == 0 for rows in held)
            assert memory.total_nbytes <= memory.limit_nbytes
            assert all(rows + memory.bypass_rows >= SIZE for rows in memory.levels.reshape(-1))
            with opened(directory, cache_policy=policy, memory=least + 10**6 + more) as opened_model:
                generated(opened_model, ids(20), count=3)
                assert [cache.capacity for cache in opened_model.parts.caches] == list(memory.cache_rows)


def test_a_token_computes_its_experts_and_no_others(directory):
    """An expert's rows, which lie side by side, are one request."""
    with opened(directory) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids(1))])
        times = model.meter.take()
        assert times.active == LAYERS * CHOSEN * SIZE == times.misses
        assert times.requests <= LAYERS * CHOSEN
        assert times.bytes_read == LAYERS * CHOSEN * SIZE * model.manifest.rows.stride
        model.step([(sequence, ids(5, seed=1))])
        times = model.meter.take()
        assert times.active == 5 * LAYERS * CHOSEN * SIZE
        assert times.united % SIZE == 0
        assert times.united < times.active


def test_a_prompt_reads_each_expert_it_touches_once_and_keeps_what_has_room(directory):
    layout = Manifest.load(directory).rows
    expert, everything = SIZE * layout.stride, LAYERS * COUNT * SIZE * layout.stride
    with opened(directory) as model:
        few = read_by(model, ids(9, seed=9))
        for ffn in model.parts.ffns:
            neurons = np.asarray(ffn.cached())
            assert set(np.bincount(neurons // SIZE).tolist()) in ({SIZE}, {0, SIZE})
        many = read_by(model, ids(120, seed=120))
        assert few % expert == many % expert == 0
        assert LAYERS * CHOSEN * expert <= few < everything
        assert few + many == everything
        assert read_by(model, ids(120, seed=4)) == 0
        with model.new_sequence() as sequence:
            assert [model.step([(sequence, [token])]).shape[0] for token in ids(8)] == [1] * 8
        assert model.meter.take().bytes_read == 0
    with opened(directory, cache_rows=3 * SIZE) as model:
        assert read_by(model, ids(150, seed=1)) == everything  # these prompts go to every expert
        for seed in (3, 5, 6, 10):  # what is cached is used, and then may give way
            assert read_by(model, ids(150, seed=seed)) == everything - LAYERS * 3 * expert
            assert [len(ffn.cached()) for ffn in model.parts.ffns] == [3 * SIZE] * LAYERS


@pytest.mark.parametrize("token", [7, 8, 9])
def test_what_a_prompt_keeps_is_what_its_tokens_went_to_most(directory, token):
    """In layer 0 a token that comes again and again goes to the same experts; few others come behind it."""
    with opened(directory, cache_rows=CHOSEN * SIZE) as model:
        read_by(model, [*[token] * 60, *ids(5)])
        kept = model.parts.ffns[0].cached()
    with opened(directory) as model:
        read_by(model, [token] * 9)
        assert sorted(kept) == sorted(model.parts.ffns[0].cached())


@pytest.mark.parametrize("policy", ["frequency", "window"])
@pytest.mark.parametrize("cache_rows", [SIZE, 3 * SIZE])
def test_prompts_in_stretches_have_the_bits_of_one(directory, policy, cache_rows):
    """Whatever earlier stretches kept, and whatever gives way meanwhile."""
    prompts = [ids(60 + seed, seed=seed) for seed in range(6)]
    with opened(directory) as model:
        expected = [model.step([(model.new_sequence(), prompt)]) for prompt in prompts]
    with opened(directory, cache_rows=cache_rows, cache_policy=policy, prompt_tokens=16) as model:
        for index, prompt in enumerate(prompts):
            entries = [(model.new_sequence().native, prompt)]
            found = _core.Pass(model.parts.native, entries, "prompt", False, None, 0, 1 + index % 3).advance(1e9)
            np.testing.assert_array_equal(found, expected[index])
            assert generated(model, ids(9)).shape[0] == 12


def test_threads_and_interruptions_change_no_bit(directory):
    with opened(directory) as model:
        expected = generated(model, ids(20))
        with model.new_sequence() as sequence:
            model.cancel()
            with pytest.raises(Cancelled):
                model.step([(sequence, ids(40))])
            model.cancel(False)
        np.testing.assert_array_equal(generated(model, ids(20)), expected)
    with Model.open(directory, RunConfig(threads=1, io_threads=1)) as model:
        np.testing.assert_array_equal(generated(model, ids(20)), expected)


def test_sparse_prompts_are_a_token_after_the_other(directory, tiny):
    prompt = ids(30)
    with torch.no_grad():
        expected = open_model(tiny[0])(torch.tensor([prompt])).logits[0].numpy()
    with opened(directory, prompts="sparse") as model, model.new_sequence() as sequence:
        rows = model.step([(sequence, prompt)], all_logits=True)
    np.testing.assert_allclose(rows, expected, atol=2e-4, rtol=0)


def test_relu_experts_leave_neurons_out_within_them(variant_of):
    _, directory = variant_of("olmoe relu")
    with opened(directory, mode="dense") as model:
        dense = generated(model, ids(20), count=2)
        whole = model.meter.take().active
    with opened(directory) as model:
        sparse = generated(model, ids(20), count=2)
        few = model.meter.take().active
    assert 0 < few < 0.95 * whole
    assert np.corrcoef(dense[1], sparse[1])[0, 1] > 0.9  # untrained predictors miss a few


def test_a_router_that_overflows_ends_the_pass(tiny, tmp_path):
    router = "model.layers.1.mlp.gate.weight"
    convert(changed(tiny[0], tmp_path / "hf", lambda tensors: tensors[router][2].fill_(torch.inf)), tmp_path / "model")
    with opened(tmp_path / "model") as model, model.new_sequence() as sequence:
        for count in (1, 20):
            with pytest.raises(NonFiniteError, match="router computed a number that is not finite"):
                model.step([(sequence, ids(count))])
        assert sequence.length == 0


# The model directory


def test_verify_inspect_and_the_manifest_know_experts(directory):
    assert verify(directory).ok
    manifest = Manifest.load(directory)
    assert manifest.to_json()["architecture"]["experts"] == COUNT
    assert manifest.architecture.expert_size == SIZE
    assert manifest.architecture.cycle == CHOSEN * SIZE
    text = format_inspection(inspect(directory))
    assert "8 experts of 48 neurons, 3 experts a token" in text
    assert "the router: exact" in text
    assert inspect(directory)["modes"] == ["sparse", "dense"]


def test_neurons_lie_in_the_order_of_experts(tiny):
    weights, layout = load_file(tiny[0] / "model.safetensors"), Manifest.load(tiny[1]).rows
    with open_safetensors(tiny[1] / FFN) as file:
        rows = np.empty((layout.num_rows, layout.stride), np.uint8)
        file.read_into(file.header.tensors[ffn_tensor(1)], 0, rows.reshape(-1).data)
    found = widened_rows(layout, rows)
    for expert in range(COUNT):
        mine = slice(expert * SIZE, (expert + 1) * SIZE)
        name = f"model.layers.1.mlp.experts.{expert}"
        np.testing.assert_array_equal(found["gate"][mine], weights[f"{name}.gate_proj.weight"])
        np.testing.assert_array_equal(found["up"][mine], weights[f"{name}.up_proj.weight"])
        np.testing.assert_array_equal(found["down"][mine], weights[f"{name}.down_proj.weight"].T)


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_stacked_experts_convert_to_the_same_bytes(variant_of, tmp_path, name):
    source, directory = variant_of(name)
    open_model(source).save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(".experts.gate_up_proj" in key for key in load_file(tmp_path / "stacked" / "model.safetensors"))
    convert(tmp_path / "stacked", tmp_path / "model")
    for file in (FFN, RESIDENT):
        assert (tmp_path / "model" / file).read_bytes() == (directory / file).read_bytes()


def test_shared_neurons_are_always_active(variant_of):
    _, directory = variant_of("qwen2_moe")
    with opened(directory) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids(1))])
        assert model.meter.take().active == LAYERS * (CHOSEN * SIZE + 80)
        model.step([(sequence, ids(1, seed=1))])
        assert all(set(range(COUNT * SIZE, COUNT * SIZE + 80)) <= set(ffn.cached()) for ffn in model.parts.ffns)
    text = format_inspection(inspect(directory))
    assert "8 experts of 48 neurons and 80 shared neurons, 3 experts a token" in text


def changed(source, target, change):
    """A copy of the checkpoint whose tensors `change` was let at."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_missing_an_unknown_and_a_misshapen_expert_are_refused_by_name(tiny, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    source = changed(tiny[0], tmp_path / "missing", lambda tensors: tensors.pop(name))
    with pytest.raises(FormatError, match=r"experts.5.up_proj.weight is missing"):
        convert(source, tmp_path / "model")
    source = changed(tiny[0], tmp_path / "more", lambda t: t.update({name.replace(".5.", ".8."): t[name].clone()}))
    with pytest.raises(UnsupportedModelError, match=r"experts.8.up_proj.weight: is no part of the olmoe model"):
        convert(source, tmp_path / "model")
    source = changed(tiny[0], tmp_path / "short", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(FormatError, match=r"has shape \[47, 64\], the config says \[48, 64\]"):
        convert(source, tmp_path / "model")


# What is not for experts says so


def test_refusals_say_what_to_do(tiny, directory, tmp_path):
    with pytest.raises(UsageError, match=r"oracle is not for mixtures of experts.*--mode sparse"):
        Model.open(directory, RunConfig(mode="oracle", **RUN))
    for gate in ("resident", "4bit"):
        with pytest.raises(UsageError, match="--gate and --sparsify are for other models"):
            convert(tiny[0], tmp_path / "gates", gate=gate)
    observed = pytest.raises(UsageError, match="a mixture of experts computes cannot be observed")
    with opened(directory) as model, model.new_sequence() as sequence, observed:
        model.step([(sequence, ids(9))], observer=object())


def test_the_plan_says_when_a_tokens_experts_do_not_fit(directory, tmp_path, capsys):
    config = RunConfig(store=tmp_path / "none")
    for memory, said in ((10**10, False), (None, True)):
        model = ModelDir.open(directory)
        least = resolve(config, model, available=10**12, process=10**8).memory.minimum_nbytes
        run = dataclasses.replace(config, memory=least if memory is None else memory)
        notices = resolve(run, model, available=10**12, process=10**8).notices
        assert any("and a token's experts are" in notice for notice in notices) == said
    assert main(["plan", str(directory)]) == 0
    assert "a token goes to 3 of 8 a layer" in capsys.readouterr().out


def test_generate_speaks(directory, capsys):
    assert main(["generate", str(directory), "--prompt", "The little dog", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out
