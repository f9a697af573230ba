"""The file of calibrations: entries of several drives live together, and damage is told, never guessed over."""

import json

import pytest
from device_costs import device, reader

from flashllm.device.choice import choose_reader, find_costs
from flashllm.device.store import DeviceKey, device_of, load_costs, save_costs
from flashllm.errors import FormatError

ONE = DeviceKey(machine="m, 2 cores", device="/dev/one", filesystem="ext4")
OTHER = DeviceKey(machine="m, 2 cores", device="/dev/other", filesystem="ext4")


def test_entries_are_kept_apart_and_replaced(tmp_path):
    store = tmp_path / "made" / "devices.json"
    assert load_costs(store, ONE) is None
    first, second, third = device(), device(dram_bps=1e9), device(dram_bps=2e9)
    assert save_costs(store, ONE, first) is None
    assert save_costs(store, OTHER, second) is None
    assert (load_costs(store, ONE), load_costs(store, OTHER)) == (first, second)
    save_costs(store, ONE, third)
    assert (load_costs(store, ONE), load_costs(store, OTHER)) == (third, second)
    assert len(json.loads(store.read_text())["devices"]) == 2
    assert load_costs(store, DeviceKey(machine="n", device="/dev/one", filesystem="ext4")) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format_version": 1, "devices": []}', '{"format_version": 2, "devices": [{}]}'],
)
def test_a_damaged_store_is_told_and_replaced_by_the_next_calibration(tmp_path, text):
    store = tmp_path / "devices.json"
    store.write_text(text)
    with pytest.raises(FormatError, match=r"devices\.json"):
        load_costs(store, ONE)
    costs, problem = find_costs(tmp_path, store)
    assert costs is None
    assert "devices.json" in problem
    assert "was replaced" in save_costs(store, ONE, device())
    assert load_costs(store, ONE) == device()


def test_a_path_and_what_lies_below_it_are_on_one_drive(tmp_path):
    assert device_of(tmp_path) == device_of(tmp_path / "not" / "there")
    assert device_of(tmp_path).device


def test_the_calibration_of_the_drive_is_found(tmp_path):
    store = tmp_path / "devices.json"
    save_costs(store, device_of(tmp_path), device())
    assert find_costs(tmp_path, store) == (device(), None)


def test_what_was_asked_for_wins_then_the_calibration_then_the_default():
    costs = device(reader(depth=8), reader("io_uring", 64, request_s=(5e-6, 20e-6)))
    chosen = choose_reader(costs, 4096, io_threads=None, direct=True)
    assert (chosen.backend, chosen.depth, chosen.max_gap, chosen.source) == ("io_uring", 64, 8192, "calibration")
    asked = choose_reader(costs, 4096, io_threads=5, direct=True)
    assert (asked.backend, asked.depth, asked.max_gap, asked.source) == ("threads", 5, 8192, "argument")
    for without in (None, device(direct=False)):
        default = choose_reader(without, 4096, io_threads=None, direct=True)
        assert (default.backend, default.depth, default.max_gap, default.source) == ("threads", 32, 0, "default")
    assert choose_reader(costs, 4096, io_threads=None, direct=False).source == "default"
    for known, backend, number, expected in [
        (costs, "threads", None, ("threads", 8, 8192)),
        (costs, "io_uring", 100, ("io_uring", 100, 8192)),
        (None, "io_uring", None, ("io_uring", 48, 0)),
        (None, "io_uring", 16, ("io_uring", 16, 0)),
    ]:
        asked = choose_reader(known, 4096, io_threads=number, direct=True, io_backend=backend)
        assert (asked.backend, asked.depth, asked.max_gap) == expected
        assert asked.source == "argument"
    assert choose_reader(None, 4096, io_threads=7, direct=True).source == "argument"
