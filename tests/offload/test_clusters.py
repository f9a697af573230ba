"""Pipelines and decentralised chains by model."""

import dataclasses

import pytest

from flashllm.errors import BudgetError
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner.clusters import Network, decentralised, pipeline, tokens_per_dollar
from flashllm.offload.planner.predict import predict
from flashllm.offload.planner.search import SearchSpace
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import BUILTIN

WORK = Workload(prompt_len=512, gen_len=32)
NEAR = Network(bandwidth=2e9, delay_s=1e-4)
COARSE = SearchSpace(gpu_batches=(8, 32, 64), num_batches=(1, 4, 8))
CPU_POLICY = Policy(
    gpu_batch=32, num_batches=2, wg=0, wc=1, wd=0, cg=0, cc=1, cd=0, hg=0, hc=1, hd=0, cpu_attention=True
)


def test_one_machine_is_a_pipeline_of_one():
    alone = predict(BUILTIN["opt-30b"], T4, WORK, CPU_POLICY)
    got = pipeline(BUILTIN["opt-30b"], T4, WORK, machines=1, network=NEAR, policy=CPU_POLICY)
    assert got.throughput == pytest.approx(alone.throughput)
    assert got.decode_throughput == pytest.approx(alone.decode_throughput)


def test_the_same_policy_decodes_in_proportion_and_prefills_with_bubbles():
    one, four = (pipeline(BUILTIN["opt-30b"], T4, WORK, machines=m, network=NEAR, policy=CPU_POLICY) for m in (1, 4))
    assert four.decode_throughput == pytest.approx(4 * one.decode_throughput, rel=0.03)  # each stage has the head
    assert four.prefill_s == pytest.approx(7 / 4 * one.prefill_s, rel=0.03)  # 4 blocks, 3 slots of bubbles
    assert four.throughput < 4 * one.throughput


def test_every_block_in_flight_has_its_cache_counted():
    one, four = (pipeline(BUILTIN["opt-30b"], T4, WORK, machines=m, network=NEAR, policy=CPU_POLICY) for m in (1, 4))
    shape = BUILTIN["opt-30b"]
    weights = shape.layers * shape.layer_bytes * 3 / 4
    assert one.stage.peak_cpu - four.stage.peak_cpu == pytest.approx(weights, rel=0.05)  # caches: a quarter, four times


def test_searched_decoding_scales_more_than_linearly():
    """Section 6.1: with each machine's share of the weights smaller, batches grow or the disk is left."""
    one, four = (pipeline(BUILTIN["opt-175b"], T4, WORK, machines=m, network=NEAR, space=COARSE) for m in (1, 4))
    assert four.decode_throughput > 4 * one.decode_throughput
    assert four.policy.wd < one.policy.wd
    assert four.stage.over == {}


def test_a_slow_network_bounds_a_pipeline():
    slow = Network(bandwidth=1e4, delay_s=0)
    got = pipeline(BUILTIN["opt-30b"], T4, WORK, machines=4, network=slow, policy=CPU_POLICY)
    hop = CPU_POLICY.block_size * BUILTIN["opt-30b"].activation_token_bytes / 1e4
    assert got.decode_s == pytest.approx(31 * 4 * hop)


def test_chains_pay_for_distance_and_bandwidth():
    shape = BUILTIN["opt-30b"]

    def at(delay, gigabits, batch=4, clients=1):
        network = Network(bandwidth=gigabits * 1e9 / 8, delay_s=delay)
        return decentralised(shape, T4, WORK, machines=12, network=network, batch=batch, clients=clients)

    near, far, thin = at(0.01, 1), at(0.1, 1), at(0.01, 0.1)
    assert far.latency_s - near.latency_s == pytest.approx(0.09 * 32 * near.stages)
    sent = 4 * (512 + 31) * shape.activation_token_bytes * near.stages
    assert thin.latency_s - near.latency_s == pytest.approx(sent * 8 * (1 / 1e8 - 1 / 1e9))
    assert near.throughput == pytest.approx(4 * 32 / near.latency_s)
    assert 3 * far.throughput < at(0.1, 1, clients=6).throughput <= 6 * far.throughput
    assert at(0.01, 1, batch=16).stages >= near.stages


def test_too_few_devices_are_refused():
    with pytest.raises(BudgetError, match="opt-175b"):
        decentralised(BUILTIN["opt-175b"], T4, WORK, machines=12, network=NEAR, batch=1, clients=1)


@pytest.mark.parametrize("bad", [{"bandwidth": 0, "delay_s": 0}, {"bandwidth": 1, "delay_s": -1}])
def test_networks_are_checked(bad):
    with pytest.raises(ValueError):
        Network(**bad)
    with pytest.raises(ValueError, match="machines"):
        pipeline(BUILTIN["opt-30b"], T4, WORK, machines=0, network=NEAR, policy=CPU_POLICY)


def test_tokens_per_dollar_is_section_63s():
    assert tokens_per_dollar(0.69) == pytest.approx(49680)
    assert tokens_per_dollar(1, watts=100, usd_per_kwh=0.5) == pytest.approx(3600 / 0.05)


def test_the_search_of_a_pipeline_counts_its_blocks():
    with pytest.raises(ValueError, match="blocks_in_flight"):
        dataclasses.replace(COARSE, blocks_in_flight=0)
