"""The cost model of a machine whose device is its CPU: what it counts is what the runtime allocates and does."""

import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint
from offload_host import GB, HOST, PLACES, RATE, policy_of
from scripts import run_python
from tiny_models import make_tiny_opt

from flashllm import _core
from flashllm.arch.mixers import Attention
from flashllm.convert.run import convert
from flashllm.errors import BudgetError
from flashllm.offload.planner import host_peaks
from flashllm.offload.planner.host_costs import HostCostModel, cost_model
from flashllm.offload.planner.local import local_hardware, plan_policy, predict_job
from flashllm.offload.planner.predict import predict
from flashllm.offload.planner.search import SearchSpace, search
from flashllm.offload.policy import Workload
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.runtime.tiers.activations import Activations
from flashllm.offload.runtime.tiers.arrangement import arrange
from flashllm.offload.runtime.tiers.kv import KvCache
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.offload.runtime.tiers.weight_plan import plan_weights
from flashllm.offload.shape import ModelShape, load_shape

WORK = Workload(prompt_len=200, gen_len=32)
COARSE = SearchSpace(gpu_batches=(1, 4, 16, 64), num_batches=(1, 2, 4))
FEW = ModelShape(
    name="few", layers=4, hidden=2048, ffn=65536, active=8192, experts=64, heads=16, kv_heads=16, head_dim=128,
    vocab=50304, gated=True, tied=False, assembled=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, shape) of a model whose layers are large beside the blocks of a disk."""
    folder = make_tiny_opt(
        tmp_path_factory.mktemp("model"), d_model=512, d_ff=2048, num_heads=8, vocab_size=2000, dtype="bfloat16"
    )
    return folder, load_shape(str(folder))


# The same of mixtures of experts: with one dense and smaller layer of three; with a shared expert that is resident.
MIXTURES = {
    "mixture": ("olmoe", {"intermediate_size": 512}),
    "mixed": ("qwen2_moe and a dense layer", {"intermediate_size": 1024, "moe_intermediate_size": 512}),
    "beside": ("qwen2_moe shared beside", {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 2048}),
}
# The mixture as a model directory in 4 bits; and with neurons in 8 bits, which are rounded again where 4 are asked for.
CODED = {"coded": "int4_32", "partly": "int8_32"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, model):
    """The same of a kind, made once."""

    @cache
    def get(kind):
        if kind == "model":
            return model
        folder = tmp_path_factory.mktemp(kind) / "model"
        if kind in CODED:
            convert(get("mixture")[0], folder, encoding=CODED[kind], resident_encoding="int4_32")
        else:
            name, sizes = MIXTURES[kind]
            variant = VARIANTS[name]
            variant = dataclasses.replace(variant, config=variant.config | {"hidden_size": 512} | sizes)
            make_checkpoint(folder, variant, dtype="bfloat16")
        return folder, load_shape(str(folder))

    return get


def host(shape, policy, work=WORK, hardware=HOST):
    model = cost_model(shape, hardware, work, policy)
    assert isinstance(model, HostCostModel)
    return model


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", ["model", *MIXTURES, *CODED])
def test_weights_take_what_the_store_plans(model_of, kind, compress):
    folder, shape = model_of(kind)
    more = 0.06 if kind == "mixed" else 0.02  # a buffer is planned with all that the largest layer has more
    with open_weights(folder) as source:
        for where, overlap in itertools.product(PLACES, (True, False)):
            policy = policy_of(where, compress_weights=compress, overlap=overlap)
            plan = plan_weights(source, policy, bits=4 if compress else None)
            kept, starting = host_peaks.weights(host(shape, policy))
            held = dict.fromkeys("gcd", 0)
            for one in (one for bundle in plan.bundles[:-2] for one in bundle.tensors.values()):
                held[one.home] += one.nbytes
            placement = np.array(policy.placement)
            placement[:3] = np.array(list(held.values())) / sum(
                held.values()
            )  # of few matrices, not quite the policy's
            buffers = plan.staging_buffers * plan.buffer_nbytes + plan.gather_nbytes
            planned = plan.device_nbytes + plan.cpu_nbytes + buffers
            assert kept.value(placement) == pytest.approx(planned, rel=more), (where, overlap)
            assert starting == plan.start_nbytes, (where, overlap)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("lengths", [(200, 32), (64, 1), (63, 2), (10, 60)])
def test_the_cache_takes_what_the_runtime_allocates(model, where, bits, lengths):
    _, shape = model
    prompt_len, gen_len = lengths
    policy = policy_of(where, compress_cache=bits > 0)
    work = Workload(prompt_len=prompt_len, gen_len=gen_len)
    costs = dataclasses.replace(host(shape, policy, work), cache_bits=bits)
    mixer = Attention(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, query_scale=1.0)
    attention = _core.BatchAttention(mixer, "bfloat16", _core.ThreadPool(1), bits=bits)
    assert attention.page_nbytes == costs.page_bytes
    assert attention.sealed_nbytes == costs.sealed_bytes
    places = arrange([(prompt_len, prompt_len + gen_len - 1)] * policy.block_size, policy)
    found = KvCache.nbytes([attention] * shape.layers, places)
    assert host_peaks.cache(costs).value(policy.placement) == pytest.approx(found, rel=1e-9)
    on_disk = KvCache.disk_nbytes([attention] * shape.layers, places)
    on_disk += Activations.disk_nbytes(places, width=shape.hidden, itemsize=2)
    limits = {name: form.value(policy.placement) for name, form, _ in host_peaks.host_limits(costs)}
    assert limits["disk"] == pytest.approx(on_disk, abs=4096 * policy.num_batches)


@pytest.mark.parametrize("heads", [2, 96])
@pytest.mark.parametrize("head_dim", [20, 64, 96, 120, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_page_has_the_cores_size_for_every_size_of_head(head_dim, bits, heads):
    """Also where a head's numbers are no whole units of 16."""
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim}
    attention = _core.BatchAttention(Attention(query_scale=1.0, **sizes), "bfloat16", _core.ThreadPool(1), bits=bits)
    costs = host(dataclasses.replace(FEW, **sizes), policy_of(compress_cache=True))
    assert dataclasses.replace(costs, cache_bits=bits).sealed_bytes == attention.sealed_nbytes
    assert costs.page_bytes == attention.page_nbytes


def test_all_blocks_in_flight_have_states_on_disk(model):
    _, shape = model
    costs = host(shape, policy_of("disk"))
    peaks = [
        {name: form.value(costs.method.placement) for name, form, _ in host_peaks.host_limits(each)}["disk"]
        for each in (costs, dataclasses.replace(costs, blocks_in_flight=3))
    ]
    assert peaks[1] == pytest.approx(3 * peaks[0])


def test_there_are_two_tiers(model):
    _, shape = model
    for memory in (56 * 10**6, 80 * 10**6, 200 * 10**6):
        plan = search(shape, dataclasses.replace(HOST, device_memory=memory), WORK, COARSE)
        assert not plan.policy.uses_cpu
        assert plan.prediction.peak_device <= memory
        assert plan.prediction.peak_cpu == 0
        assert not plan.prediction.over
        for kind in "ch":
            grains = [getattr(plan.policy, kind + tier) * plan.policy.gpu_batch for tier in "gd"]
            assert grains == pytest.approx([round(grain) for grain in grains])
    with pytest.raises(BudgetError, match="more memory"):
        search(shape, dataclasses.replace(HOST, device_memory=5 * 10**6), WORK, COARSE)


def test_more_memory_never_costs_throughput(model):
    _, shape = model
    found = [
        search(shape, dataclasses.replace(HOST, device_memory=memory), WORK, COARSE).prediction.throughput
        for memory in (56 * 10**6, 60 * 10**6, 80 * 10**6, 200 * 10**6, GB)
    ]
    assert found == sorted(found)


@pytest.mark.parametrize("memory", [1.7, 2.1, 3.0])
def test_what_a_late_layer_takes_more_is_planned_for(memory):
    """A mixture of few layers, the last of which is much larger when packed: there is a policy for every memory."""
    space = SearchSpace(gpu_batches=(1, 4, 12), num_batches=(1, 2), compress_weights=True)
    plan = search(FEW, dataclasses.replace(HOST, device_memory=int(memory * GB)), WORK, space)
    assert not plan.prediction.over


def test_one_layer_in_memory_at_a_time_where_two_are_too_many(model_of):
    _, shape = model_of("mixture")
    work = Workload(prompt_len=20, gen_len=8)
    both, one = (
        predict(shape, HOST, work, policy_of("disk", gpu_batch=1, num_batches=1, overlap=overlap)).peak_device
        for overlap in (True, False)
    )
    assert one < both - shape.layer_bytes / 2
    options = RunOptions(scratch=Path("/"), memory=(both + one) // 2, disk=GB)
    assert not plan_policy(shape, work, options, requests=1).overlap
    with pytest.raises(BudgetError, match="more memory"):
        plan_policy(shape, work, dataclasses.replace(options, overlap=True), requests=1)


@pytest.mark.parametrize("memory", [1.7, 2.1, 3.0])
def test_a_block_is_no_larger_than_the_job(memory):
    """Two batches of twelve would be paid for as 24 sequences."""
    space = SearchSpace(gpu_batches=(1, 4, 8, 12, 16), sequences=16, overlap=(True, False))
    hardware = dataclasses.replace(HOST, device_memory=int(memory * GB))
    assert search(FEW, hardware, Workload(prompt_len=21, gen_len=8), space).policy.block_size == 16


def test_without_overlap_times_add_and_with_it_the_longer_counts(model):
    _, shape = model
    on_disk = policy_of("disk")
    together = predict(shape, HOST, WORK, on_disk)
    apart = predict(shape, HOST, WORK, dataclasses.replace(on_disk, overlap=False))
    stages = together.decode_stages
    assert apart.decode_s == pytest.approx(sum(apart.decode_stages.values()))
    assert together.decode_s == pytest.approx(max(stages["comp"], stages["dtoc"] + stages["ctod"]))
    assert stages["ctog"] == stages["gtoc"] == 0


def test_reads_and_products_slow_each_other_down(model):
    _, shape = model
    beside = dataclasses.replace(HOST, read_takes=0.2, read_loses=0.1)
    for hardware in (HOST, dataclasses.replace(HOST, dtoc=RATE(1e8))):
        slowed = dataclasses.replace(beside, dtoc=hardware.dtoc)
        alone = predict(shape, hardware, WORK, policy_of("disk"))
        found = predict(shape, slowed, WORK, policy_of("disk"))
        comp, disk = alone.decode_stages["comp"], alone.decode_stages["dtoc"] + alone.decode_stages["ctod"]
        expected = max(comp + disk * 0.2 / 0.9, disk + comp * 0.1 / 0.8)
        assert found.decode_s == pytest.approx(expected)
    in_memory = policy_of("device")
    assert predict(shape, beside, WORK, in_memory).decode_s == predict(shape, HOST, WORK, in_memory).decode_s


def test_a_step_is_the_runtimes_work(model):
    """Everything in memory: products of every layer and the head, the attention's bytes, the values touched."""
    _, shape = model
    quick = dataclasses.replace(HOST, bmm=RATE(1e30), elementwise=RATE(1e30), square_s=0.0)
    prediction = predict(shape, quick, WORK, policy_of("device"))
    steps, sequences = WORK.gen_len - 1, 12
    products = 2 * sequences * (shape.layers * shape.layer_params + shape.vocab * shape.hidden) / 1e11
    attention = sequences * WORK.mean_context * shape.kv_token_bytes * shape.layers / 1e10
    assert prediction.decode_s == pytest.approx(steps * (products + attention))
    prompt = 2 * sequences * 200 * shape.layers * shape.layer_params / 1e11
    head = 2 * sequences * shape.vocab * shape.hidden / 1e11
    assert prediction.prefill_s == pytest.approx(prompt + head)
    with_square = predict(shape, dataclasses.replace(quick, square_s=1.0), WORK, policy_of("device"))
    assert with_square.decode_s == pytest.approx(prediction.decode_s + steps * 3 * shape.layers)


def test_a_token_costs_the_products_of_its_experts(model_of):
    _, shape = model_of("mixture")
    quick = dataclasses.replace(HOST, cpu_attention=RATE(1e30), bmm=RATE(1e30), elementwise=RATE(1e30), square_s=0.0)
    prediction = predict(shape, quick, WORK, policy_of("device", gpu_batch=1, num_batches=12))
    params = shape.layer_params - shape.ffn_params + shape.hidden * shape.ffn_active * 3
    products = 2 * 12 * (shape.layers * params + shape.vocab * shape.hidden) / 1e11
    assert prediction.decode_s == pytest.approx((WORK.gen_len - 1) * products)


def test_packed_weights_have_rates_of_their_own_in_decoding(model):
    _, shape = model
    hardware = dataclasses.replace(HOST, packed_gemm=RATE(1e11), decoded_gemm=RATE(2e11))
    chosen = policy_of("device", compress_weights=True)
    one, both = (
        predict(shape, each, WORK, chosen) for each in (hardware, dataclasses.replace(hardware, decoded_gemm=None))
    )
    assert one.prefill_s == both.prefill_s
    products = (WORK.gen_len - 1) * 12 * 2 * shape.layers * shape.layer_params
    assert both.decode_s - one.decode_s == pytest.approx(products / 1e11 - products / 2e11)


def test_disk_reads_are_the_full_pages_and_the_weights(model):
    _, shape = model
    on_disk = policy_of("disk")
    prediction = predict(shape, HOST, WORK, on_disk)
    pages = WORK.mean_context / 64 - 0.5
    cache = 12 * pages * 64 * shape.kv_token_bytes
    hidden = 12 * shape.activation_token_bytes
    read = shape.layers * (shape.layer_bytes + cache + hidden) + shape.head_bytes
    assert prediction.decode_stages["dtoc"] == pytest.approx((WORK.gen_len - 1) * read / 2e9)


def test_a_job_is_planned_and_priced_here(model, tmp_path):
    _, shape = model
    for compress, memory in itertools.product((False, True), (60 * 10**6, GB)):
        methods = dict.fromkeys(("compress_weights", "compress_cache"), compress)
        options = RunOptions(scratch=tmp_path, memory=memory, disk=GB, methods=methods)
        policy = plan_policy(shape, WORK, options, requests=40)
        assert policy.compress_cache == compress
        whole = predict_job(shape, options, policy, [(policy.block_size, WORK)])
        assert whole["tiers"]["device"] <= memory
        one = predict(shape, local_hardware(shape, options), WORK, policy)
        assert whole["decode_s"] == pytest.approx(one.decode_s)
        part = predict_job(shape, options, policy, [(1, WORK)])
        assert 0 < part["decode_s"] <= whole["decode_s"]  # equal where the disk is the limit


RUN = """
import json, sys
from pathlib import Path
import numpy as np
from flashllm.base.machine import peak_process_nbytes, process_nbytes
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.sequences import Sequence
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import Runner, RunOptions
model, scratch, policy = Path(sys.argv[1]), Path(sys.argv[2]), Policy.from_json(json.loads(sys.argv[3]))
random, options = np.random.default_rng(0), SamplingOptions(max_new_tokens=6, temperature=0.0)
before = process_nbytes()
with Runner(model, policy, RunOptions(scratch=scratch)) as runner:
    prompts = [random.integers(4, 2000, 100).tolist() for _ in range(policy.block_size)]
    runner.run([Sequence(prompt, options, decoder=None, end_ids=frozenset()) for prompt in prompts])
print(peak_process_nbytes() - before)
"""


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("where", ["device", "disk"])
def test_a_run_stays_within_the_predicted_memory(model, tmp_path, where, compress):
    folder, shape = model
    policy = policy_of(where, gpu_batch=24, num_batches=2, compress_weights=compress, compress_cache=compress)
    peak = int(run_python("-c", RUN, folder, tmp_path, json.dumps(policy.to_json())).stdout)
    predicted = predict(shape, HOST, Workload(prompt_len=100, gen_len=6), policy).peak_device
    assert 0.5 * predicted < peak < predicted
