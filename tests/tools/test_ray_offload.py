"""The Ray example: two workers answer as one engine does."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from scripts import document_of, run_python
from tiny_models import SENTENCES, make_tiny_opt

from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.engine import OffloadEngine

TOOLS = Path(__file__).parents[2] / "tools"
# As the tool is run, but for Ray waiting for both workers: the first to start could answer so few prompts alone.
CODE = """
import sys
import ray.data
import ray_offload
ray.data.DataContext.get_current().wait_for_min_actors_s = 120
sys.exit(ray_offload.main(sys.argv[1:]))
"""
POLICY = {"gpu_batch": 2} | {kind + tier: float(tier == "g") for kind in "wch" for tier in "gcd"}
NEW = 9

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray, which is large and optional, is not installed: flashllm[ray]"
)


def test_two_workers_answer_as_one_engine(tmp_path):
    model = make_tiny_opt(tmp_path / "model", context=64)
    prompts = [f"{sentence} {word}" for word in ("a", "The", "moon", "sun", "sky", "day") for sentence in SENTENCES]
    source, out, policy = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "policy.json"
    source.write_text("\n".join(json.dumps({"prompt": p, "custom_id": str(i)}) for i, p in enumerate(prompts)))
    policy.write_text(json.dumps(POLICY))
    command = ["-c", CODE, model, "-i", source, "-o", out, "--workers", "2", "--memory", "2GB", "--batch-size", "4"]
    command += ["--max-new", NEW, "--policy", policy, "--scratch", tmp_path / "scratch"]
    path = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"RAY_TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    done = run_python(*command, timeout=240, env=environment)
    lines = [json.loads(line) for path in out.glob("*.json") for line in path.read_text().splitlines()]
    found = {int(line["custom_id"]): line for line in lines}
    assert len(lines) == len(found) == len(prompts)
    assert len({line["worker"] for line in lines}) == 2
    with OffloadEngine(model, policy=POLICY, scratch=tmp_path / "one") as engine:
        expected = engine.generate(prompts, SamplingOptions(max_new_tokens=NEW))
    for index, output in enumerate(expected):
        line = found[index]
        assert (line["text"], line["completion_tokens"]) == (output.text, len(output.token_ids))
        assert (line["prompt"], line["error"]) == (prompts[index], "")
    summary = document_of(done)
    assert (summary["lines"], summary["errors"]) == (len(prompts), 0)
    assert "exists; give another folder" in run_python(*command, status=2, env=environment).stderr
