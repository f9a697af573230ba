"""A night of benchmarks: a row is made and measured once, what a machine lacks is said, and every result has a row."""

import json

import overnight
import pytest
import tables
from overnight import Row

TINY = "--shape opt-125m --layers 2 --hidden 192 --vocab 8192 --tokens 20 --learn-tokens 20"


@pytest.fixture
def night(tmp_path, monkeypatch, capsys):
    def run(rows, *options):
        monkeypatch.setattr(overnight, "ROWS", rows)
        monkeypatch.setattr(overnight, "MODELS", {"tiny": (0.1, f"python tools/make_synthetic_model.py tiny {TINY}")})
        status = overnight.main([str(tmp_path), *options])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_a_night_ends_with_every_row_and_another_goes_on(night, tmp_path):
    traced = "python bench/engine/traced.py generate tiny"
    bench = "flashllm bench tiny --tokens 8 --threads 1 --no-profile --json"
    rows = (
        Row("traced", (), ("tiny",), f"{traced} --prompt dog --max-new-tokens 2 --json"),
        Row("bench", (), ("tiny",), f"{bench} && {bench}"),
        Row("fails", (), (), "flashllm bench gone"),
        Row("lacks", (), (), "python bench/protocol.py gone --beside llama.cpp --memory 4000GB", ("gone.txt",)),
    )
    planned = night(rows, "--plan", "--only", "traced", "lacks")[1]
    assert planned["traced"] == "would run"
    assert not list(tmp_path.iterdir())
    status, ended = night(rows)
    assert status == 1
    assert ended["traced"].startswith("done in")
    assert ended["fails"] == f"failed: status 2; {tmp_path / 'fails.log'} says why"
    assert f"gone.txt in {tmp_path}" in ended["lacks"]
    assert "4 TB of free memory" in ended["lacks"]
    whole = Row("whole", (), (), "python bench/peer/whole_model.py gone --memory 8GB 4000GB 12GB --prompt 8")
    assert "4 TB of free memory" in overnight.lacking(whole, tmp_path)
    assert json.loads((tmp_path / "bench.json").read_text())["tokens"] == 3
    (tmp_path / "bench.json").unlink()
    status, ended = night(rows[:2], "--discard")
    assert status == 0
    assert ended["traced"] == "done before"
    assert ended["bench"].startswith("done in")
    assert not (tmp_path / "tiny").exists()


def test_every_result_of_the_tables_has_a_row_whose_models_are_made(monkeypatch):
    loaded = set()
    load = tables.load
    monkeypatch.setattr(tables, "load", lambda path: loaded.add(path) or load(path))
    for table in tables.TABLES.values():
        table()
    assert len(loaded) > 25
    assert loaded - {result for row in overnight.ROWS for result in row.results} == set()
    assert {model for row in overnight.ROWS for model in row.models} == set(overnight.MODELS)
    assert len({row.name for row in overnight.ROWS}) == len(overnight.ROWS)
