"""The runtime against Hugging Face's `generate`: the same tokens whatever the placement, batch shape and schedule."""

import random
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offload_runs import CPU, DEVICE, DISK, LENGTHS, MIXED, answers, policy, sequences

from flashllm import _core
from flashllm.arch.mixers import Attention
from flashllm.arch.spec import BlockSpec, LayerSpec
from flashllm.offload.runtime import run
from flashllm.offload.runtime.accelerator.device import TorchDevice, host_array
from flashllm.offload.runtime.accelerator.torch_ops import TorchOps
from flashllm.offload.runtime.host_ops import HostOps
from flashllm.offload.runtime.ops import Matrix, Tensors
from flashllm.offload.runtime.run import Runner, RunOptions, Stopped


@pytest.mark.parametrize("accelerator", [None, "cpu"], ids=["native", "torch"])
@pytest.mark.parametrize("weights", [DEVICE, CPU, DISK, MIXED], ids=["device", "cpu", "disk", "mixed"])
@pytest.mark.parametrize("cache", [DEVICE, CPU, DISK, MIXED], ids=["device", "cpu", "disk", "mixed"])
def test_every_placement_gives_the_same_tokens(models, tmp_path, weights, cache, accelerator):
    path, prompts, expected = models("llama")
    hidden = {DEVICE: DISK, CPU: DEVICE, DISK: MIXED, MIXED: DISK}[weights]
    chosen = policy(weights, cache, hidden, cpu_attention=True)
    assert answers(path, prompts, tmp_path, chosen, accelerator=accelerator) == expected


FRACTIONS = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(sum).map(lambda x: tuple(n / sum(x) for n in x))


@given(st.tuples(FRACTIONS, FRACTIONS, FRACTIONS), st.integers(1, 9), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_placement(models, tmp_path, shares, batch, overlap):
    path, prompts, expected = models("llama")
    chosen = policy(*shares, gpu_batch=batch, overlap=overlap)
    found = answers(path, prompts[2:6], tmp_path, chosen, new=6)
    assert found == [tokens[:6] for tokens in expected[2:6]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_delays_change_no_token(models, tmp_path, monkeypatch, name, seed):
    path, prompts, expected = models(name)
    rng, work = random.Random(seed), run._Run._work

    def delayed(self, task):
        time.sleep(rng.choice((0, 0, 0, 0, 0.002)))
        work(self, task)

    monkeypatch.setattr(run._Run, "_work", delayed)
    found = answers(path, prompts, tmp_path, policy(MIXED, MIXED, MIXED), new=8)
    assert found == [tokens[:8] for tokens in expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama widths", "differing layers", "bloom", "bitnet", "qwen2_moe", "gpt_oss", "gemma4 experts"),
        *("qwen3_5", "kimi_linear", "falcon_h1", "nemotron_h", "lfm2"),
    ],
)
def test_an_answer_does_not_depend_on_its_batch(checkpoint, tmp_path, dtype, packs, name):
    """Bit for bit: in 16 bit, compressed or not, alone and among others."""
    path, prompts = checkpoint(name, dtype), prompts_of(5, 70, 9, 121)
    packed = {"compress_weights": packs, "compress_cache": packs}
    together = answers(path, prompts, tmp_path, policy(DISK, MIXED, MIXED, gpu_batch=4, **packed))
    alone = [answers(path, [prompt], tmp_path, policy(gpu_batch=1, **packed))[0] for prompt in prompts]
    assert together == alone


def test_what_lies_behind_a_window_is_not_read(checkpoint, tmp_path):
    path = checkpoint("mistral window", "bfloat16")
    (prompt,), new, window = prompts_of(150), 40, 37
    with Runner(path, policy(cache=DISK), RunOptions(scratch=tmp_path)) as runner:
        page = runner._attention[0].sealed_nbytes
        (sequence,) = sequences([prompt], new)
        measure = runner.run([sequence])
        layers = runner.num_layers
    seen = [position // 64 - min(position // 64, (position + 1 - window) // 64) for position in range(150, 189)]
    assert measure.bytes_read == layers * page * sum(seen)
    assert 0 < sum(seen) < sum(position // 64 for position in range(150, 189)) / 2
    assert answers(path, [prompt], tmp_path, policy(), new) == [list(sequence.output)]


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 300, (n,), generator=generator).tolist() for n in lengths]


_BLOCK = BlockSpec(
    d_model=64, embed_dim=64, vocab_size=70, context=8, norm="rms",
    norm_epsilon=1e-5, final_norm=False, activation="relu", gated=False, tied_head=False,
    layers=(LayerSpec(mixer=Attention(heads=4, kv_heads=4, head_dim=16, query_scale=1.0), neurons=64),),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_not_rounded_to_the_models_dtype(dtype):
    """fp32, as they are summed: near ties that 16 bits would make equal stay apart."""
    random = np.random.default_rng(0)
    wide = [torch.from_numpy(random.normal(size=size)).to(getattr(torch, dtype)) for size in ((70, 64), (5, 64))]
    head, x = (host_array(tensor) for tensor in wide)
    ops = HostOps(_BLOCK, dtype, _core.ThreadPool(1))
    found = ops.logits(Tensors({"head": Matrix(head, 70, 64, None, None)}, {}), x)
    expected = wide[1].double() @ wide[0].double().T
    assert found.dtype == np.float32
    assert np.abs(found - expected.numpy()).max() < 1e-4  # 0.03 where they are rounded to bfloat16
    device = TorchDevice("cpu", dtype)
    by_torch = TorchOps(_BLOCK, device).head(Matrix(wide[0], 70, 64, None, None), wide[1])
    assert np.abs(by_torch - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_finished_sequence_leaves_its_batch(models, tmp_path, name):
    path, prompts, expected = models(name)
    wanted = [3, 20, 1, 9, 20, 2, 11, 5]
    made, progress = sequences(prompts, wanted), []
    with Runner(path, policy(DISK, MIXED, MIXED), RunOptions(scratch=tmp_path, threads=2)) as runner:
        measure = runner.run(made, progress.append)
        assert [list(s.output) for s in made] == [a[:n] for a, n in zip(expected, wanted, strict=True)]
        assert measure.new_tokens == sum(wanted) == progress[-1]
        assert measure.prompt_tokens == sum(LENGTHS)
        assert measure.bytes_read > 0
        assert measure.bytes_written > 0
        again = sequences(prompts[:2])
        runner.run(again)  # the same runner, another block
    assert [list(s.output) for s in again] == expected[:2]


def test_sparse_attention_of_everything_is_attention(models, tmp_path):
    path, prompts, expected = models("llama")
    assert answers(path, prompts, tmp_path, policy(attention_sparsity=1.0)) == expected
    sparse = answers(path, prompts, tmp_path, policy(attention_sparsity=0.1))
    assert sparse != expected


def test_stop_ends_a_run(models, tmp_path):
    path, prompts, _ = models("llama")
    runner = Runner(path, policy(DISK), RunOptions(scratch=tmp_path, threads=2))
    with runner, pytest.raises(Stopped):
        runner.run(sequences(prompts), lambda count: runner.stop())
    assert not list(tmp_path.iterdir())
