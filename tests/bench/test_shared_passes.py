"""Shared passes are measured on the demo, and forced tokens are those of an answer token by token."""

import pytest
from scripts import REPOSITORY, document_of, run_script


@pytest.mark.parametrize("what", ["together", "forced"])
def test_both_run_on_the_demo(what):
    arguments = [what, REPOSITORY / "flashllm/demo", "--tokens", "40", "--rounds", "1", "--at-once", "1", "3"]
    document = document_of(run_script("bench/serve/shared_passes.py", *arguments))
    if what == "together":
        assert [row["at_once"] for row in document["together"]] == [1, 3]
        assert document["together"][1]["bound_by_union"] > 1
    else:
        assert document["same_tokens"]
        one, other = (document["forced"][name][0]["passes"] for name in ("forced together", "one by one"))
        assert one < 0.6 * other
