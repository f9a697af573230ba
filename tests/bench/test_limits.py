"""The benchmark of memory limits on the demo: what it calls a need is one, and its arithmetic."""

import json

import limits
import pytest
from memory_group import GroupError, MemoryGroup

from flashllm.convert.named import demo_path


def test_growth_is_in_bytes_of_a_hundred_steps():
    assert limits.growth([1000 + 7 * step for step in range(200)]) == pytest.approx(700, rel=0.2)
    assert limits.growth([10**9, *[5000] * 199]) == 0  # what the first steps take is not growth


@pytest.mark.cgroup
def test_a_generation_keeps_to_its_need(capsys):
    try:
        MemoryGroup(1 << 26).close()
    except GroupError as error:
        pytest.skip(str(error))
    assert limits.main(["need", str(demo_path()), "--verbs", "generate"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["survived"] for row in document["table"]] == [1, 1]
