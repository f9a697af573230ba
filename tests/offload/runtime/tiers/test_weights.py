"""Every tensor of a model comes back, bit for bit, from whatever tier and kind of folder it lies in."""

import itertools
import json
import shutil
import tracemalloc
from functools import cache

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint
from damage import flip
from offload_host import PLACES
from safetensors.numpy import load_file, save_file
from tiny_models import make_tiny_opt

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.base.group_codes import GROUP_CODES
from flashllm.convert.run import convert
from flashllm.errors import ChecksumError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, RESIDENT, ffn_tensor
from flashllm.format.rows import unpack_rows
from flashllm.format.safetensors import open_safetensors
from flashllm.offload.planner.packing import WeightPacking, late_layers
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.tiers.scratch import Scratch, open_reader
from flashllm.offload.runtime.tiers.source import matrix_name, open_weights
from flashllm.offload.runtime.tiers.weight_plan import assign, plan_weights, weight_packing
from flashllm.offload.runtime.tiers.weights import WeightStore

WHERE = {**PLACES, "mixed": (0.3, 0.3, 0.4)}
MODELS = ("opt", "opt narrow embedding", "opt without norm weights", "llama", "llama tied", "llama biases")


def policy(wg, wc, wd):
    return Policy(gpu_batch=1, wg=wg, wc=wc, wd=wd, cg=1, cc=0, cd=0, hg=1, hc=0, hd=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(variant, dtype) -> Hugging Face folder, model directory; made once."""

    @cache
    def get(name, dtype="bfloat16"):
        root = tmp_path_factory.mktemp("model")
        source = make_checkpoint(root / "hf", VARIANTS[name], dtype=dtype)
        convert(source, root / "model")
        return source, root / "model"

    return get


@cache
def expected(folder, dtype):
    """Canonical name -> array as stored, by another reader than the product's."""
    import torch
    from transformers import AutoModelForCausalLM

    with open_weights(folder) as source:
        names = source._names
        state = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()
        storage = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.uint16}[dtype]
        return {name: state[name_in].view(storage).numpy() for name, name_in in names.items()}


def open_store(source, where, scratch):
    plan = plan_weights(source, policy(*WHERE[where]))
    return WeightStore(source, plan, reader=open_reader(), pool=_core.ThreadPool(1), scratch=scratch)


def check_store(store, tensors, dtype):
    """Everything the store hands out is what the model holds."""
    kind = WEIGHT_DTYPES[dtype]
    wide = lambda name: cast(tensors[name], kind, WEIGHT_DTYPES["float32"]) if name in tensors else None  # noqa: E731
    layers = len(store.plan.bundles) - 2
    for layer, buffer in zip(range(layers), itertools.cycle(range(2))):
        store.load(layer, buffer)
        for name, matrix in store.layer(layer, buffer).matrices.items():
            assert np.array_equal(matrix.array, tensors[matrix_name(layer, name)])
            assert matrix.array.shape == (matrix.rows, matrix.columns)
            attention = name in ("query", "key", "value", "out")
            bias = wide(f"layers.{layer}.{name}.bias" if attention else f"layers.{layer}.ffn.{name}_bias")
            assert np.array_equal(matrix.bias, bias) if bias is not None else matrix.bias is None
        vectors = store.layer(layer, buffer).vectors
        assert set(vectors) == {name.split(".", 2)[2] for name in tensors if name.startswith(f"layers.{layer}.")} - {
            f"{name}.weight" for name in store.plan.homes
        }
        for name, found in vectors.items():
            assert np.array_equal(found, wide(f"layers.{layer}.{name}"))
    store.load(layers, 0)
    ends = store.ends(0)
    head = ends.matrices["head" if "head.weight" in tensors else "embedding"].array
    assert np.array_equal(head, tensors.get("head.weight", tensors["embedding.weight"]))
    ids = np.array([3, 299, 0, 3, 17, 200])
    assert np.array_equal(store.embedding_rows(ids), tensors["embedding.weight"][ids])
    assert store.embedding_rows(ids[:0]).shape == (0, tensors["embedding.weight"].shape[1])
    for name in ("positions", "project_in", "project_out"):
        assert (name in ends.matrices) == (f"{name}.weight" in tensors)
        if name in ends.matrices:
            assert np.array_equal(ends.matrices[name].array, tensors[f"{name}.weight"])
    for name, found in ends.vectors.items():
        assert np.array_equal(found, wide(name))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["folder", "directory"])
def test_every_tensor_comes_back_from_every_tier(folders, tmp_path, name, where, kind):
    folder, directory = folders(name)
    tensors = expected(folder, "bfloat16")
    with open_weights(folder if kind == "folder" else directory) as source:
        plan = plan_weights(source, policy(*WHERE[where]))
        with Scratch(tmp_path, plan.scratch_nbytes) as scratch, open_store(source, where, scratch) as store:
            bundled = {plan.homes["up"], plan.homes["down"], plan.homes.get("gate")}
            assert (plan.scratch_nbytes > 0) == (kind == "directory" and "d" in bundled)
            check_store(store, tensors, "bfloat16")
            assert store.bytes_read > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("where", ["mixed", "disk"])
def test_other_dtypes(folders, tmp_path, dtype, where):
    for path in folders("opt", dtype):
        with open_weights(path) as source, Scratch(tmp_path, 1 << 24) as scratch:
            store = open_store(source, where, scratch)
            check_store(store, expected(folders("opt", dtype)[0], dtype), dtype)
            store.close()


def test_shards(tmp_path):
    folder = make_tiny_opt(tmp_path / "hf", dtype="bfloat16", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    with (
        open_weights(folder) as source,
        Scratch(tmp_path / "s", 0) as scratch,
        open_store(source, "disk", scratch) as store,
    ):
        check_store(store, expected(folder, "bfloat16"), "bfloat16")


def test_tensors_of_another_dtype_are_rounded_into_the_scratch_file(folders, tmp_path):
    folder, _ = folders("llama")
    tensors = load_file(
        str(make_checkpoint(tmp_path / "wide", VARIANTS["llama"], dtype="float32") / "model.safetensors")
    )
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    name = "model.layers.1.mlp.up_proj.weight"
    values = {key: value.astype(np.float16) if key != name else value for key, value in tensors.items()}
    save_file(values, mixed / "model.safetensors")
    (mixed / "config.json").write_text((folder / "config.json").read_text())
    with open_weights(mixed) as source, Scratch(tmp_path / "s", 1 << 20) as scratch:
        store = open_store(source, "disk", scratch)
        assert store.plan.scratch_nbytes == 3 * 4096  # one matrix of [96, 64] in 16 bits, in whole blocks
        store.load(1, 0)
        assert np.array_equal(store.layer(1, 0).matrices["up"].array, tensors[name].astype(np.float16))
        store.close()
    values[name] = np.full_like(tensors[name], 1e30)
    save_file(values, mixed / "model.safetensors")
    with (
        open_weights(mixed) as source,
        Scratch(tmp_path / "s", 1 << 20) as scratch,
        pytest.raises(UnsupportedModelError, match="outside the range of float16"),
    ):
        open_store(source, "disk", scratch)


def test_a_damaged_row_is_found_when_it_is_put_together(folders, tmp_path):
    directory = shutil.copytree(folders("opt")[1], tmp_path / "model")
    flip(directory / FFN, 4096 + 700)
    with (
        open_weights(directory) as source,
        Scratch(tmp_path / "s", 1 << 24) as scratch,
        pytest.raises(ChecksumError, match="layer 0, neuron"),
    ):
        open_store(source, "disk", scratch)


def test_a_file_that_shrinks_is_an_error(folders, tmp_path):
    folder = shutil.copytree(folders("opt")[0], tmp_path / "hf")
    with (
        open_weights(folder) as source,
        Scratch(tmp_path / "s", 0) as scratch,
        open_store(source, "disk", scratch) as store,
    ):
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(20_000)
        with pytest.raises(FormatError, match="shrank"):
            store.load(2, 0)


def test_a_matrix_in_codes_is_widened_in_pieces(tmp_path):
    """However large an embedding is: its job counts the matrix alone."""
    folder = make_tiny_opt(tmp_path / "hf", d_model=256, vocab_size=16384, num_layers=1, dtype="float16")
    convert(folder, tmp_path / "model", encoding="int4_32", resident_encoding="int4_32_min")
    with open_weights(tmp_path / "model") as source:
        table = np.empty(source.shapes["embedding.weight"], np.float16)
        tracemalloc.start()
        source.read({"embedding.weight": table})
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert np.any(table)
    assert most < 24 << 20  # at once it is 58 MB


def test_what_is_no_model_is_refused(tmp_path, folders):
    with pytest.raises(UsageError, match="no such directory"):
        open_weights(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        open_weights(tmp_path)
    folder = folders("opt")[0]
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ffn_dim": 100}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(FormatError, match="has shape"):
        open_weights(tmp_path)


def test_a_plan_says_what_a_store_holds(folders):
    folder, directory = folders("llama")
    with open_weights(folder) as source:
        layer = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64)
        on_disk = plan_weights(source, policy(0, 0, 1))
        assert on_disk.scratch_nbytes == 0
        assert layer <= on_disk.buffer_nbytes <= layer + 8 * 4096
        assert on_disk.device_nbytes == on_disk.small_nbytes
        everything = plan_weights(source, policy(1, 0, 0))
        assert everything.buffer_nbytes == everything.scratch_nbytes == everything.gather_nbytes == 0
        assert everything.device_nbytes - everything.small_nbytes >= 3 * layer + 2 * 2 * 300 * 64
    with open_weights(directory) as source:
        assert plan_weights(source, policy(0, 0, 1)).scratch_nbytes == 3 * 3 * 3 * 4096  # layers, matrices, blocks
        with pytest.raises(UsageError, match="the widths are"):
            plan_weights(source, policy(0, 0, 1), bits=5)


def test_whole_matrices_come_closest_to_the_fractions():
    sizes = {"a": 4, "b": 2, "c": 2}
    assert assign(sizes, (1, 0, 0)) == {"a": "g", "b": "g", "c": "g"}
    assert assign(sizes, (0.5, 0, 0.5)) == {"a": "g", "b": "d", "c": "d"}
    assert assign(sizes, (0.25, 0, 0.75)) == {"a": "d", "b": "g", "c": "d"}
    assert sorted(assign(sizes, (0.3, 0.25, 0.45)).values()) == ["c", "d", "g"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("where", ["device", "mixed", "disk"])
@pytest.mark.parametrize("kind", ["folder", "directory"])
def test_packed_matrices_are_the_packers(folders, tmp_path, where, bits, kind):
    folder, directory = folders("llama biases")
    tensors, pool = expected(folder, "bfloat16"), _core.ThreadPool(1)
    with open_weights(folder if kind == "folder" else directory) as source:
        plan = plan_weights(source, policy(*WHERE[where]), bits=bits)
        with (
            Scratch(tmp_path, plan.scratch_nbytes) as scratch,
            WeightStore(source, plan, reader=open_reader(), pool=pool, scratch=scratch) as store,
        ):
            assert (plan.scratch_nbytes > 0) == ("d" in plan.homes.values())
            for layer in range(source.num_layers):
                store.load(layer, layer % 2)
                for name, matrix in store.layer(layer, layer % 2).matrices.items():
                    weights = tensors[matrix_name(layer, name)]
                    packing = weight_packing(source, bits).made(name, layer, bits)
                    vectors = np.ascontiguousarray(weights.T) if name == "down" else weights
                    wide = cast(vectors, WEIGHT_DTYPES["bfloat16"], WEIGHT_DTYPES["float32"])
                    packed = GROUP_CODES[packing.encoding].encode(wide)
                    assert np.array_equal(matrix.array, packed.reshape(-1))
                    assert (matrix.rows, matrix.columns, matrix.packing) == (*weights.shape, packing)
                    assert matrix.bias is not None
            store.load(source.num_layers, 0)
            assert np.array_equal(store.ends(0).matrices["head"].array, tensors["head.weight"])  # it stays in 16 bits
    assert not list(tmp_path.iterdir())


def test_codes_of_a_directory_are_kept(tmp_path):
    """Whatever calibration chose; those of more bits than are wanted are rounded again."""
    folder = make_tiny_opt(tmp_path / "hf", num_layers=1)
    convert(folder, tmp_path / "model", encoding="int4_32", resident_encoding="int8_32")
    layout = Manifest.load(tmp_path / "model").rows
    with open_weights(tmp_path / "model") as source:
        plan = plan_weights(source, policy(*PLACES["device"]), bits=4)
        with (
            Scratch(tmp_path / "s", 0) as scratch,
            WeightStore(source, plan, reader=open_reader(), pool=_core.ThreadPool(1), scratch=scratch) as store,
            open_safetensors(tmp_path / "model" / FFN) as ffn,
            open_safetensors(tmp_path / "model" / RESIDENT) as resident,
        ):
            matrices = store.layer(0, 0).matrices
            assert {name: matrix.packing.encoding for name, matrix in matrices.items()} == {
                "query": "int4_64_min",
                "key": "int4_64_min",
                "out": "int4_64_min",
                "value": "int8_32",
                "up": "int4_32",
                "down": "int4_32",
            }
            rows = np.empty((layout.num_rows, layout.stride), np.uint8)
            ffn.read_into(ffn.header.tensors[ffn_tensor(0)], 0, rows.reshape(-1).data)
            for name, stored in unpack_rows(layout, rows[: layout.d_ff]).items():
                np.testing.assert_array_equal(matrices[name].array, stored.reshape(-1))
            info = resident.header.tensors[matrix_name(0, "value")]
            value = np.empty(info.shape, np.uint8)
            resident.read_into(info, 0, value.reshape(-1).data)
            np.testing.assert_array_equal(matrices["value"].array, value.reshape(-1))


def test_weights_have_more_bits_where_four_lose_most() -> None:
    def packings(layers: int, layer: int, shares_keys: bool, bits: int = 4) -> dict[str, str]:
        packing = WeightPacking(bits=bits, layers=layers, shares_keys=shares_keys)
        found = {name: packing.made(name, layer, bits) for name in ("query", "key", "value", "up", "down")}
        assert [name for name, one in found.items() if one.by_inputs] == ["down"]
        return {name: one.encoding for name, one in found.items()}

    few, wide = "int4_64_min", "int8_64"
    assert packings(30, 26, True) == {"query": few, "key": wide, "value": wide, "up": few, "down": few}
    assert packings(30, 27, False) == {"query": few, "key": few, "value": wide, "up": few, "down": wide}
    assert set(packings(30, 27, False, bits=8).values()) == {wide}
    assert [late_layers(layers) for layers in (1, 10, 11, 80)] == [1, 1, 2, 8]


def test_weights_that_cannot_be_packed_are_named(tmp_path):
    folder = make_tiny_opt(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.1.self_attn.q_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with open_weights(folder) as source:
        plan = plan_weights(source, policy(*PLACES["device"]), bits=4)
        message = r"layers\.1\.query\.weight cannot be packed: a weight is not finite"
        with Scratch(tmp_path / "s", 0) as scratch, pytest.raises(UnsupportedModelError, match=message):
            WeightStore(source, plan, reader=open_reader(), pool=_core.ThreadPool(1), scratch=scratch)
