"""Tables with a row for each token's id, of which those stay that memory has room for: per-layer embeddings, and the
input embedding of a model with a head of its own. Read from flash, kept by frequency, whole where all rows fit."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint
from arch_reference import ReferenceDecoder
from damage import flip
from planned import planned
from safetensors.numpy import load_file, save_file

from flashllm.base.units import format_size
from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FlashIOError, FormatError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import RESIDENT, TABLE
from flashllm.format.safetensors import read_header
from flashllm.plan.resolve import resolve

BY_LAYER = "gemma4 shared keys, rows of ids"
RUN = RunConfig(threads=1, io_threads=4, mode="dense")


@dataclass(frozen=True)
class Tabled:
    """A model directory with a table of `rows`: `tensor` of its file `name`."""

    directory: Path
    rows: int
    name: str
    tensor: str

    @property
    def ids(self):
        return np.random.default_rng(0).integers(4, self.rows, 100).tolist()

    def unseen(self):
        """An id that is none of them."""
        return next(token for token in range(4, self.rows) if token not in self.ids)

    def damage(self, path, token):
        """Flip a bit of the row of `token` in the copy `path`."""
        info = read_header(path / self.name).tensors[self.tensor]
        flip(path / self.name, info.offset + token * (info.nbytes // self.rows) + 5)


def changed(name, **config):
    return dataclasses.replace(VARIANTS[name], config={**VARIANTS[name].config, **config})


@pytest.fixture(scope="module", params=[BY_LAYER, "llama relu", "olmoe", "llama relu in codes"])
def table(request, variant_of, tmp_path_factory):
    if request.param == BY_LAYER:
        return Tabled(variant_of(BY_LAYER)[1], 300, TABLE, "per_layer_embedding.weight")
    name, encoding, width = request.param, None, 128
    if name.endswith(" in codes"):
        name, encoding, width = name.removesuffix(" in codes"), "int8_32", 544
    folder = tmp_path_factory.mktemp("untied")
    source = make_checkpoint(folder / "hf", changed(name, vocab_size=2000, hidden_size=width))
    convert(source, folder / "model", encoding=encoding, resident_encoding=encoding)
    return Tabled(folder / "model", 2000, RESIDENT, "embedding.weight")


def passes(model, ids):
    """Logits of a prompt, of a few tokens together, of single tokens, and of two sequences in a pass."""
    with model.new_sequence() as one, model.new_sequence() as other:
        yield model.step([(one, ids[:90])], all_logits=True)
        yield model.step([(one, ids[:5])], all_logits=True)
        for token in ids[7:15]:
            yield model.step([(one, [token])])
        yield model.step([(one, ids[20:22]), (other, ids[:40])])


def test_bits_do_not_depend_on_how_many_rows_stay(table):
    with planned(table.directory, RUN) as whole:
        assert whole.plan.memory.table_rows == table.rows
        assert (whole.parts.table_file is None) == (table.name == RESIDENT)
        expected = list(passes(whole, table.ids))
    for kept in (1, 7, table.rows // 2, table.rows - 1):
        with planned(table.directory, RUN, table_rows=kept) as model:
            assert model.parts.table_file is not None
            assert all(np.array_equal(*pair) for pair in zip(passes(model, table.ids), expected, strict=True))


def test_rows_that_come_again_are_not_read_again(table):
    with planned(table.directory, RUN, table_rows=8) as model, model.new_sequence() as sequence:
        model.parts.table_file.inject("error", 2**60)
        for _ in range(2):
            model.step([(sequence, table.ids[:5] * 3)])
        model.parts.table_file.inject("error", 0, count=10**6, argument=5)
        model.step([(sequence, table.ids[:5])])  # reads none
        with pytest.raises(FlashIOError):
            model.step([(sequence, [table.unseen()])])


def test_a_failed_read_leaves_the_sequence_as_it_was(table):
    first, rest = table.ids[:20], table.ids[20:90]
    with planned(table.directory, RUN) as whole, whole.new_sequence() as sequence:
        expected = [whole.step([(sequence, first)]), whole.step([(sequence, rest)])]
    with planned(table.directory, RUN, table_rows=10) as model, model.new_sequence() as sequence:
        assert np.array_equal(model.step([(sequence, first)]), expected[0])
        held = model._memory.pool.nbytes
        for reads in (0, 1, 3):
            model.parts.table_file.inject("error", reads, count=10**6, argument=5)
            with pytest.raises(FlashIOError):
                model.step([(sequence, rest)])
            assert (sequence.length, model._memory.pool.nbytes) == (20, held)
        model.parts.table_file.inject("error", 2**60)
        assert np.array_equal(model.step([(sequence, rest)]), expected[1])


def test_a_row_that_is_damaged_after_the_start_is_found(table, tmp_path):
    copy = shutil.copytree(table.directory, tmp_path / "model")
    with planned(copy, RUN, table_rows=10) as model, model.new_sequence() as sequence:
        table.damage(copy, table.ids[3])
        with pytest.raises(ChecksumError):
            model.step([(sequence, table.ids[:5])])
        assert sequence.length == 0
        model.step([(sequence, [token for token in table.ids[:20] if token != table.ids[3]])])
    assert main(["verify", str(copy)]) != 0
    if table.name == RESIDENT:
        with pytest.raises(ChecksumError):  # the file's hash
            planned(copy, RUN, table_rows=10)


def test_a_table_that_is_missing_or_another_is_refused(variant_of, tmp_path):
    copy = shutil.copytree(variant_of(BY_LAYER)[1], tmp_path / "model")
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
    encoding, ids = f"int{bits}_32", np.random.default_rng(0).integers(4, 300, 40).tolist()
    convert(variant_of(BY_LAYER)[0], tmp_path / "model", resident_encoding=encoding, encoding=encoding)
    assert ModelDir.open(tmp_path / "model").table.encoding.name == encoding
    expected = ReferenceDecoder(tmp_path / "model").logits(ids).numpy()
    with planned(tmp_path / "model", RUN, table_rows=16) as found:
        near = found.step([(found.new_sequence(), ids)], all_logits=True)
    assert np.corrcoef(near.ravel(), expected.ravel())[0, 1] > 0.995


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        (BY_LAYER, {"vocab_size_per_layer_input": 10_000}, "per-layer embeddings"),
        ("olmoe", {"vocab_size": 20_000, "hidden_size": 128}, "input embedding"),
    ],
)
def test_a_table_stays_on_flash_where_memory_lacks(tmp_path, capsys, name, config, said):
    convert(make_checkpoint(tmp_path / "hf", changed(name, **config)), tmp_path / "model")
    model = ModelDir.open(tmp_path / "model")
    table = model.table or model.manifest.embedding_layout(model.block)
    rows = next(value for key, value in config.items() if key.startswith("vocab_size"))

    def plan(limit):
        return resolve(dataclasses.replace(RUN, memory=limit), model, available=10**12, process=10**8).memory

    much = plan(4_000_000_000)
    little = plan(much.minimum_nbytes)
    assert (little.table_rows, much.table_rows) == (1024, rows)
    assert little.minimum_nbytes == much.minimum_nbytes
    assert little.total_nbytes <= little.limit_nbytes
    assert much.fixed_nbytes - little.fixed_nbytes > 0.9 * (rows - 1024) * table.stride
    assert main(["plan", str(model.path), "--memory", "4GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_rows"] == rows
    whole = [] if model.table is None else [("4GB", rows)]  # an embedding that stays whole is not on flash
    for limit, kept in (*whole, (f"{found['minimum_bytes'] // 10**6 + 3}MB", 1024)):
        assert main(["plan", str(model.path), "--memory", limit]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if said in line)
        assert f"{kept} of {rows} rows; {format_size(table.nbytes)} on flash" in line
