"""The cost model against the equations of A.3 written out by hand, and what was added to them."""

import dataclasses
from itertools import product

import pytest

from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner.costs import COMPRESSED, CostModel
from flashllm.offload.planner.linear import SIZE, WG
from flashllm.offload.planner.peaks import cpu_peaks, device_peaks, disk_peak, memory_limits
from flashllm.offload.planner.predict import predict
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import ModelShape
from flashllm.profile.rates import RateCurve

# Small enough to check by hand; no embeddings to speak of, rates of 1, memory too fast to matter.
L, H1, H2, NH, S, N, GBS, NB = 3, 8, 32, 2, 6, 4, 2, 5
BLS = GBS * NB
SHAPE = ModelShape(name="m", layers=L, hidden=H1, ffn=H2, heads=NH, kv_heads=NH, head_dim=H1 // NH, vocab=1)
WORK = Workload(prompt_len=S, gen_len=N)
ONE, FAST = RateCurve.flat(1.0), RateCurve.flat(1e30)
PLAIN = Hardware(
    name="plain", device="cuda", device_memory=10**9, cpu_memory=10**9, disk_capacity=10**9, ctog=ONE, gtoc=ONE,
    dtoc=ONE, ctod=ONE, gemm=ONE, bmm=ONE, device_bandwidth=FAST, cpu_attention=ONE, cpu_bandwidth=FAST, combine="a3",
)  # fmt: skip
MIXED = {"wg": 0.5, "wc": 0.3, "wd": 0.2, "cg": 0.1, "cc": 0.6, "cd": 0.3, "hg": 0.25, "hc": 0.5, "hd": 0.25}


def mixed(**changes) -> Policy:
    return Policy(**{"gpu_batch": GBS, "num_batches": NB, "cpu_attention": True, **MIXED, **changes})


def cost_model(policy: Policy, hardware: Hardware = PLAIN, shape: ModelShape = SHAPE) -> CostModel:
    return CostModel(shape=shape, hardware=hardware, workload=WORK, method=policy)


def at(policy, forms):
    """Values of forms, a dictionary's by name."""
    if isinstance(forms, dict):
        return dict(zip(forms, at(policy, forms.values()), strict=True))
    return [form.value(policy.placement) for form in forms]


def test_prefill_equations():
    p = mixed()
    stages = at(p, cost_model(p).prefill)
    weights = 8 * H1**2 + 4 * H1 * H2
    assert stages["ctog"] == pytest.approx((p.wc + p.wd) * weights + 2 * (p.hc + p.hd) * S * H1 * BLS)
    assert stages["gtoc"] == pytest.approx(4 * (p.cc + p.cd) * (S + 1) * H1 * BLS + 2 * (p.hc + p.hd) * S * H1 * BLS)
    assert stages["dtoc"] == pytest.approx(p.wd * weights + 2 * p.hd * S * H1 * BLS)
    assert stages["ctod"] == pytest.approx(4 * p.cd * BLS * (S + 1) * H1 + 2 * p.hd * S * H1 * BLS)
    assert stages["comp"] == pytest.approx(BLS * (8 * S * H1**2 + 4 * S * H1 * H2) + 4 * BLS * S**2 * H1)


def test_decode_equations():
    p = mixed()
    stages = at(p, cost_model(p).decode)
    weights, context = 8 * H1**2 + 4 * H1 * H2, S + N / 2
    queries = (p.cc + p.cd) * 2 * H1 * BLS  # CPU attention's own traffic, which A.3 neglects
    new = (p.cc + p.cd) * 4 * H1 * BLS
    assert stages["ctog"] == pytest.approx((p.wc + p.wd) * weights + 2 * (p.hc + p.hd) * H1 * BLS + queries)
    assert stages["gtoc"] == pytest.approx(2 * (p.hc + p.hd) * H1 * BLS + queries + new)
    assert stages["dtoc"] == pytest.approx(4 * p.cd * BLS * context * H1 + p.wd * weights + 2 * p.hd * H1 * BLS)
    assert stages["ctod"] == pytest.approx(4 * p.cd * BLS * H1 + 2 * p.hd * H1 * BLS)
    attention = 4 * BLS * context * H1
    assert stages["comp"] == pytest.approx(BLS * (8 * H1**2 + 4 * H1 * H2) + attention)  # all rates are 1


def test_without_cpu_attention_the_cache_travels():
    with_cpu, without = mixed(), mixed(cpu_attention=False)
    queries = 2 * H1 * BLS * 0.9
    cache = 0.9 * 4 * BLS * (S + N / 2) * H1
    one, other = (at(p, cost_model(p).decode)["ctog"] for p in (without, with_cpu))
    assert one - other == pytest.approx(cache - queries)


def test_total_latency_is_that_of_section_4_3():
    policy = mixed()
    got, model = predict(SHAPE, PLAIN, WORK, policy), cost_model(policy)
    t_pre, t_gen, head = (max(at(policy, p.values())) for p in (model.prefill, model.decode, model.head_step))
    assert got.prefill_s == pytest.approx(t_pre * L + head)
    assert got.decode_s == pytest.approx((N - 1) * (t_gen * L + head))
    assert got.throughput == pytest.approx(BLS * N / (got.prefill_s + got.decode_s))


def test_serial_load_adds_the_weights_to_the_rest():
    policy = mixed()
    hardware = dataclasses.replace(PLAIN, combine="serial-load")
    model = cost_model(policy, hardware)
    stages, t_gen = at(policy, model.decode), max(at(policy, model.decode_bounds()))
    assert t_gen == pytest.approx(stages["ctog"] + max(stages[name] for name in ("gtoc", "dtoc", "ctod", "comp")))
    stages, t_pre = at(policy, model.prefill), max(at(policy, model.prefill_bounds()))
    expected = max(stages["ctog"] + stages["dtoc"], stages["gtoc"] + stages["ctod"], stages["comp"])
    assert t_pre == pytest.approx(expected)


def test_without_overlap_stages_add_up():
    policy = mixed(overlap=False)
    model = cost_model(policy)
    assert at(policy, model.decode_bounds()) == [pytest.approx(sum(at(policy, model.decode.values())))]


def test_device_peaks():
    p = mixed()
    peaks = at(p, device_peaks(cost_model(p)))
    layer = 8 * H1**2 + 4 * H1 * H2
    weights = p.wg * (layer * L + SHAPE.embedding_bytes) + 2 * (1 - p.wg) * layer
    cache = 4 * (S + N) * H1 * p.cg * BLS * L
    prefill = weights + cache + p.hg * 2 * S * H1 * BLS + (1 - p.hg) * 2 * S * H1 * GBS
    decode = weights + cache + p.hg * 2 * H1 * BLS + (1 - p.hg) * 2 * H1 * GBS
    attention = GBS * (2 * S * H1 + 4 * S * H1 + 2 * NH * S**2)  # att_1 of A.3, wherever the cache will live
    work = [GBS * 8 * S * H1, attention, 2 * GBS * S * (H1 + H2), GBS * 4 * S * H1 + GBS * 2]
    assert peaks[:4] == pytest.approx([prefill + each for each in work])
    later = p.cg * GBS * (2 * H1 + 4 * (S + N) * H1 + 2 * NH * (S + N))
    assert peaks[4:6] == pytest.approx([decode + GBS * 8 * H1, decode + later])


def test_cpu_and_disk_peaks():
    p, x = mixed(), mixed().placement
    layer = 8 * H1**2 + 4 * H1 * H2
    home = p.wc * (layer * L + SHAPE.embedding_bytes) + 4 * (S + N) * H1 * p.cc * BLS * L
    prefill, decode = at(p, cpu_peaks(cost_model(p)))
    assert prefill == pytest.approx(home + p.hc * 2 * S * H1 * BLS + (1 - p.wg) * layer + (1 - p.hg) * 2 * S * H1 * GBS)
    work = p.wd * layer + 2 * p.hd * 2 * H1 * GBS + 2 * p.cd * 4 * (S + N) * H1 * GBS
    scores = (p.cc + p.cd) * (2 * 2 * NH * (S + N) * GBS + 2 * H1 * GBS)
    assert decode == pytest.approx(home + p.hc * 2 * H1 * BLS + work + scores)
    disk = p.wd * (layer * L + SHAPE.embedding_bytes) + p.hd * 2 * S * H1 * BLS + p.cd * 4 * (S + N) * H1 * BLS * L
    assert disk_peak(cost_model(p)).value(x) == pytest.approx(disk)


def test_an_accelerator_holds_codes_widened():
    """As it has them, whoever asks."""
    coded = dataclasses.replace(SHAPE, stored=(("up", "int4_32"), ("down", "int4_32")), scale_bytes=7)
    assert coded.layer_bytes != SHAPE.layer_bytes
    assert predict(coded, PLAIN, WORK, mixed()) == predict(SHAPE, PLAIN, WORK, mixed())


def test_limits_leave_out_what_is_reserved():
    hardware = dataclasses.replace(PLAIN, device_reserved=400, cpu_reserved=300)
    limits = {tier: limit for tier, _, limit in memory_limits(cost_model(mixed(), hardware))}
    assert limits == {"device": 10**9 - 400, "cpu": 10**9 - 300, "disk": 10**9}


def test_grouped_query_and_gated_models_move_fewer_cache_bytes_and_more_weights():
    gqa = dataclasses.replace(SHAPE, kv_heads=1, gated=True)
    assert gqa.kv_token_bytes == SHAPE.kv_token_bytes // NH
    assert gqa.layer_params == 2 * H1**2 + 2 * H1 * H1 // NH + 3 * H1 * H2
    on_disk = mixed(wg=1, wc=0, wd=0, cg=0, cc=0, cd=1, hg=1, hc=0, hd=0)
    reads = [cost_model(on_disk, shape=shape).decode["dtoc"].value(on_disk.placement) for shape in (SHAPE, gqa)]
    assert reads[1] == pytest.approx(reads[0] / NH)


def test_four_bits_move_and_hold_less_but_take_time_to_expand():
    plain, packed = mixed(), mixed(compress_weights=True, compress_cache=True)
    assert pytest.approx(4.5 / 16) == COMPRESSED
    for stage in ("dtoc", "ctod"):
        before, after = (cost_model(p).decode[stage].coef[2:6] for p in (plain, packed))  # wd … cd
        assert after == pytest.approx(before * COMPRESSED)
    assert disk_peak(cost_model(packed)).coef[:6] == pytest.approx(disk_peak(cost_model(plain)).coef[:6] * COMPRESSED)
    slow_memory = dataclasses.replace(PLAIN, device_bandwidth=ONE, cpu_bandwidth=ONE, gemm=FAST, bmm=FAST)
    compute = [cost_model(p, slow_memory).decode["comp"].value(p.placement) for p in (plain, packed)]
    assert compute[1] > 5 * compute[0]


def test_sparse_attention_reads_all_keys_and_the_top_values():
    dense, sparse = mixed(), mixed(attention_sparsity=0.1)
    reads = [cost_model(p).decode["dtoc"].coef[5] for p in (dense, sparse)]  # cd
    assert reads[1] == pytest.approx(reads[0] * 0.55)


def test_a_gemm_never_outruns_the_memory_its_weights_are_read_from():
    hardware = dataclasses.replace(PLAIN, gemm=FAST, bmm=FAST, device_bandwidth=RateCurve.flat(2.0))
    policy = mixed(wg=1, wc=0, wd=0, cg=1, cc=0, cd=0)
    compute = cost_model(policy, hardware).decode["comp"].value(policy.placement)
    weights = NB * SHAPE.layer_bytes / 2
    cache = 4 * BLS * (S + N / 2) * H1 / 2
    assert compute == pytest.approx(weights + cache)


def test_rates_follow_the_size_of_one_transfer():
    knee = dataclasses.replace(PLAIN, ctod=RateCurve(((2.0 * GBS * H1, 1.0), (2.0 * GBS * H1 * S, 5.0))))
    policy = mixed(cc=0, cd=0.9, hg=1, hc=0, hd=0)
    model = cost_model(policy, knee)
    assert model.decode["ctod"].value(policy.placement) == pytest.approx(0.9 * 4 * BLS * H1)
    assert model.prefill["ctod"].value(policy.placement) == pytest.approx(0.9 * 4 * BLS * (S + 1) * H1 / 5)


def test_over_names_the_memory_that_is_short():
    small = dataclasses.replace(PLAIN, device_memory=10)
    assert set(predict(SHAPE, small, WORK, mixed()).over) == {"device"}
    assert predict(SHAPE, PLAIN, WORK, mixed()).over == {}


def test_binding_is_the_longest_stage_of_the_longer_phase():
    slow_disk = dataclasses.replace(PLAIN, dtoc=RateCurve.flat(1e-3))
    binding = predict(SHAPE, slow_disk, WORK, mixed()).binding
    assert (binding["phase"], binding["stage"]) == ("decode", "dtoc")


def test_one_new_token_has_no_decoding():
    got = predict(SHAPE, PLAIN, Workload(prompt_len=S, gen_len=1), mixed())
    assert got.decode_s == 0
    assert got.decode_throughput == 0
    assert got.throughput == pytest.approx(BLS / got.prefill_s)


def test_linear_forms():
    assert (2 * WG + 3).value((0.5,) + (0.0,) * (SIZE - 1)) == 4
    assert (WG * 6 / 3 + WG).coef[0] == 3
    form = cost_model(mixed(), T4).decode["ctog"]
    corners = [[float(i in (w, 3 + c, 6 + h)) for i in range(SIZE)] for w, c, h in product(range(3), repeat=3)]
    assert form.minimum == pytest.approx(min(form.value(tuple(corner)) for corner in corners))
