"""Shared passes are measured on the demo, forced tokens are those of an answer token by token, and of a prompt whose
beginning the server knows the rest is computed."""

import pytest
from scripts import REPOSITORY, document_of, run_script

from flashllm.parked.folder import ParkingFolder

DEMO = REPOSITORY / "flashllm/demo"


@pytest.mark.parametrize("what", ["together", "forced"])
def test_both_run_on_the_demo(what):
    arguments = [what, DEMO, "--tokens", "40", "--rounds", "1", "--at-once", "1", "3"]
    document = document_of(run_script("bench/serve/shared_passes.py", *arguments))
    if what == "together":
        assert [row["at_once"] for row in document["together"]] == [1, 3]
        assert document["together"][1]["bound_by_union"] > 1
    else:
        assert document["same_tokens"]
        one, other = (document["forced"][name][0]["passes"] for name in ("forced together", "one by one"))
        assert one < 0.6 * other


def test_of_a_prompt_whose_beginning_is_known_the_rest_is_computed(tmp_path, monkeypatch):
    read, load = [], ParkingFolder.load
    monkeypatch.setattr(ParkingFolder, "load", lambda self, *entry: read.append(load(self, *entry)) or read[-1])
    quick = ["--known", "150", "--new", "20", "--rounds", "2", "--parking", tmp_path, "--simd", "scalar"]
    document = document_of(run_script("bench/serve/shared_passes.py", "known", DEMO, *quick))
    computed = {name: [one["computed"] for one in found] for name, found in document["first_tokens"].items()}
    assert computed == {"alone": [20, 20], "cold": [170, 170], "known": [20, 20], "parked": [20, 20]}
    assert document["over_alone"]["parked"] == document["seconds"]["parked"] / document["seconds"]["alone"]
    assert read == [True, True]  # for a round's last prompt alone
    assert document["used"] == "scalar"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        (["--known", "63"], 2, "at least 64"),
        (["--simd", "sse"], 2, "must be one of scalar"),
        (["--known", "100000"], 1, "shared_passes: --context"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, status, said):
    done = run_script("bench/serve/shared_passes.py", "known", DEMO, *wrong, status=status)
    assert said in done.stderr
