"""The memory limit under a cap that the kernel enforces, from a cold page cache (design contract 3).

Two models. In the tiny one the process's own size is nearly all of the limit: the plan must count it honestly, and
refuse a limit that is too small before the kernel has to act. In the other the KV cache of a full context is larger
than all margins: it must come out of the neuron caches.
"""

import json
import signal
import subprocess
import sys

import predictor_files
import pytest
from memory_group import GroupError, MemoryGroup, drop_page_cache
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert

pytestmark = pytest.mark.cgroup
SPREAD = 12_000_000  # bytes: the interpreter and libraries do not map the same pages in every run
CONTEXT = 1024
PROMPT = "The little dog ran to the big tree and looked up."

# Fills the context by a long prompt and ten tokens, then as many other sequences as the memory holds. Without a limit
# it tells the smallest one.
FILL = """
import json, sys
from pathlib import Path
from flashllm.base.machine import process_nbytes
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import ContextFull
path, memory = sys.argv[1:]
config = RunConfig(memory=int(memory) or None, threads=2, io_threads=4)
with Model.open(Path(path), config) as model:
    plan = model.plan.memory
    answer = {"least": plan.minimum_nbytes, "workspace": plan.workspace, "rss": []}
    answer["kv"] = plan.context_pages * plan.page_nbytes
    if not int(memory):
        print(json.dumps(answer))
        sys.exit()
    ids = [5 + 7 * i % 290 for i in range(plan.context)]
    with model.new_sequence() as sequence:
        for begin, end in [(0, 20), (20, len(ids) - 10), *((i, i + 1) for i in range(len(ids) - 10, len(ids)))]:
            model.step([(sequence, ids[begin:end])])
            answer["rss"].append(process_nbytes())
    sequences = []
    try:
        while True:
            sequences.append(model.new_sequence())
            model.step([(sequences[-1], ids[:20])])
    except ContextFull:
        answer["rss"].append(process_nbytes())
    answer["sequences"] = len(sequences)
print(json.dumps(answer))
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


def run(arguments, group=None):
    """(exit status, standard output, standard error) of Python with these arguments."""
    command = [sys.executable, *map(str, arguments)]
    command = command if group is None else group.entering(command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != -signal.SIGKILL, "the kernel ended the process: the plan promised too much"
    return done.returncode, done.stdout, done.stderr


def generate(path, memory, group=None):
    """As `run`, of `flashllm generate`; memory: bytes, None: no limit."""
    limit = [] if memory is None else ["--memory", memory]
    options = ["--json", "--threads", 2, "--max-new-tokens", 60, *limit]
    return run(["-m", "flashllm", "generate", path, "--prompt", PROMPT, *options], group)


def fill(path, memory, group=None):
    """The answer of FILL; memory: bytes, 0: no limit."""
    status, out, errors = run(["-c", FILL, path, memory], group)
    assert status == 0, errors
    return json.loads(out)


@pytest.fixture(scope="module")
def unlimited(tiny):
    """What `generate` says without a limit."""
    status, out, errors = generate(tiny("bfloat16").path("random"), None)
    assert status == 0, errors
    return json.loads(out)


def test_the_minimum_is_enough_under_a_cap_of_exactly_that(tiny, group, unlimited):
    limit = unlimited["plan"]["minimum_bytes"] + SPREAD
    capped = group(limit)
    drop_page_cache()
    status, out, errors = generate(tiny("bfloat16").path("random"), limit, capped)
    assert status == 0, errors
    document = json.loads(out)
    assert document["token_ids"] == unlimited["token_ids"]
    assert capped.peak_nbytes <= limit
    assert document["peak_rss_bytes"] <= limit


def test_below_the_minimum_is_refused_and_never_killed(tiny, group, unlimited):
    limit = unlimited["plan"]["minimum_bytes"] - SPREAD
    status, _, errors = generate(tiny("bfloat16").path("random"), limit, group(limit))
    assert status == 1
    assert "use --memory" in errors


@pytest.fixture(scope="module")
def large_kv(tmp_path_factory):
    """A model with a KV cache of 50 MB when its context is full, and neurons of 50 MB."""
    root = tmp_path_factory.mktemp("large_kv")
    shape = {"num_layers": 12, "d_model": 512, "d_ff": 1024, "num_heads": 8, "context": CONTEXT}
    source = make_tiny_opt(root / "hf", dtype="float32", **shape)
    convert(source, root / "model")
    predictor_files.install("random", source, root / "model", root)
    return root / "model"


def test_the_kv_cache_grows_out_of_the_neuron_caches(large_kv, group):
    unlimited = fill(large_kv, 0)
    assert unlimited["kv"] > unlimited["workspace"] + 3 * SPREAD  # else growth would not be noticed
    limit = unlimited["least"] + SPREAD
    capped = group(limit)
    drop_page_cache()
    answer = fill(large_kv, limit, capped)
    assert answer["sequences"] > 15
    assert capped.peak_nbytes <= limit
    first, *later = answer["rss"]
    assert max(later) - first < answer["workspace"] + 2 * SPREAD
