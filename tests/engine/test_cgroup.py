"""The memory limit under a cap that the kernel enforces, from a cold page cache (design contract 3).

The models here are tiny, so the process's own size is nearly all of the limit: what is proved is that the plan counts
it honestly, and that a limit that is too small is refused before the kernel has to act.
"""

import json
import signal
import subprocess
import sys

import bench_path  # noqa: F401
import pytest
from memory_group import GroupError, MemoryGroup, drop_page_cache

pytestmark = pytest.mark.cgroup
SPREAD = 12_000_000  # bytes: the interpreter and libraries do not map the same pages in every run

CHILD = """
import json, sys
import transformers
from flashllm.errors import FlashError
from flashllm.generate.session import SamplingOptions, Session
from flashllm.hf.model import FlashModel
path, memory = sys.argv[1:]
try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = FlashModel.from_pretrained(path, memory=int(memory) or None, threads=2)
    with model.engine, Session(model, tokenizer, SamplingOptions(max_new_tokens=60)) as session:
        records = list(session.stream("The little dog ran to the big tree and looked up."))
    print(json.dumps({"ids": [r.token_id for r in records[1:]], "least": model.engine.plan.minimum_nbytes}))
except FlashError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@pytest.fixture
def group():
    """Makes groups; skips where none can be made."""
    made = []

    def make(limit):
        try:
            made.append(MemoryGroup(limit))
        except GroupError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(path, memory, group=None):
    """The child's answer."""
    command = [sys.executable, "-c", CHILD, str(path), str(memory)]
    command = command if group is None else group.entering(command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != -signal.SIGKILL, "the kernel ended the process: the plan promised too much"
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def unlimited(tiny):
    return run(tiny("bfloat16").path("random"), 0)


def test_the_minimum_is_enough_under_a_cap_of_exactly_that(tiny, group, unlimited):
    limit = unlimited["least"] + SPREAD
    capped = group(limit)
    drop_page_cache()
    answer = run(tiny("bfloat16").path("random"), limit, capped)
    assert answer.get("error") is None, answer
    assert answer["ids"] == unlimited["ids"]
    assert capped.peak_nbytes <= limit


def test_below_the_minimum_is_refused_and_never_killed(tiny, group, unlimited):
    limit = unlimited["least"] - SPREAD
    answer = run(tiny("bfloat16").path("random"), limit, group(limit))
    assert answer["error"] == "BudgetError"
    assert "use --memory" in answer["message"]
