"""The memory limit under a cap that the kernel enforces, from a cold page cache (design contract 3).

The models here are tiny, so the process's own size is nearly all of the limit: what is proved is that the plan counts
it honestly, and that a limit that is too small is refused before the kernel has to act.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.cgroup
SPREAD = 12_000_000  # bytes: the interpreter and libraries do not map the same pages in every run

CHILD = """
import json, sys
import transformers
from flashllm.errors import FlashError
from flashllm.generate import SamplingOptions, Session
from flashllm.model import FlashModel
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


class Group:
    """A memory control group of either version, with a limit."""

    def __init__(self, root, names, limit):
        self.path, self._names = root / f"flashllm-test-{uuid.uuid4().hex}", names
        self.path.mkdir()
        try:
            (self.path / names["limit"]).write_text(str(limit))
        except OSError:
            self.path.rmdir()
            raise

    @property
    def peak(self):
        return int((self.path / self._names["peak"]).read_text())

    def enter(self):
        (self.path / "cgroup.procs").write_text("0")


V1 = {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes"}
V2 = {"limit": "memory.max", "peak": "memory.peak"}


@pytest.fixture
def group():
    """Makes groups; skips where none can be made."""
    made = []

    def make(limit):
        reasons = []
        for root, names in ((Path("/sys/fs/cgroup/memory"), V1), (Path("/sys/fs/cgroup"), V2)):
            try:
                made.append(Group(root, names, limit))
                return made[-1]
            except OSError as error:
                reasons.append(f"{root}: {error.strerror}")
        return pytest.skip(f"no memory cgroup can be made here ({'; '.join(reasons)})")

    yield make
    for one in made:
        one.path.rmdir()


def drop_page_cache():
    """Pages already cached are charged to whoever read them first: without this, libraries come free in a group."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def run(path, memory, group=None):
    """The child's answer."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(memory)],
        capture_output=True,
        text=True,
        preexec_fn=None if group is None else group.enter,
        check=False,
    )
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
    assert capped.peak <= limit


def test_below_the_minimum_is_refused_and_never_killed(tiny, group, unlimited):
    limit = unlimited["least"] - SPREAD
    answer = run(tiny("bfloat16").path("random"), limit, group(limit))
    assert answer["error"] == "BudgetError"
    assert "use --memory" in answer["message"]
