"""The input embedding of a model with a head of its own: resident where memory has room, else rows on flash."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint
from planned import planned

from flashllm.base.units import format_size
from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FlashIOError
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import RESIDENT
from flashllm.format.safetensors import read_header
from flashllm.plan.resolve import resolve

RUN = RunConfig(threads=1, io_threads=4, mode="dense")
IDS = [int(token) for token in np.random.default_rng(0).integers(4, 2000, 100)]


@pytest.fixture(
    scope="module", params=[("llama relu", None, 128), ("olmoe", None, 128), ("llama relu", "int8_32", 544)]
)
def directory(request, tmp_path_factory):
    name, encoding, width = request.param
    folder = tmp_path_factory.mktemp("untied")
    variant = dataclasses.replace(
        VARIANTS[name], config={**VARIANTS[name].config, "vocab_size": 2000, "hidden_size": width}
    )
    convert(make_checkpoint(folder / "hf", variant), folder / "model", encoding=encoding, resident_encoding=encoding)
    return folder / "model"


def opened(directory, **memory):
    return planned(directory, RUN, **memory)


def passes(model):
    """Logits of a prompt, of a few tokens together, of single tokens, and of two sequences in a pass."""
    with model.new_sequence() as one, model.new_sequence() as other:
        yield model.step([(one, IDS)], all_logits=True)
        yield model.step([(one, IDS[:5])], all_logits=True)
        for token in IDS[7:15]:
            yield model.step([(one, [token])])
        yield model.step([(one, IDS[20:22]), (other, IDS[:40])])


def test_bits_are_those_of_the_resident_embedding(directory):
    with opened(directory) as whole:
        assert (whole.plan.memory.table_rows, whole.parts.table_file) == (2000, None)
        expected = list(passes(whole))
    for kept in (1, 7, 1024, 1999):
        with opened(directory, table_rows=kept) as model:
            assert model.parts.table_file is not None
            assert all(np.array_equal(*pair) for pair in zip(passes(model), expected, strict=True))


def test_rows_that_stay_are_not_read_again(directory):
    with opened(directory, table_rows=1024) as model, model.new_sequence() as sequence:
        model.parts.table_file.inject("error", 2**60)
        model.step([(sequence, IDS[:70])])
        model.parts.table_file.inject("error", 0, count=10**6, argument=5)
        model.step([(sequence, IDS[:70])])  # reads none
        with pytest.raises(FlashIOError):
            model.step([(sequence, [next(token for token in range(4, 2000) if token not in IDS)])])


def test_a_failed_read_leaves_the_sequence_as_it_was(directory):
    with opened(directory) as whole, whole.new_sequence() as sequence:
        expected = [whole.step([(sequence, IDS[:20])]), whole.step([(sequence, IDS[20:])])]
    with opened(directory, table_rows=10) as model, model.new_sequence() as sequence:
        assert np.array_equal(model.step([(sequence, IDS[:20])]), expected[0])
        held = model._memory.pool.nbytes
        for first in (0, 1, 3):
            model.parts.table_file.inject("error", first, count=10**6, argument=5)
            with pytest.raises(FlashIOError):
                model.step([(sequence, IDS[20:])])
            assert (sequence.length, model._memory.pool.nbytes) == (20, held)
        model.parts.table_file.inject("error", 2**60)
        assert np.array_equal(model.step([(sequence, IDS[20:])]), expected[1])


def test_a_row_that_is_damaged_after_the_start_is_found(directory, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    info = read_header(copy / RESIDENT).tensors["embedding.weight"]
    with opened(copy, table_rows=10) as model, model.new_sequence() as sequence:
        with (copy / RESIDENT).open("r+b") as file:
            file.seek(info.offset + IDS[3] * (info.nbytes // 2000) + 5)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 16]))
        with pytest.raises(ChecksumError):
            model.step([(sequence, IDS[:5])])
        assert sequence.length == 0
    with pytest.raises(ChecksumError):  # the file's hash
        opened(copy, table_rows=10)


def test_the_plan_leaves_it_on_flash_where_memory_lacks(tmp_path, capsys):
    variant = dataclasses.replace(
        VARIANTS["olmoe"], config={**VARIANTS["olmoe"].config, "vocab_size": 60_000, "hidden_size": 128}
    )
    convert(make_checkpoint(tmp_path / "hf", variant), tmp_path / "model")
    model = ModelDir.open(tmp_path / "model")

    def plan(limit):
        return resolve(dataclasses.replace(RUN, memory=limit), model, available=10**12, process=10**8).memory

    much = plan(4_000_000_000)
    little = plan(much.minimum_nbytes)
    table = model.manifest.embedding_layout(model.block)
    assert (little.table_rows, much.table_rows) == (1024, 60_000)
    assert little.minimum_nbytes == much.minimum_nbytes
    assert little.total_nbytes <= little.limit_nbytes
    assert much.fixed_nbytes - little.fixed_nbytes > 0.9 * (60_000 - 1024) * table.stride
    assert main(["plan", str(model.path), "--memory", "4GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_rows"] == 60_000
    assert main(["plan", str(model.path), "--memory", f"{found['minimum_bytes'] // 10**6 + 3}MB"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "input embedding" in line)
    assert f"1024 of 60000 rows; {format_size(table.nbytes)} on flash" in line
