"""Experts read where they lie, in a GGUF file: the same bits as of the converted directory, and a file that changes."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from arch_models import Variant, make_checkpoint
from damage import flip
from gguf_files import HALVES, put_halves
from planned import logits_of, memory_plan, with_rows
from profiles import BATCHES, profile_of
from quantised_files import (
    MIXTURES,
    SHARING,
    WIDE,
    experts_alone,
    make,
    mixed,
    name_of,
    of_codebooks,
    of_layers,
    of_wide_shared,
)
from safetensors.torch import load_file, save_file
from test_gpt_oss import EXPERTS, mxfp4
from weights_of_folders import tensors_of

from flashllm import _core
from flashllm.base.codes.carried import PACKED_AS, PLANE_CODES, pack_codes
from flashllm.cli import main
from flashllm.convert.kept.blocks import KINDS
from flashllm.convert.locate import resolve_model
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FormatError, UnsupportedModelError
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN
from flashllm.format.report.verify import verify
from flashllm.format.rows import RowLayout, pack_rows
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.plan.activity import ExpectedActivity, LayerActivity
from flashllm.plan.latency import estimate_prompt, estimate_token
from flashllm.profile.costs import ReaderChoice

CONFIGS = ({}, {"cache_policy": "window"}, {"io_backend": "io_uring"}, {"direct": False})  # each reads otherwise


def assert_same_logits(copied, lying, configs=CONFIGS):
    expected = logits_of(copied)
    for config in configs:
        np.testing.assert_array_equal(logits_of(lying, **config), expected, err_msg=str(config))


def assert_damage_is_named(directory, path, offset, message, layer):
    """Of one byte of the file at `path` that is wrong, with and without another time; then the byte is right again."""
    status = path.stat()
    flip(path, offset)
    with pytest.raises(FormatError, match=rf"{path.name}: holds the experts of .*{directory.name}, but was written to"):
        Manifest.load(directory)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (problem,) = verify(directory).problems
    assert problem.file == str(path)
    assert message in problem.message
    with pytest.raises(ChecksumError, match=layer):
        logits_of(directory)
    flip(path, offset)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def stored_rows(kind, rows, length):
    """Rows of random blocks whose scales are finite."""
    random, each = np.random.default_rng(0), KINDS[kind]
    blocks = random.integers(0, 256, (rows * length // each.weights, each.nbytes), np.uint8)
    halves = (0, 2) if each.form.has_minimum else (0,) if kind != "MXFP4" else ()
    for at in HALVES[kind][0] if kind in HALVES else halves:
        put_halves(blocks, kind, at, random.normal(0, 0.01, len(blocks)))
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(2, 253, len(blocks))
        blocks[::7] = 0
        blocks[::7, 0] = 255  # of zeros, whose scale does not matter
    return blocks.reshape(rows, -1)


def test_experts_whose_scales_are_not_all_in_their_blocks_are_copied():
    layout = RowLayout(
        encoding="nvfp4", d_model=64, d_ff=64, matrices=("up", "gate", "down"), down_encoding="codes_fp4"
    )
    with pytest.raises(ValueError, match="NVFP4 is not read where it lies"):
        _core.BlockRows("NVFP4", 64, layout.native("float32"), "up")


def by_matrices(layout, rows):
    """Bytes of rows [n, stride] of a unit whose vectors lie matrix by matrix."""
    found = np.zeros_like(rows)
    for matrix in layout.matrices:
        at, nbytes = layout.byte_offset(matrix), layout.vector_nbytes(matrix)
        part = rows[:, at : at + nbytes]
        found.reshape(-1)[at * len(rows) :][: part.size] = part.reshape(-1)
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "NVFP4"])
def test_stored_rows_become_the_rows_that_conversion_writes(kind):
    neurons, d_model, each = 256, 512, KINDS[kind]
    code = next(code for code in PACKED_AS.values() if (code.bits, code.form) == (each.bits, each.form))
    for plane in PLANE_CODES.values():
        if plane.bits < each.bits or plane.table != each.form.table:
            continue
        layout = RowLayout(
            encoding=code.name, d_model=d_model, d_ff=neurons, matrices=("up", "gate", "down"), down_encoding=plane.name
        )
        above, below = stored_rows(kind, neurons, d_model), stored_rows(kind, d_model, neurons)
        columns = np.ascontiguousarray(each.quantised(below).codes.T)
        vectors = {"up": code.pack(each.quantised(above)), "gate": code.pack(each.quantised(above[::-1]))}
        vectors["down"] = pack_codes(columns, plane.bits, unsigned=each.form.unsigned)
        expected = np.zeros((neurons, layout.stride), np.uint8)
        pack_rows(layout, vectors, expected)
        found = np.zeros_like(expected)
        for matrix, stored in {"up": above, "gate": above[::-1].copy(), "down": below}.items():
            length = neurons if matrix == "down" else d_model
            rows, half = _core.BlockRows(kind, length, layout.native("float32", neurons), matrix), stored.nbytes // 2
            rows.unpack(stored.reshape(-1)[half:], half, found)
            rows.unpack(stored.reshape(-1)[:half], 0, found)
        np.testing.assert_array_equal(found, by_matrices(layout, expected), err_msg=plane.name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", mixed, of_layers, of_codebooks], ids=name_of)
def test_bits_are_those_of_the_converted_directory(quantised, kind):
    made = quantised(kind, "olmoe")
    (copied, _), (lying, manifest) = made.kept(), made.kept(in_place=True)
    assert manifest.in_place.files[0].path == str(made.path)
    assert_same_logits(copied, lying)
    assert (lying / FFN).stat().st_size < 0.1 * (copied / FFN).stat().st_size


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *((experts_alone if name == "gpt_oss" else "Q4_K", name) for name in MIXTURES),
        *((of_wide_shared, name) for name in SHARING),  # of other kinds than the others, in memory
    ],
    ids=name_of,
)
def test_every_mixture(quantised, kind, model_type):
    made = quantised(kind, model_type)
    lying, manifest = made.kept(in_place=True)
    assert manifest.in_place is not None
    assert_same_logits(made.kept()[0], lying, [{}])
    assert verify(lying).ok


def test_a_file_that_changed_or_is_gone_is_named(tmp_path):
    path, _ = make(tmp_path, "Q4_K", "qwen2_moe")
    slices = convert(path, tmp_path / "lying", keep=True, in_place=True).in_place.layers[1][2]
    wrong = "layer 1, expert 1: wrong checksum; get the file again"
    offset = slices.places[1][1] + 5
    assert_damage_is_named(tmp_path / "lying", path, offset, wrong, "layer 1, neuron 256: wrong checksum")
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(FormatError, match=r"No such file or directory; put it back, or remove"):
        Manifest.load(tmp_path / "lying")


def test_what_does_not_lie_so_is_copied_and_said(quantised, tmp_path, capsys):
    assert main(["convert", str(quantised("Q4_K").path), str(tmp_path / "dense"), "--in-place"]) == 0
    assert "rows are copied, as its neurons are read one by one" in capsys.readouterr().err
    assert Manifest.load(tmp_path / "dense").in_place is None


def test_experts_stay_where_they_lie_on_first_use(quantised, tmp_path):
    path, said = quantised("Q4_K", "olmoe").path, []

    def found(source=path, **options):
        return resolve_model(str(source), cache=tmp_path / "cache", say=said.append, explain=said.append, **options)

    lying = found()
    assert Manifest.load(lying).in_place is not None
    assert f"of experts stay in {path} and are read there: it must stay as it is" in said[-1]
    assert found() == lying
    copied = found(in_place=False)  # for who reads no other file
    assert Manifest.load(copied).in_place is None
    assert found() == copied
    said.clear()
    assert Manifest.load(found(quantised("Q4_K").path)).in_place is None
    assert said
    assert not any("read there" in line or "experts are" in line for line in said)


def test_the_throughput_engine_names_the_file(quantised):
    lying, manifest = quantised("Q4_K", "olmoe").kept(in_place=True)
    message = f"its experts lie in {manifest.in_place.files[0].path}"
    with pytest.raises(UnsupportedModelError, match=message), open_weights(lying):
        pass
    assert main(["plan", str(lying)]) == 0
    assert main(["inspect", str(lying)]) == 0


CHOICE = ReaderChoice(backend="threads", depth=32, max_gap=0, source="default")


def some_rows(count, plan):
    """A token that reads and multiplies so many rows of each layer."""
    layer = LayerActivity(active=count, firing=count, misses=count, requests=1, rows_read=count, prefetched=0, useful=0)
    return ExpectedActivity(layers=(layer,) * len(plan.cache_rows), source="")


def test_a_plan_counts_what_blocks_cost(quantised):
    """A token that reads experts where they lie takes longer by what every weight of theirs costs, on two cores."""
    quick, slow = ({"blocks_wps": rate} for rate in (1e12, 1e9))
    seconds = {}
    for where in (False, True):
        model = ModelDir.open(quantised("Q4_K", "olmoe").kept(in_place=where)[0])
        plan = memory_plan(model)
        quickly, slowly = (
            estimate_token(model, plan, costs=profile_of(**rate), choice=CHOICE, activity=some_rows(40, plan)).compute_s
            for rate in (quick, slow)
        )
        seconds[where] = slowly - quickly
    row = 3 * model.architecture.d_model
    assert seconds == {False: 0.0, True: pytest.approx(40 * len(plan.cache_rows) * row / 2e9, rel=1e-3)}
    nothing = with_rows(plan, [0] * len(plan.cache_rows))  # is cached; a long prompt goes to every expert
    batches = {"batches": {model.manifest.dtype: BATCHES}}
    quickly, slowly = (
        estimate_prompt(model, nothing, costs=profile_of(**rate, **batches), tokens=1000).products_s
        for rate in (quick, slow)
    )
    assert slowly - quickly == pytest.approx(model.architecture.neurons * row / 2e9, rel=1e-2)


def test_a_plan_counts_codes_of_few_bits_by_weights(quantised):
    """As products of two bits take as long a weight as those of four: 4.5 bits of int4_32 for each."""
    model = ModelDir.open(quantised("TQ2_0").kept()[0])
    rows, plan = model.manifest.rows, memory_plan(model)
    quickly, slowly = (
        estimate_token(
            model, plan, costs=profile_of(sparse_bps={"int4_32": rate}), choice=CHOICE, activity=some_rows(40, plan)
        ).compute_s
        for rate in (1e12, 1e6)
    )
    weights = 40 * len(plan.cache_rows) * 3 * model.architecture.d_model * rows.stride / rows.row_nbytes
    assert (rows.encoding, rows.down) == ("ternary", "codes2")
    assert slowly - quickly == pytest.approx(weights * 4.5 / 8 / 1e6, rel=0.05)


def sharded(source):
    """The folder's tensors in two files, with an index: experts by turns in each."""
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    owner = {name: shards[sum(map(int, re.findall(r"\d+", name))) % 2] for name in state}
    for shard in shards:
        save_file({name: state[name] for name in state if owner[name] == shard}, source / shard, {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    return source


def folder_of(root, model_type, dtype="bfloat16"):
    """A folder whose widths are multiples of 64."""
    widths = dict.fromkeys(MIXTURES.get(model_type, ("intermediate_size",)), 192)
    return make_checkpoint(root / "hf", Variant(model_type, WIDE | widths), dtype=dtype)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("qwen3_moe", "bfloat16"), ("qwen3_5_moe_text", "float16"), ("nemotron_h", "float32"), ("granitemoe", "bfloat16")],
)
def test_safetensors_of_numbers_are_read_where_they_lie(tmp_path, model_type, dtype):
    source, lines = folder_of(tmp_path, model_type, dtype), []
    if model_type == "qwen3_moe":  # a tensor for each expert
        sharded(source)
    convert(source, tmp_path / "copied")
    convert(source, tmp_path / "lying", keep=True, in_place=True, say=lines.append)
    found = Manifest.load(tmp_path / "lying").in_place
    assert [Path(file.path) for file in found.files] == sorted(source.glob("*.safetensors"))
    assert any("of experts stay in it and are read there" in line for line in lines)
    assert_same_logits(tmp_path / "copied", tmp_path / "lying")
    assert verify(tmp_path / "lying").ok


def test_a_shard_that_changed_or_is_gone_is_named(tmp_path):
    source = sharded(folder_of(tmp_path, "qwen3_moe"))
    convert(source, tmp_path / "lying", in_place=True)
    found = Manifest.load(tmp_path / "lying").in_place
    file, offset = found.layers[0][2].places[3]
    path = Path(found.files[file].path)
    wrong = f"layer 0.*wrong checksum of the row at offset .* of {path}"
    assert_damage_is_named(tmp_path / "lying", path, offset + 5, "layer 0, expert 3: wrong checksum", wrong)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=rf"{path.name}: holds the experts of .*put it back, or remove"):
        Manifest.load(tmp_path / "lying")


def test_folders_stay_on_first_use_and_others_are_copied(tmp_path):
    said, explained = [], []

    options = {"cache": tmp_path / "cache", "say": said.append, "explain": explained.append}

    def found(source):
        return Manifest.load(resolve_model(str(source), **options)).in_place

    source = folder_of(tmp_path, "qwen3_moe")
    assert found(source) is not None
    assert f"of experts stay in {source} and are read there: it must stay as it is" in said.pop()
    other = folder_of(tmp_path / "gpt_oss", "gpt_oss")  # gate and up rows alternate, as columns
    assert found(other) is None
    assert "experts are copied, as they lie there in another form than here" in explained[-1]
    copied = resolve_model(str(other), **options)
    assert resolve_model(str(other), in_place=False, **options) == copied  # no second copy
    mxfp4(other)
    assert found(other) is not None
    with_dtype = []
    convert(source, tmp_path / "half", dtype="float16", in_place=True, say=with_dtype.append)
    assert with_dtype[0].startswith("hf: experts are copied, as they lie there in another form")
    assert with_dtype[0].endswith("a GGUF file of the model can be used where it lies")


@pytest.mark.parametrize("shards", [1, 2])
def test_gpt_oss_is_read_where_it_lies(tmp_path, shards):
    """Codes of gates and ups in turn, their scales in another tensor, and down's codes."""
    source, lines = folder_of(tmp_path, "gpt_oss"), []
    mxfp4(source)
    if shards == 2:
        sharded(source)
    exact = {"keep": True, "dtype": "float32"}
    convert(source, tmp_path / "copied", **exact)
    convert(source, tmp_path / "lying", **exact, in_place=True, say=lines.append)
    manifest = Manifest.load(tmp_path / "lying")
    assert [each.kind for each in manifest.in_place.layers[0]] == ["E2M1", "E8M0", "E2M1"]
    assert "of experts stay in it and are read there" in lines[0]
    assert_same_logits(tmp_path / "copied", tmp_path / "lying", [*CONFIGS, {"mode": "dense"}])
    assert (tmp_path / "lying" / FFN).stat().st_size < 0.1 * (tmp_path / "copied" / FFN).stat().st_size
    assert verify(tmp_path / "lying").ok
    for verb in ("plan", "inspect", "verify"):
        assert main([verb, str(tmp_path / "lying")]) == 0
    for file, offset in (each.places[3] for each in manifest.in_place.layers[0]):
        path, wrong = Path(manifest.in_place.files[file].path), "layer 0, expert 3: wrong checksum"
        assert_damage_is_named(tmp_path / "lying", path, offset + 700, wrong, r"layer 0.*wrong checksum")


def test_scales_of_gpt_oss_at_the_ends_of_their_range(tmp_path):
    """As where experts are copied: any of groups of zeros, of others those that fp32 can hold."""
    source = folder_of(tmp_path, "gpt_oss")
    mxfp4(source)
    with tensors_of(source) as state:
        for part in ("gate_up", "down"):
            state[f"{EXPERTS}{part}_proj_blocks"][1:, 1::3, 0] = 0x80  # 0 and -0
            state[f"{EXPERTS}{part}_proj_scales"][1, 1::3, 0] = 0
            state[f"{EXPERTS}{part}_proj_scales"][2, 1::3, 0] = 254
    for name, in_place in (("copied", False), ("lying", True)):
        convert(source, tmp_path / name, keep=True, in_place=in_place)
    np.testing.assert_array_equal(logits_of(tmp_path / "lying"), logits_of(tmp_path / "copied"))
    for row, matrix in ((6, "gate"), (9, "up")):
        scales = state[f"{EXPERTS}gate_up_proj_scales"].clone()
        scales[2, row, 1] = 253
        changed = state | {f"{EXPERTS}gate_up_proj_scales": scales}
        save_file(changed, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(FormatError, match=rf"experts.2.{matrix}.*a scale is no number, or as small or large"):
            convert(source, tmp_path / matrix, keep=True, in_place=True)


def test_codes_and_scales_apart_become_the_rows_that_conversion_writes():
    neurons, d_model, each = 192, 512, KINDS["MXFP4"]
    layout = RowLayout(
        encoding="mxfp4", d_model=d_model, d_ff=neurons, matrices=("up", "gate", "down"), down_encoding="codes_fp4"
    )
    random = np.random.default_rng(0)
    above = random.integers(0, 256, (2 * neurons, d_model // 32, 16), np.uint8)
    below = random.integers(0, 256, (d_model, neurons // 32, 16), np.uint8)
    scales = random.integers(2, 253, above.shape[:2], np.uint8)

    def blocks(codes, scales):
        """As a GGUF file has them."""
        values = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], 32)
        packed = values[..., :16] | values[..., 16:] << 4
        return np.concatenate([scales[..., None], packed], -1).reshape(len(codes), -1)

    whole, of_down = blocks(above, scales), blocks(below, np.full(below.shape[:2], 127, np.uint8))
    vectors = {
        matrix: PACKED_AS["mxfp4"].pack(each.quantised(whole[first::2])) for first, matrix in enumerate(("gate", "up"))
    }
    vectors["down"] = pack_codes(np.ascontiguousarray(each.quantised(of_down).codes.T), 4, unsigned=True)
    expected, found = np.zeros((2, neurons, layout.stride), np.uint8)
    pack_rows(layout, vectors, expected)
    for matrix, kind, stored in (("up", "E2M1", above), ("gate", "E8M0", scales), ("down", "E2M1", below)):
        count, length = (d_model, neurons) if matrix == "down" else (neurons, d_model)
        rows = _core.BlockRows(kind, length, layout.native("float32", neurons), matrix)
        piece = stored.nbytes // count * 64
        for first in reversed(range(0, stored.nbytes, piece)):
            rows.unpack(stored.reshape(-1)[first : first + piece], first, found)
    np.testing.assert_array_equal(found, by_matrices(layout, expected))
    for matrix, kind in (("gate", "E2M1"), ("up", "E8M0"), ("down", "E8M0")):
        with pytest.raises(ValueError, match="do not fit the neurons' rows"):
            _core.BlockRows(kind, d_model, layout.native("float32"), matrix)


@pytest.mark.parametrize(("kind", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_stored_numbers_become_the_rows_that_conversion_writes(kind, dtype):
    neurons, d_model = 200, 320  # no multiples of what is put across together
    layout = RowLayout(encoding=dtype, d_model=d_model, d_ff=neurons, matrices=("up", "gate", "down"))
    random = np.random.default_rng(0)
    up, gate, down = (
        random.integers(0, 2**15, shape).astype(layout.storage)
        for shape in ((neurons, d_model), (neurons, d_model), (d_model, neurons))
    )
    expected, found = np.zeros((2, neurons, layout.stride), np.uint8)
    pack_rows(layout, {"up": up, "gate": gate, "down": np.ascontiguousarray(down.T)}, expected)
    for matrix, stored in {"up": up, "gate": gate, "down": down}.items():
        rows = _core.BlockRows(kind, stored.shape[1], layout.native("float32", neurons), matrix)
        whole, half = stored.reshape(-1).view(np.uint8), stored[: len(stored) // 64 * 32].nbytes
        rows.unpack(whole[half:], half, found)
        rows.unpack(whole[:half], 0, found)
    np.testing.assert_array_equal(found, by_matrices(layout, expected))
    with pytest.raises(ValueError, match="do not fit the neurons' rows"):
        _core.BlockRows("F32" if kind == "BF16" else "BF16", d_model, layout.native("float32"), "up")
