"""When one prompt after the other is faster than blocks of them."""

import json

import pytest
from arch_models import make_model
from offload_host import HOST
from profiles import profile_of

from flashllm.cli import main
from flashllm.offload.other_engine import LatencyEngine, better_below, latency_engine
from flashllm.offload.policy import Workload
from flashllm.profile.store import device_of, save_profile, store_path

WORK = Workload(prompt_len=32, gen_len=16)


@pytest.fixture(scope="module", params=["opt", "llama"])
def folders(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), request.param, dtype="float16")


def test_both_kinds_of_model_have_an_estimate(folders, tmp_path):
    source, directory = folders
    store = tmp_path / "profiles.json"
    assert latency_engine(directory, HOST, WORK, store=store) is None  # no profile
    save_profile(store, device_of(directory), profile_of())
    found = latency_engine(directory, HOST, WORK, store=store)
    assert found.seconds == pytest.approx(found.prompt_s + 15 * found.token_s)
    assert 0 < found.token_s < 1
    assert latency_engine(directory, HOST, WORK, store=store, memory=1) is None  # it cannot run at all
    assert latency_engine(source, HOST, WORK, store=store) is None  # not converted


@pytest.mark.parametrize(
    ("block_s", "size", "expected"),
    [
        (lambda n: 10.0, 64, 5),  # a block costs the same for one and for many: five prompts of two seconds
        (lambda n: 0.5 * n, 64, 1),
        (lambda n: 3.0 * n, 64, 1 << 20),
        (lambda n: 10.0, 4, 1 << 20),  # no block is large enough to pay
        (lambda n: 100.0 + n, 128, 100),
        (lambda n: 1.0, 1, 1),
    ],
)
def test_the_number_of_prompts_from_which_blocks_pay(block_s, size, expected):
    assert better_below(LatencyEngine(prompt_s=1.0, token_s=0.1, seconds=2.0), block_s, size) == expected


def test_offload_plan_says_so(folders, tmp_path, capsys, monkeypatch):
    _, directory = folders
    monkeypatch.setenv("HOME", str(tmp_path))  # the profile is this test's alone
    save_profile(store_path(), device_of(directory), profile_of())
    hardware = tmp_path / "host.json"
    hardware.write_text(json.dumps(HOST.to_json()))
    arguments = ["offload", "plan", str(directory), "--prompt-len", "32", "--gen-len", "16"]
    arguments += ["--hardware", str(hardware)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["latency_engine"]
    assert found["token_s"] > 0
    assert found["better_below_prompts"] >= 1
    assert main(arguments) == 0
    assert "one prompt at a time" in capsys.readouterr().out
