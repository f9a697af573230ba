"""The script that shows what zeros in a mixture bring, at a small width."""

import json

import pytest
import zero_columns


@pytest.mark.parametrize("share", zero_columns.SHARES)
def test_neurons_are_zero_by_the_sign_of_their_rows(share):
    rows = zero_columns.neurons(500, share)["up_proj.weight"]
    assert (rows.sum(1) <= 0).float().mean() == pytest.approx(share, abs=0.02)


def test_a_token_is_timed_at_every_share_of_zeros(tmp_path, monkeypatch, capsys):
    for name, size in (("WIDTH", 128), ("SIZE", 64), ("SHARED", 128)):
        monkeypatch.setattr(zero_columns, name, size)
    options = ["--experts", "8", "--tokens", "2", "--rounds", "3", "--json", str(tmp_path / "out.json")]
    assert zero_columns.main(options) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out.json").read_text())
    assert [row["zeros"] for row in document["rows"]] == [0.0, 0.5, 0.7, 0.9]
    assert [len(row["each"]) for row in document["rows"]] == [3] * 4
