"""The device tier by torch: on torch's "cpu", where every path of it runs, the tokens of Hugging Face's `generate`."""

import dataclasses

import numpy as np
import pytest
import torch
from offload_runs import CPU, DEVICE, DISK, MIXED, answers, policy, sequences

from flashllm.base.group_codes import GROUP_CODES
from flashllm.errors import BudgetError, UnsupportedModelError, UsageError
from flashllm.offload.planner.packing import Packing, codes_nbytes
from flashllm.offload.runtime.accelerator import codec
from flashllm.offload.runtime.accelerator.codec import PackedMatrix
from flashllm.offload.runtime.accelerator.device import TorchDevice
from flashllm.offload.runtime.accelerator.torch_ops import TorchOps, lacking
from flashllm.offload.runtime.run import Runner, RunOptions, sizes_of
from flashllm.offload.runtime.tiers.source import open_weights


def on_torch(path, prompts, scratch, chosen, **options):
    return answers(path, prompts, scratch, chosen, accelerator="cpu", **options)


def placed(*shares, **other):
    return policy(*shares, cpu_attention=True, **other)


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_changes_no_token(models, tmp_path, overlap):
    path, prompts, expected = models("opt")
    chosen = placed(MIXED, MIXED, MIXED, gpu_batch=2, overlap=overlap)
    assert on_torch(path, prompts, tmp_path, chosen) == expected


# What changes answers, against the native core, whose tests are against numpy -------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_cache_gives_the_native_tokens(models, tmp_path, bits):
    path, prompts, _ = models("llama")
    native = answers(path, prompts[3:], tmp_path, placed(compress_cache=True), cache_bits=bits)
    for cache in (DEVICE, MIXED):
        chosen = placed(DISK, cache, compress_cache=True)
        assert on_torch(path, prompts[3:], tmp_path, chosen, cache_bits=bits) == native


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_give_the_native_tokens(models, tmp_path, bits):
    path, prompts, _ = models("opt")
    native = answers(path, prompts[:4], tmp_path, placed(compress_weights=True), weight_bits=bits)
    for weights in (DEVICE, MIXED):
        found = on_torch(path, prompts[:4], tmp_path, placed(weights, compress_weights=True), weight_bits=bits)
        assert found == native


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_sparse_attention_gives_the_native_tokens(models, tmp_path, packs, share):
    path, prompts, _ = models("llama")
    chosen = {"attention_sparsity": share, "compress_cache": packs}
    native = answers(path, prompts[3:], tmp_path, placed(**chosen))
    for cache in (DEVICE, MIXED):
        assert on_torch(path, prompts[3:], tmp_path, placed(DEVICE, cache, **chosen)) == native


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_models_run_and_begin_as_the_native_ones(checkpoint, tmp_path, dtype):
    """Within tolerance: the first tokens, of which few are near ties, are mostly the same."""
    path = checkpoint("llama", dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 300, (n,), generator=generator).tolist() for n in (5, 70, 9, 121, 33, 64)]
    for packs in (False, True):
        chosen = placed(MIXED, MIXED, MIXED, compress_weights=packs, compress_cache=packs)
        native = [tokens[0] for tokens in answers(path, prompts, tmp_path, chosen, new=3)]
        found = [tokens[0] for tokens in on_torch(path, prompts, tmp_path, chosen, new=3)]
        assert sum(a == b for a, b in zip(native, found, strict=True)) >= 5


# The codec ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("encoding", sorted(GROUP_CODES))
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (1, 1), (130, 33), (4160, 48), (63, 80)])
def test_unpacked_weights_have_the_bits_of_the_encoding(encoding, rows, columns, by_inputs):
    weights = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    weights[:, :1] = 3.0  # a group of equal values
    vectors, code = weights.T if by_inputs else weights, GROUP_CODES[encoding]
    packed = code.encode(vectors)
    matrix = PackedMatrix(torch.from_numpy(packed.reshape(-1)), rows, columns, Packing(encoding, by_inputs))
    found = torch.cat([matrix.unpack(part) for part in matrix.parts()])
    assert np.array_equal(found.numpy(), code.decode(packed, vectors.shape[1]))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_come_back(bits):
    codes = torch.randint(0, 1 << bits, (3, 5, 48), dtype=torch.uint8)
    packed = codec.pack_codes(codes, bits)
    assert packed.shape == (3, 5, codes_nbytes(48, bits))
    assert torch.equal(codec.unpack_codes(packed, bits), codes)


# Refusals ----------------------------------------------------------------------------------------------------------


def test_too_little_memory_of_the_device_is_refused_with_numbers(models, tmp_path):
    path, prompts, _ = models("llama")
    options = RunOptions(scratch=tmp_path, accelerator="cpu", gpu_memory=1000)
    with pytest.raises(BudgetError, match="the accelerator's memory, and 1 kB is the limit"):
        Runner(path, placed(), options)
    enough = RunOptions(scratch=tmp_path, accelerator="cpu", gpu_memory=10**9)
    with Runner(path, placed(), enough) as runner:
        need = runner.need(sizes_of(sequences(prompts)))
    options = dataclasses.replace(enough, gpu_memory=need.device - 1)
    with Runner(path, placed(), options) as runner, pytest.raises(BudgetError, match="limit"):
        runner.run(sequences(prompts))
    assert not list(tmp_path.iterdir())


def test_memory_beside_the_device_has_a_limit_of_its_own(models, tmp_path):
    path, prompts, _ = models("llama")
    options = RunOptions(scratch=tmp_path, accelerator="cpu")
    with Runner(path, placed(DEVICE), options) as runner:
        on_device = runner.need(sizes_of(sequences(prompts)))
    with Runner(path, placed(CPU, CPU, CPU), options) as runner:
        beside = runner.need(sizes_of(sequences(prompts)))
    assert beside.cpu > on_device.cpu
    assert beside.device < on_device.device
    with pytest.raises(BudgetError, match="of memory"):
        Runner(path, placed(CPU), dataclasses.replace(options, memory=1000))


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"'cuda'.*--device cpu"):
        TorchDevice("cuda" if not torch.cuda.is_available() else "nothing", "float32")


def test_a_cache_beside_the_device_needs_the_cpus_attention(models, tmp_path):
    path, _, _ = models("llama")
    with pytest.raises(UsageError, match="cpu_attention"):
        Runner(path, policy(DEVICE, CPU), RunOptions(scratch=tmp_path, accelerator="cpu"))


def test_an_activation_without_an_operation_is_refused(models):
    with open_weights(models("llama")[0]) as source:
        block = source.block
    assert lacking(block) == []
    object.__setattr__(block, "activation", "mish")
    assert lacking(block) == ["activation mish"]
    with pytest.raises(UnsupportedModelError, match="activation mish; use --device cpu"):
        TorchOps(block, TorchDevice("cpu", "float32"))
