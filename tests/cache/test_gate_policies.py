"""The replay of ways to use a gate: codes of 3 bits, and what each way reads of a tiny model."""

import json

import gate_policies
import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint

from flashllm.base.group_codes import GROUP_CODES
from flashllm.convert.run import convert


def test_3_bits_lie_on_their_grid_and_lose_more_than_4():
    gate = np.random.default_rng(0).standard_normal((40, 70), np.float32)
    made, code = gate_policies.in_3_bits(gate), GROUP_CODES["int4_32"]
    for group in (slice(0, 32), slice(32, 64), slice(64, 70)):
        assert max(len(np.unique(row)) for row in made[:, group]) <= 8
    lost, less = (((each - gate) ** 2).mean() for each in (made, code.decode(code.encode(gate), 70)))
    assert 2 * less < lost < 0.05


def test_a_map_of_full_rank_is_the_gate():
    random = np.random.default_rng(1)
    gate, x = random.standard_normal((12, 8), np.float32), random.standard_normal((50, 8), np.float32)
    np.testing.assert_allclose(gate_policies.low_rank(gate, x, 8), gate, atol=1e-4)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    root = tmp_path_factory.mktemp("gates")
    convert(make_checkpoint(root / "hf", VARIANTS["llama"]), root / "model")
    (root / "text").write_text("the cat sat on the mat and the dog ran over the hill. " * 20)
    arguments = [str(root / "model"), str(root / "text"), "--tokens", "120", "--json", str(root / "out.json")]
    assert gate_policies.main(arguments) == 0
    return json.loads((root / "out.json").read_text())


def test_each_way_reads_what_it_must(document):
    rows = {(row["share"], row["way"], row["predictor"]): row for row in document["rows"]}
    assert (0.25, "gate resident", "") not in rows  # a third of the FFN does not fit a quarter
    resident = rows[0.5, "gate resident", ""]
    assert resident["rows"] == pytest.approx(2 * resident["requests"])
    for (share, way, predictor), row in rows.items():
        if way == "whole neuron":
            first = rows[share, "gate rows first", predictor]
            assert row["rows"] == pytest.approx(3 * row["requests"])
            assert (first["recall"], first["named"]) == (row["recall"], row["named"])
            assert row["requests"] <= first["requests"] <= 2 * row["requests"]
            assert first["rows"] <= row["rows"] + 1e-6
        if share > 0.25:
            assert row["rows"] <= rows[0.25, "whole neuron", predictor or "4 bits"]["rows"]
