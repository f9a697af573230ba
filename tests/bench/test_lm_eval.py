"""lm-eval's own client reads from the server what its own model reads from a `FlashModel`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm_eval[api]'")
SCRIPT = Path(__file__).parents[2] / "bench/serve/lm_eval_likelihoods.py"


def test_two_items(tmp_path):
    items = tmp_path / "items.jsonl"
    pairs = [("Once upon a time there was a little", "dog"), ("The sun was warm and the sky was", "blue")]
    items.write_text("".join(json.dumps({"context": one, "target": two}) + "\n" for one, two in pairs))
    done = subprocess.run([sys.executable, SCRIPT, items, "--items", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["largest_difference"] < 1e-4
    assert report["same_greedy"] == 2
