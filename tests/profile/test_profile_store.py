"""The file of calibrations: entries of several drives live together, and damage is told, never guessed over."""

import json
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from profiles import profile_of, reader

from flashllm.errors import FlashIOError, FormatError
from flashllm.profile.choice import choose_reader
from flashllm.profile.store import DeviceKey, device_of, find_profile, load_profile, save_profile, update_profile

ONE = DeviceKey(machine="m, 2 cores", device="/dev/one", filesystem="ext4")
OTHER = DeviceKey(machine="m, 2 cores", device="/dev/other", filesystem="ext4")


def test_entries_are_kept_apart_and_replaced(tmp_path):
    store = tmp_path / "made" / "profiles.json"
    assert load_profile(store, ONE) is None
    first, second, third = profile_of(), profile_of(dram_bps=1e9), profile_of(dram_bps=2e9)
    assert save_profile(store, ONE, first) is None
    assert save_profile(store, OTHER, second) is None
    assert (load_profile(store, ONE), load_profile(store, OTHER)) == (first, second)
    save_profile(store, ONE, third)
    assert (load_profile(store, ONE), load_profile(store, OTHER)) == (third, second)
    assert len(json.loads(store.read_text())["devices"]) == 2
    assert load_profile(store, DeviceKey(machine="n", device="/dev/one", filesystem="ext4")) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format_version": 1, "devices": []}', '{"format_version": 4, "devices": [{}]}']
)
def test_a_damaged_store_is_told_and_replaced_by_the_next_calibration(tmp_path, text):
    store = tmp_path / "profiles.json"
    store.write_text(text)
    with pytest.raises(FormatError, match=r"profiles\.json"):
        load_profile(store, ONE)
    costs, problem = find_profile(tmp_path, store)
    assert costs is None
    assert "profiles.json" in problem
    assert "was replaced" in save_profile(store, ONE, profile_of())
    assert load_profile(store, ONE) == profile_of()


def test_the_calibration_of_the_drive_is_found_also_for_what_is_not_there_yet(tmp_path):
    store = tmp_path / "profiles.json"
    assert device_of(tmp_path).device
    save_profile(store, device_of(tmp_path), profile_of())
    assert find_profile(tmp_path / "not" / "there", store) == (profile_of(), None)


def test_a_store_that_no_file_can_be_is_said(tmp_path):
    profile, problem = find_profile(tmp_path, tmp_path / ("x" * 300))
    assert profile is None
    assert "the profiles cannot be used: " in problem


def test_what_was_asked_for_wins_then_the_calibration_then_the_default():
    costs = profile_of(reader(depth=8), reader("io_uring", 64, request_s=(5e-6, 20e-6)))
    buffered = profile_of(direct=False)
    for known, asked, expected in [
        (costs, {}, ("io_uring", 64, 8192, "calibration")),
        (costs, {"io_threads": 5}, ("threads", 5, 8192, "argument")),
        (costs, {"direct": False}, ("threads", 32, 0, "default")),
        (costs, {"io_backend": "threads"}, ("threads", 8, 8192, "argument")),
        (costs, {"io_backend": "io_uring", "io_threads": 100}, ("io_uring", 100, 8192, "argument")),
        (costs, {"unpacks": True}, ("threads", 8, 0, "default")),
        (buffered, {}, ("threads", 32, 0, "default")),
        (None, {}, ("threads", 32, 0, "default")),
        (None, {"io_threads": 7}, ("threads", 7, 0, "argument")),
        (None, {"io_backend": "io_uring"}, ("io_uring", 48, 0, "argument")),
        (None, {"io_backend": "io_uring", "io_threads": 16}, ("io_uring", 16, 0, "argument")),
        (None, {"unpacks": True}, ("threads", 8, 0, "default")),
    ]:
        chosen = choose_reader(known, 4096, **{"io_threads": None, "direct": True, **asked})
        assert (chosen.backend, chosen.depth, chosen.max_gap, chosen.source) == expected, asked


NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    ("changes", "fresh"),
    [
        ({}, True),
        ({"made": (NOW - timedelta(days=29)).isoformat()}, True),
        ({"made": (NOW - timedelta(days=31)).isoformat()}, False),
        ({"made": (NOW + timedelta(days=1)).isoformat()}, False),  # a clock that was wrong
        ({"made": NOW.replace(tzinfo=None).isoformat()}, True),
        ({"system": "another kernel"}, False),
        ({"file_nbytes": 99}, False),
        ({"file_nbytes": 1 << 30}, True),
    ],
)
def test_fresh_is_recent_of_this_system_and_of_a_file_as_large(changes, fresh):
    profile = profile_of(**{"made": NOW.isoformat(), "system": "this", "file_nbytes": 100, **changes})
    assert profile.is_fresh("this", 100) is fresh
    assert profile_of(made=NOW.isoformat(), system="this").is_fresh("this", 1 << 40)


def test_one_process_at_a_time_measures_and_another_waits_to_write(tmp_path):
    store, inside = tmp_path / "profiles.json", []

    def make(known):
        with pytest.raises(FlashIOError, match="another process"):
            update_profile(store, ONE, inside.append)
        writing.start()
        time.sleep(0.05)
        assert load_profile(store, OTHER) is None  # it waits
        return profile_of()

    writing = threading.Thread(target=save_profile, args=(store, OTHER, profile_of()))
    update_profile(store, ONE, make)
    writing.join()
    assert inside == []
    assert load_profile(store, ONE) == load_profile(store, OTHER) == profile_of()
