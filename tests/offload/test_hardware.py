"""Files of hardware constants."""

import json

import pytest

from flashllm.errors import FlashIOError, FormatError
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import MACHINES, T4


def loaded(folder, data):
    path = folder / "machine.json"
    path.write_text(json.dumps(data))
    return Hardware.load(path)


def test_round_trip(tmp_path):
    assert loaded(tmp_path, T4.to_json()) == T4
    assert MACHINES["t4"] is T4


def test_a_rate_may_be_a_plain_number(tmp_path):
    assert loaded(tmp_path, T4.to_json() | {"dtoc": 2e9}).dtoc.at(1 << 20) == 2e9


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtoc": 0}, "dtoc"),
        ({"dtoc": "fast"}, "dtoc"),
        ({"device": "tpu"}, "tpu"),
        ({"combine": "best"}, "combine"),
        ({"disk_capacity": -1}, "disk_capacity"),
        ({"cpu_memory": 1.5}, "cpu_memory"),
        ({"gpu_memory": 1}, "gpu_memory"),
    ],
)
def test_bad_constants_are_named(tmp_path, change, named):
    with pytest.raises(FormatError, match=named):
        loaded(tmp_path, T4.to_json() | change)


def test_missing_constant_and_damaged_file(tmp_path):
    data = T4.to_json()
    del data["gemm"]
    with pytest.raises(FormatError, match="gemm"):
        loaded(tmp_path, data)
    path = tmp_path / "x.json"
    path.write_text("[")
    with pytest.raises(FormatError, match=r"x\.json"):
        Hardware.load(path)
    with pytest.raises(FlashIOError, match="absent"):
        Hardware.load(tmp_path / "absent.json")


def test_limits_replace_capacities_only():
    small = T4.limited(device_memory=2**30, disk_capacity=0)
    assert small.device_memory == 2**30
    assert small.device_usable == 0  # less than what the context takes
    assert small.disk_capacity == 0
    assert small.cpu_memory == T4.cpu_memory
    assert small.gemm == T4.gemm
