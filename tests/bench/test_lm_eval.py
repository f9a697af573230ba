"""lm-eval's own client reads from the server what its own model reads from a `FlashModel`, and its harness agrees."""

import json

import harness_scores
import pytest
from arch_models import VARIANTS, make_checkpoint
from scripts import REPOSITORY, document_of, run_python, write_gz
from tiny_models import SENTENCES

from flashllm.convert.run import convert
from flashllm.pack.sparsified import convert_sparsified

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm_eval[api]'")
SCRIPT = REPOSITORY / "bench/serve/lm_eval_likelihoods.py"


def test_two_items(tmp_path):
    items = tmp_path / "items.jsonl"
    pairs = [("Once upon a time there was a little", "dog"), ("The sun was warm and the sky was", "blue")]
    items.write_text("".join(json.dumps({"context": one, "target": two}) + "\n" for one, two in pairs))
    report = document_of(run_python(SCRIPT, items, "--items", "2", timeout=280))
    assert report["largest_difference"] < 1e-4
    assert report["same_greedy"] == 2


def test_the_harness_agrees_with_transformers(tmp_path, capsys):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    convert(source, tmp_path / "model")
    words = [{"context": "the king lived in", "target": "a"}, {"context": "once upon", "target": "time"}]
    choices = [{"question": one, "choices": [SENTENCES[0], "no", "it is"], "label": 1} for one in SENTENCES[:3]]
    for name, rows in (("lambada_openai_test", words), ("arc_easy_test", choices)):
        write_gz(tmp_path / f"{name}.jsonl.gz", rows)
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES) * 20)
    convert_sparsified(source, tmp_path / "cut", 0.4, tmp_path / "text.txt", gate="resident")
    folders = [str(source), str(tmp_path / "model"), str(tmp_path / "cut"), "--sparse", str(tmp_path / "cut")]
    assert harness_scores.main([*folders, "--tasks", str(tmp_path), "--items", "2"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert list(rows) == ["transformers", "model", "cut", "cut, prompts sparse"]
    theirs, ours, cut, cut_sparse = rows.values()
    for name in ("lambada", "arc_easy"):
        assert [row[name]["items"] for row in rows.values()] == [2] * 4
        assert ours[name]["acc"] == theirs[name]["acc"]
        assert ours[name]["same_choices"] == 1
        assert ours[name]["largest_difference"] < 1e-4 < cut[name]["largest_difference"]
        assert cut_sparse[name]["largest_difference"] == pytest.approx(cut[name]["largest_difference"], abs=1e-4)
