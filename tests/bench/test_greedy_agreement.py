"""The script that compares greedy tokens with transformers', on a tiny model that it must agree with."""

import json

import greedy_agreement
from arch_models import Variant, make_checkpoint

from flashllm.convert.run import convert


def test_a_tiny_model_chooses_transformers_tokens(tmp_path, capsys):
    source = make_checkpoint(tmp_path / "hf", Variant("llama", {"hidden_act": "silu"}))
    for dtype in ("float32", "bfloat16"):
        convert(source, tmp_path / dtype, dtype=dtype)
    paths = [str(tmp_path / name) for name in ("hf", "float32", "bfloat16")]
    assert greedy_agreement.main([*paths, "--tokens", "12", "--questions", "2"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    exact, rounded = (document["models"][path] for path in paths[1:])
    assert (exact["whole_answers_equal"], exact["equal_tokens"], exact["same_choice"]) == (2, [12, 12], 1.0)
    assert exact["largest_logit_difference"] < 1e-3 < rounded["largest_logit_difference"]
    assert (exact["dtype"], rounded["dtype"]) == ("float32", "bfloat16")
