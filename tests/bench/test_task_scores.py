"""The script that scores tasks beside transformers, on a tiny model."""

import json

import pytest
import task_scores
from arch_models import VARIANTS, make_checkpoint
from scorers import Flash
from scripts import write_gz
from tiny_models import SENTENCES

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model

LAMBADA = [{"context": "the king lived in", "target": "a"}, {"context": "once upon", "target": "time"}]
CHOICES = [{"question": f"{one}?", "choices": [SENTENCES[0], "no", "it is"], "label": 1} for one in SENTENCES[:3]]


@pytest.fixture
def arguments(tmp_path):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    (tmp_path / "text.txt").write_text(" ".join(SENTENCES) * 20)
    write_gz(tmp_path / "lambada_openai_test.jsonl.gz", LAMBADA)
    write_gz(tmp_path / "arc_easy_test.jsonl.gz", CHOICES)
    text = str(tmp_path / "text.txt")
    sizes = ["--items", "3", "--windows", "2", "--length", "40"]
    common = [str(source), "--tasks", str(tmp_path), "--text", text, "--calibration", text, *sizes]
    return [*common, "--names", "lambada", "arc_easy", "--out", str(tmp_path / "out.json")]


def test_rows_agree_and_resume(arguments, tmp_path, capsys):
    rows = ["transformers", "dense", "40%", "40% sparse", "40% 4bit"]
    assert task_scores.main([*arguments, "--rows", *rows[:1]]) == 0
    assert task_scores.main([*arguments, "--rows", *rows]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out.json").read_text())
    theirs, ours, cut, cut_sparse, in_codes = (document["rows"][name] for name in rows)
    for one, other in ((theirs, ours), (cut, cut_sparse)):
        assert one["text"]["perplexity"] == pytest.approx(other["text"]["perplexity"], rel=1e-4)
        assert one["lambada"]["perplexity"] == pytest.approx(other["lambada"]["perplexity"], rel=1e-4)
        assert one["arc_easy"]["chosen"] == other["arc_easy"]["chosen"]
    assert cut["text"]["change"] != 0 != cut["text"]["change_error"]
    assert "firing" not in ours["text"]
    assert cut["text"]["firing"] == pytest.approx([0.6] * len(cut["text"]["firing"]), abs=0.15)
    missed = [one - other for one, other in zip(cut["text"]["firing"], in_codes["text"]["firing"], strict=True)]
    assert all(0 <= share < 0.1 for share in missed)
    assert ours["text"]["agreement"] == theirs["text"]["agreement"] == 1
    with pytest.raises(SystemExit, match="other settings"):
        task_scores.main([*arguments, "--items", "2"])
    with pytest.raises(SystemExit):
        task_scores.main(["--text", "text", "--out", "out.json", str(tmp_path)])
    assert "--tasks is missing" in capsys.readouterr().err


def test_fewer_bits_of_a_model_directory(arguments, tmp_path):
    source = make_checkpoint(tmp_path / "relu" / "hf", VARIANTS["opt"])
    convert(source, tmp_path / "model")
    of = [str(tmp_path / "model"), *arguments[1:]]
    assert task_scores.main([*of, "--rows", "dense", "transformers", "int8_32+int8_32", "int4_32:down"]) == 0
    dense, theirs, both, down = json.loads((tmp_path / "out.json").read_text())["rows"].values()
    assert dense["text"]["perplexity"] == pytest.approx(theirs["text"]["perplexity"], rel=1e-4)
    assert dense["lambada"]["same_choices"] == 1
    assert all(0 < share < 1 for share in dense["text"]["firing"])
    assert both["text"]["change"] != 0 != down["text"]["change"]
    assert both["text"]["firing"] != dense["text"]["firing"]


class Counting:
    """Likes the token that is one more than the last."""

    def __init__(self):
        self.fed, self.calls = [], 0

    def start(self):
        self.fed = []

    def feed(self, ids, *, last=False):
        self.fed += ids
        self.calls += 1
        ids = ids[-1:] if last else ids
        return 5 * (task_scores.np.arange(10) == task_scores.np.array(ids)[:, None] + 1).astype("f4")

    def back_to(self, length):
        del self.fed[length:]


def test_a_prompt_is_computed_once():
    scorer = Counting()
    good, bad, one = task_scores.continuations(scorer, [1, 2], [[3, 4, 5], [3, 3], [3]])
    assert (good.greedy, bad.greedy, one.greedy) == (True, False, True)
    assert one.log_likelihood > good.log_likelihood > bad.log_likelihood
    assert scorer.calls == 3
    assert scorer.fed == [1, 2]


def test_items_together_are_scored_as_alone(tmp_path):
    convert(make_checkpoint(tmp_path / "hf", VARIANTS["llama"]), tmp_path / "model")
    with Model.open(tmp_path / "model", RunConfig(mode="dense")) as model:
        scorer = Flash(model)
        asked = [([5, 6, 7], [[8, 9, 10], [8], [11, 12]]), ([9], [[3, 4]])]
        together = scorer.endings(asked)
        for (prefix, endings), rows in zip(asked, together, strict=True):
            alone = task_scores.continuations(scorer, prefix, endings)
            assert [task_scores.said(*pair) for pair in zip(rows, endings, strict=True)] == alone


def test_sorted_tasks_are_spread(tmp_path):
    rows = [{"subject": "s", "question": str(number), "choices": list("wxyz"), "label": 0} for number in range(10)]
    write_gz(tmp_path / "mmlu_test.jsonl.gz", rows)
    found = task_scores.items_of(tmp_path, "mmlu", 3)
    assert [item.prompts[0].split("\n")[2] for item in found] == ["0", "3", "6"]
    assert len(task_scores.items_of(tmp_path, "mmlu", 20)) == 10
