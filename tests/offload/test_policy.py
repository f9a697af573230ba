"""`Policy` and `Workload`: named fields, everything checked, JSON both ways."""

import json

import pytest

from flashllm.errors import FormatError
from flashllm.offload.policy import Policy, Workload

FIELDS = {"gpu_batch": 4, "num_batches": 3, "wg": 0.2, "wc": 0.8, "wd": 0, "cg": 0, "cc": 0.5, "cd": 0.5}
FIELDS |= {"hg": 1, "hc": 0, "hd": 0}


def test_derived_numbers():
    policy = Policy(**FIELDS)
    assert policy.block_size == 12
    assert policy.placement == (0.2, 0.8, 0, 0, 0.5, 0.5, 1, 0, 0)
    assert policy.uses_cpu
    assert policy.uses_disk
    assert not Policy(**{**FIELDS, "cc": 1, "cd": 0}).uses_disk


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu_batch", 0),
        ("gpu_batch", 2.0),
        ("num_batches", True),
        ("wg", -0.1),
        ("wg", 0.3),
        ("cd", 0.6),
        ("hg", float("nan")),
        ("cc", "0.5"),
        ("overlap", 1),
        ("attention_sparsity", 0),
        ("attention_sparsity", 1.5),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        Policy(**{**FIELDS, field: value})


def test_json_round_trip(tmp_path):
    policy = Policy(**FIELDS, compress_cache=True, attention_sparsity=0.1)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"policy": policy.to_json(), "predicted": {}}))
    assert Policy.load(path) == policy
    assert Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"policy": 3}', json.dumps({**FIELDS, "batch": 1}), "\xff"])
def test_damaged_files_are_format_errors(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match="policy"):
        Policy.load(path)


def test_missing_field_is_a_format_error():
    with pytest.raises(FormatError, match="wg"):
        Policy.from_json({"gpu_batch": 1})


def test_mean_context_is_that_of_a3():
    assert Workload(prompt_len=512, gen_len=32).mean_context == 528
