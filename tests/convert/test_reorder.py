"""The neurons placed anew: a second copy in a learned order, the same bits from it, fewer requests, safe to make."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from generating import greedy, ids_of
from tiny_models import make_tiny_opt
from traces import write_trace

import flashllm.convert.placed
from flashllm.config import Ablation
from flashllm.convert.placement import place
from flashllm.convert.reorder import reorder
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FlashIOError, FormatError, UsageError
from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PLACED, PREDICTORS, ffn_tensor, order_tensor
from flashllm.format.placed import read_orders
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.format.safetensors import read_header
from flashllm.format.trace import Trace

LAYERS, NEURONS, TOKENS = 3, 512, 60


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Activity of a model whose neurons fire in groups of eight, scattered over the ids."""
    random = np.random.default_rng(0)
    group_of = np.stack([random.permutation(np.repeat(np.arange(NEURONS // 8), 8)) for _ in range(LAYERS)])
    firing = random.random((TOKENS, LAYERS, NEURONS // 8)) < 0.1
    active = np.take_along_axis(firing, group_of[None], axis=2)
    path = write_trace(tmp_path_factory.mktemp("trace") / "trace", active)
    with Trace(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def placed(tiny, trace, tmp_path_factory):
    """Reordered directories by kind of predictor."""
    root = tmp_path_factory.mktemp("placed")
    for kind in ("random", "prefetch"):
        reorder(tiny("bfloat16").path(kind), root / kind, trace)
    return root


def digests(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def rows_of_layer(path, layer, layout):
    offset = read_header(path).tensors[ffn_tensor(layer)].offset
    return np.fromfile(path, np.uint8, layout.layer_nbytes, offset=offset).reshape(layout.num_rows, layout.stride)


def test_the_copy_holds_the_same_rows_in_the_learned_order(tiny, placed, trace):
    source, model = tiny("bfloat16").path("random"), placed / "random"
    manifest = Manifest.load(model)
    assert manifest.permutation.tokens == TOKENS
    assert manifest.permutation.learned_on == "a test"
    before, after = digests(source), digests(model)
    assert set(after) == {*before, PLACED}
    assert {name for name in before if before[name] != after[name]} == {"flashllm.json"}
    for layer, order in enumerate(read_orders(model / PLACED, manifest.rows, LAYERS)):
        np.testing.assert_array_equal(order, place(trace.masks(layer)))
        original, again = (rows_of_layer(model / name, layer, manifest.rows) for name in (FFN, PLACED))
        np.testing.assert_array_equal(again[:NEURONS], original[order])
        assert not again[NEURONS:].any()
    assert verify(model).ok
    assert "learned from 60 tokens: a test" in format_inspection(inspect(model))


def test_a_placed_model_still_takes_new_predictors(tiny, placed, tmp_path):
    model = shutil.copytree(placed / "random", tmp_path / "model")
    manifest = install_predictors(model, tiny("bfloat16").path("exact") / PREDICTORS)
    assert manifest.permutation is not None
    assert verify(model).ok


@pytest.mark.parametrize("kind", ["random", "prefetch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ablation": Ablation(placed=False)}, {"ablation": Ablation(bundled=False)}, {"io_threads": 1, "threads": 2}],
    ids=str,
)
def test_same_bits_wherever_neurons_lie(placed, load, undisturbed, kind, options):
    flash = load(placed / kind, **options)
    tokens, logits = undisturbed
    assert [greedy(flash, ids_of(length)) for length in (30, 4)] == tokens
    assert torch.equal(flash(ids_of(6)).logits, logits)


def test_what_lies_together_is_read_together(placed, trace, load):
    active = np.flatnonzero(trace.masks(1)[0]).astype(np.int32)
    assert len(active) >= 8
    requests, results = [], []
    for ablation in (Ablation(placed=False), Ablation()):
        flash = load(placed / "random", ablation=ablation)
        x = torch.ones(flash.engine.manifest.rows.d_model, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        flash.engine.meter.restart()
        flash.engine.parts.ffns[1].forward_active(x.data_ptr(), active, y.data_ptr())
        requests.append(flash.engine.meter.take().requests)
        results.append(y)
    assert requests[1] <= len(active) / 4 < requests[0]
    assert torch.equal(*results)


def test_a_damaged_row_is_named_by_its_neuron(placed, load, tmp_path):
    model = shutil.copytree(placed / "random", tmp_path / "model")
    manifest = Manifest.load(model)
    order = read_orders(model / PLACED, manifest.rows, LAYERS)[1]
    place_of_row = read_header(model / PLACED).tensors[ffn_tensor(1)].offset + 20 * manifest.rows.stride
    flip(model / PLACED, place_of_row)
    flash = load(model)
    neuron, x = int(order[20]), torch.ones(manifest.rows.d_model, dtype=torch.bfloat16)
    with pytest.raises(ChecksumError, match=f"layer 1, neuron {neuron}: .*flashllm verify"):
        flash.engine.parts.ffns[1].forward_active(
            x.data_ptr(), np.array([neuron], np.int32), torch.empty_like(x).data_ptr()
        )
    (problem,) = verify(model).problems
    assert (problem.file, problem.layer, problem.neuron) == (PLACED, 1, neuron)


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.parametrize("where", ["header", "order"])
def test_damage_elsewhere_in_the_copy_is_found(placed, load, tmp_path, where):
    model = shutil.copytree(placed / "random", tmp_path / "model")
    flip(model / PLACED, 9 if where == "header" else read_header(model / PLACED).tensors[order_tensor(1)].offset)
    problems = verify(model).problems
    assert {problem.file for problem in problems} == {PLACED}
    with pytest.raises(FormatError, match=PLACED):
        load(model)


def test_manifest_and_copy_belong_together(placed, tmp_path):
    manifest = Manifest.load(placed / "random")
    with pytest.raises(ValueError, match="belong together"):
        dataclasses.replace(manifest, permutation=None)
    files = {name: entry for name, entry in manifest.files.items() if name != PLACED}
    with pytest.raises(ValueError, match="belong together"):
        dataclasses.replace(manifest, files=files)


class Stopped(Exception):
    """Stands for a kill."""


def test_an_interrupted_reordering_goes_on(tiny, placed, trace, tmp_path, monkeypatch):
    source, calls = tiny("bfloat16").path("random"), []

    def stop_in_layer_two(active):
        calls.append(active)
        if len(calls) == 3:
            raise Stopped
        return place(active)

    monkeypatch.setattr(flashllm.convert.placed, "place", stop_in_layer_two)
    with pytest.raises(Stopped):
        reorder(source, tmp_path / "model", trace)
    assert not (tmp_path / "model").exists()
    partial = tmp_path / "model.partial"
    flip(partial / PLACED, read_header(partial / PLACED).tensors[ffn_tensor(1)].offset + 5)
    monkeypatch.setattr(flashllm.convert.placed, "place", place)
    read = []
    original = flashllm.convert.placed._Rows.read

    def count(self, layer, neurons, checksums):
        read.append(layer)
        return original(self, layer, neurons, checksums)

    monkeypatch.setattr(flashllm.convert.placed._Rows, "read", count)
    reorder(source, tmp_path / "model", trace)
    assert 0 not in read  # it was whole
    assert {1, 2} <= set(read)
    assert digests(tmp_path / "model") == digests(placed / "random")


def test_another_trace_does_not_resume(tiny, trace, tmp_path, monkeypatch):
    def stop(active):
        raise Stopped

    monkeypatch.setattr(flashllm.convert.placed, "place", stop)
    with pytest.raises(Stopped):
        reorder(tiny("bfloat16").path("random"), tmp_path / "model", trace)
    other = write_trace(tmp_path / "other", np.ones((2, LAYERS, NEURONS), bool))
    with Trace(other) as second, pytest.raises(UsageError, match="was begun from another source"):
        reorder(tiny("bfloat16").path("random"), tmp_path / "model", second)


def test_a_checkpoint_is_converted_and_placed_at_once(tmp_path, trace):
    source = make_tiny_opt(tmp_path / "hf", num_layers=LAYERS, d_ff=NEURONS)
    convert(source, tmp_path / "once", reorder=trace)
    convert(source, tmp_path / "plain")
    reorder(tmp_path / "plain", tmp_path / "twice", trace)
    assert digests(tmp_path / "once") == digests(tmp_path / "twice")
    assert verify(tmp_path / "once").ok


def test_what_cannot_be_is_refused_and_nothing_is_left(tiny, trace, tmp_path):
    source = tiny("bfloat16").path("random")
    foreign = write_trace(tmp_path / "foreign", np.zeros((2, LAYERS, NEURONS + 1), bool))
    with Trace(foreign) as other, pytest.raises(UsageError, match="a trace of 3 layers of 513 neurons"):
        reorder(source, tmp_path / "model", other)
    with pytest.raises(UsageError, match="exists; remove it"):
        reorder(source, source, trace)
    with pytest.raises(UsageError, match="no such directory"):
        reorder(source, tmp_path / "nowhere" / "model", trace)
    with pytest.raises(UsageError, match="not a model directory"):
        reorder(tmp_path, tmp_path / "model", trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign"]


@pytest.mark.parametrize("name", [FFN, "tokenizer.json"])
def test_a_damaged_source_is_not_copied(tiny, trace, tmp_path, name):
    source = shutil.copytree(tiny("bfloat16").path("random"), tmp_path / "source")
    flip(source / name, 5000)
    with pytest.raises(FormatError, match=f"{name}: is not what flashllm.json says .*flashllm verify"):
        reorder(source, tmp_path / "model", trace)
    assert not (tmp_path / "model").exists()


def test_a_full_disk_is_met_at_the_start(tiny, trace, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 100_000))
    with pytest.raises(FlashIOError, match="not enough space"):
        reorder(tiny("bfloat16").path("random"), tmp_path / "model", trace)
    assert not (tmp_path / "model.partial").exists()


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "flashllm.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_inspect_tells_of_it_and_convert_takes_no_model(tiny, trace, tmp_path):
    source = tiny("bfloat16").path("random")
    reorder(source, tmp_path / "model", trace)
    facts = json.loads(run("inspect", tmp_path / "model", "--json").stdout)
    assert facts["permutation"] == {"learned_on": "a test", "tokens": TOKENS}
    refused = run("convert", source, tmp_path / "new")
    assert refused.returncode == 2
    assert "is a flashllm directory already" in refused.stderr
    assert not (tmp_path / "new").exists()
