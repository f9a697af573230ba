"""Per-layer embeddings, a row for each token's id: read from flash, kept by frequency, whole where memory has room."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint
from arch_reference import ReferenceDecoder
from planned import planned
from safetensors.numpy import load_file, save_file

from flashllm.base.units import format_size
from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FlashIOError, FormatError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import TABLE
from flashllm.plan.resolve import resolve

NAME = "gemma4 shared keys, rows of ids"
RUN = RunConfig(threads=1, io_threads=4, mode="dense")
IDS = [int(token) for token in np.random.default_rng(0).integers(4, 300, 90)]


def opened(directory, *, config=RUN, **memory):
    return planned(directory, config, **memory)


def run(model, ids, sequence=None):
    if sequence is not None:
        return model.step([(sequence, ids)], all_logits=True)
    with model.new_sequence() as own:
        return run(model, ids, own)


@pytest.fixture
def directory(variant_of):
    return variant_of(NAME)[1]


def test_bits_do_not_depend_on_how_many_rows_stay(directory):
    with opened(directory) as whole:
        assert whole.plan.memory.table_rows == 300
        expected = run(whole, IDS)
    for kept in (1, 2, 7, 299):
        with opened(directory, table_rows=kept) as model, model.new_sequence() as sequence:
            assert np.array_equal(run(model, IDS), expected)
            few = [model.step([(sequence, [token])])[0] for token in IDS[:12]]
        with opened(directory) as whole, whole.new_sequence() as sequence:
            assert np.array_equal(few, [whole.step([(sequence, [token])])[0] for token in IDS[:12]])


def test_rows_that_come_again_are_not_read_again(directory):
    with opened(directory, table_rows=8) as model:
        model.parts.table_file.inject("error", 2**60)
        for _ in range(3):
            run(model, IDS[:5] * 2)
        model.parts.table_file.inject("error", 0, count=10**6, argument=5)
        run(model, IDS[:5])  # reads none
        with pytest.raises(FlashIOError):
            run(model, [next(token for token in range(4, 300) if token not in IDS[:5])])


def test_a_failed_read_leaves_the_sequences_as_they_were(directory):
    with opened(directory) as whole:
        expected = run(whole, IDS)
    with opened(directory, table_rows=10) as model, model.new_sequence() as sequence:
        run(model, IDS[:20], sequence)
        held = model._memory.pool.nbytes
        for first in (0, 1, 3):
            model.parts.table_file.inject("error", first, count=10**6, argument=5)
            with pytest.raises(FlashIOError):
                run(model, IDS[20:], sequence)
            assert (sequence.length, model._memory.pool.nbytes) == (20, held)
        model.parts.table_file.inject("error", 2**60)
        found = model.step([(sequence, IDS[20:])], all_logits=True)
        assert np.allclose(found, expected[20:], atol=1e-4)


def test_a_damaged_row_is_found_where_it_is_read(directory, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    table = ModelDir.open(copy).table
    with (copy / TABLE).open("r+b") as file:
        file.seek(-table.nbytes + IDS[3] * table.stride + 5, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))
    with opened(copy) as model, pytest.raises(ChecksumError):
        run(model, IDS[:5])
    with opened(copy) as model:
        run(model, [token for token in IDS if token != IDS[3]])
    assert main(["verify", str(copy)]) != 0


def test_a_table_that_is_missing_or_another_is_refused(directory, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    entry = manifest["files"].pop(TABLE)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=f"does not list {TABLE}"):
        ModelDir.open(copy)
    manifest["files"][TABLE] = entry
    tensors = load_file(copy / TABLE)
    save_file({name: rows[:-1] for name, rows in tensors.items()}, copy / TABLE)
    manifest["files"][TABLE]["nbytes"] = (copy / TABLE).stat().st_size
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=r"per_layer_embedding\.weight"):
        ModelDir.open(copy)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_table_of_fewer_bits(variant_of, tmp_path, bits):
    encoding = f"int{bits}_32"
    convert(variant_of(NAME)[0], tmp_path / "model", resident_encoding=encoding, encoding=encoding)
    model = ModelDir.open(tmp_path / "model")
    assert model.table.encoding.name == encoding
    expected = ReferenceDecoder(tmp_path / "model").logits(IDS[:40]).numpy()
    with opened(tmp_path / "model", config=dataclasses.replace(RUN), table_rows=16) as found:
        near = run(found, IDS[:40])
    assert np.corrcoef(near.ravel(), expected.ravel())[0, 1] > 0.995


def test_the_plan_says_where_the_table_lies(directory, capsys):
    table = ModelDir.open(directory).table
    assert main(["plan", str(directory), "--memory", "4GB"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "per-layer embeddings" in line)
    assert f"300 of 300 rows; {format_size(table.nbytes)} on flash" in line
    assert main(["plan", str(directory), "--memory", "4GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_rows"] == 300


def test_a_table_stays_on_flash_where_memory_lacks(tmp_path):
    variant = dataclasses.replace(
        VARIANTS[NAME], config={**VARIANTS[NAME].config, "vocab_size_per_layer_input": 40_000}
    )
    convert(make_checkpoint(tmp_path / "hf", variant), tmp_path / "model")
    model = ModelDir.open(tmp_path / "model")

    def plan(limit):
        return resolve(dataclasses.replace(RUN, memory=limit), model, available=10**12, process=10**8).memory

    much = plan(4_000_000_000)
    little = plan(much.minimum_nbytes + 10_000_000)
    assert (little.table_rows, much.table_rows) == (1024, 40_000)
    assert little.minimum_nbytes == much.minimum_nbytes
    assert plan(much.minimum_nbytes).total_nbytes <= much.minimum_nbytes
    assert much.table > model.table.nbytes > 20 * little.table_rows * model.table.stride
