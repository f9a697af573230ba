"""What a machine computes with: every rate gets a curve, and the profile becomes the planner's constants."""

import dataclasses

import pytest
from profiles import BATCHES, profile_of, reader
from scripts import run_python

from flashllm import _core
from flashllm.offload.machine.here import hardware_of, read_curve, this_machine
from flashllm.offload.machine.measure import KIB, MIB, BatchSizes, measure_batches, measure_gpu
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.profile.machine import BatchRates, fields_of
from flashllm.profile.rates import RateCurve
from flashllm.profile.store import device_of, save_profile

TINY = BatchSizes(
    gemm_rows=(1, 4), bmm_tokens=(8, 16), attention=(64 * KIB, 256 * KIB), elementwise=(64 * KIB, 128 * KIB),
    copy=(64 * KIB, 1 * MIB), gemm_inner=64, gemm_outer=64, heads=2, head_dim=16, context=64, read=64 * KIB, rounds=2,
    at_least_s=0.0, rotation=1 * MIB, beside_s=0.02,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The batches of two dtypes at tiny sizes."""
    file = tmp_path_factory.mktemp("drive") / "file"
    file.write_bytes(bytes(1 * MIB))
    return measure_batches(("float16", "float32"), file, threads=1, sizes=TINY)


def test_batches_have_a_positive_curve_for_every_rate(measured):
    assert set(measured) == {"float16", "float32"}
    for rates in measured.values():
        curves = {name: value for name, value in fields_of(rates).items() if isinstance(value, RateCurve)}
        assert len(curves) == 8
        assert all(curve.at(100_000) > 0 for curve in curves.values())
        assert [size for size, _ in rates.gemm.knots] == [size for size, _ in rates.packed_gemm.knots] == [1, 4]
        assert rates.square_s > 0
    first, second = measured.values()
    assert (first.read_takes, first.read_loses) == (second.read_takes, second.read_loses)  # measured once


def test_the_links_of_a_gpu_are_measured_on_what_torch_has():
    rates = measure_gpu(sizes=TINY, device="cpu")
    assert all(curve.at(100_000) > 0 for curve in fields_of(rates).values())
    assert [size for size, _ in rates.ctog.knots] == list(TINY.copy)


def test_measuring_a_cpu_needs_no_torch():
    code = (
        "import sys; import flashllm.offload.machine.measure, flashllm.commands.calibrate; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert run_python("-c", code).stdout.split() == ["False", "False"]


def test_a_profile_becomes_the_planners_constants(tmp_path):
    profile = profile_of(batches={"float16": BATCHES}, writes=RateCurve.flat(1e9))
    hardware = hardware_of(profile, tmp_path, "float16")
    assert (hardware.device, hardware.cpu_memory, hardware.dtype) == ("cpu", 0, "float16")  # one memory, planned once
    assert {name: getattr(hardware, name) for name in fields_of(BATCHES)} == fields_of(BATCHES)
    assert (hardware.ctod, hardware.dtoc) == (profile.writes, read_curve(profile))
    assert hardware.ctog == hardware.device_bandwidth == BATCHES.elementwise
    assert min(hardware.device_memory, hardware.disk_capacity) > 0
    assert "2026-11-21" in hardware.source
    unwritten = hardware_of(dataclasses.replace(profile, writes=None), tmp_path, None)
    assert unwritten.ctod == unwritten.dtoc


def test_reads_of_the_disk_tier_are_batches_of_its_requests():
    one = reader(depth=8, latency_s=1e-3, sizes=(64 * KIB, MIB), request_s=(1e-4, 1e-3))
    curve = read_curve(profile_of(one, reader("io_uring", 64)))
    assert curve.at(64 * KIB) == pytest.approx(64 * KIB / 1.1e-3)
    assert curve.at(64 * MIB) == pytest.approx(64 * MIB / (1e-3 + 64 * 1e-3))


def test_a_gpu_in_the_profile_is_the_device(tmp_path, measured):
    gpu = measure_gpu(sizes=TINY, device="cpu")
    profile = profile_of(batches={"float16": BATCHES}, gpu=gpu)
    hardware = hardware_of(profile, tmp_path, "float16", gpu=True)
    assert (hardware.device, hardware.gemm, hardware.ctog) == ("cuda", gpu.gemm, gpu.ctog)
    assert hardware.cpu_attention == BATCHES.cpu_attention
    assert hardware.cpu_memory > 0
    assert hardware.cpu_bandwidth.at(1) == profile.dram_bps


def test_the_machine_is_found_by_its_drive_dtype_and_device(tmp_path, monkeypatch):
    store = tmp_path / "profiles.json"
    assert this_machine(tmp_path, "float16", store=store) is None
    save_profile(store, device_of(tmp_path), profile_of())
    assert this_machine(tmp_path, "float16", store=store) is None  # of the latency engine alone
    slow = dataclasses.replace(BATCHES, gemm=RateCurve.flat(1.0))
    save_profile(store, device_of(tmp_path), profile_of(batches={"float16": BATCHES, "bfloat16": slow}))
    assert this_machine(tmp_path, "float16", store=store).gemm == BATCHES.gemm
    assert this_machine(tmp_path, "bfloat16", store=store).gemm == slow.gemm
    assert this_machine(tmp_path, "float32", store=store).dtype == "bfloat16"  # better than none
    assert this_machine(tmp_path, "float16", store=store, device="cuda") is None
    gpu = measure_gpu(sizes=TINY, device="cpu")
    save_profile(store, device_of(tmp_path), profile_of(batches={"float16": BATCHES}, gpu=gpu))
    found = [this_machine(tmp_path, None, store=store, device=device).device for device in (None, "cpu", "cuda")]
    assert found == ["cuda", "cpu", "cuda"]


@pytest.mark.parametrize("changes", [{"read_takes": 1.0}, {"read_loses": -0.1}, {"square_s": float("nan")}])
def test_impossible_shares_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        BatchRates(**{**fields_of(BATCHES), **changes})


def test_native_samples_count_their_work():
    probe = NativeProbe("bfloat16", _core.ThreadPool(1), 0.0, 1 * MIB)
    assert probe.products(3, inner=64, outer=128).units == 4 * 3 * 64 * 128
    for decoding in (False, True):
        sample = probe.products(3, inner=64, outer=128, bits=4, decoding=decoding)
        assert sample.units == 4 * 3 * 64 * 128
    assert probe.prompt_attention(8, heads=2, head_dim=16).units == 4 * 2 * 8 * 8 * 16
    plain = 2 * 2 * 64 * 16 * 2  # keys and values, heads, positions, head_dim, bytes
    for bits in (0, 4, 8):
        sample = probe.decode_attention(4 * plain, context=128, heads=2, head_dim=16, bits=bits)
        assert sample.units == 4 * plain
    assert probe.seal(3 * plain, heads=2, head_dim=16, bits=4).units == 3 * plain
    assert probe.elementwise(64 * KIB, width=64).units == 5 * 64 * KIB
    assert probe.square_s() > 0
