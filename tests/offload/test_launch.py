"""From limits to a runner: blocks of a ragged job, and that planner, runtime and process keep to one memory."""

import dataclasses
import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from arch_models import Variant, make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from memory_group import GroupError, MemoryGroup
from offload_host import GB, HOST, policy_of
from scripts import REPOSITORY, document_of, run_python
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert
from flashllm.errors import BudgetError, UsageError
from flashllm.offload import launch as launching
from flashllm.offload.jobs.blocks import cut, equal, in_blocks
from flashllm.offload.launch import LaunchOptions, prepare
from flashllm.offload.planner.local import predict_job
from flashllm.offload.planner.predict import predict
from flashllm.offload.policy import Workload
from flashllm.offload.runtime.opened import OpenModel
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.runtime.tiers.scratch import MARGIN_NBYTES, check_space
from flashllm.offload.shape import load_shape
from flashllm.offload.stages import split_model

MB = 10**6
WORK = Workload(prompt_len=20, gen_len=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, shape) of a model of 8 MB a layer."""
    folder = make_tiny_opt(
        tmp_path_factory.mktemp("model"), d_model=512, d_ff=3072, num_heads=8, vocab_size=2000, num_layers=4,
        context=512, dtype="bfloat16",
    )  # fmt: skip
    return folder, load_shape(str(folder))


@pytest.fixture(scope="module")
def model_dir(model, tmp_path_factory):
    """The same, converted."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(model[0], folder)
    return folder, load_shape(str(folder))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 12), st.integers(30, 120))
def test_blocks_are_as_large_as_memory_allows(lengths, most, room):
    sizes = [(length, length) for length in sorted(lengths, reverse=True)]

    def fits(block):
        return sum(prompt for prompt, _ in block) <= room

    counts = cut(sizes, most, fits)
    first = 0
    for count in counts:
        assert 1 <= count <= most
        assert fits(sizes[first : first + count])
        full = count == most or first + count == len(sizes)
        assert full or not fits(sizes[first : first + count + 1])
        first += count
    assert first == len(sizes)
    assert cut([(room + 1, 1), *sizes], most, fits) is None


def test_by_default_four_fifths_of_what_the_processes_could_hold(monkeypatch):
    """As everywhere; the processes of a pipeline share what is free."""
    monkeypatch.setattr(launching, "process_nbytes", lambda: 300 * MB)
    monkeypatch.setattr(launching, "beside_nbytes", lambda: 100 * MB)
    monkeypatch.setattr(launching, "available_nbytes", lambda: 6000 * MB)
    assert launching.memory_limits(LaunchOptions())[0] == 4 * (400 + 6000) * MB // 5
    assert launching.memory_limits(LaunchOptions(processes=3))[0] == 4 * (400 + 2000) * MB // 5
    assert launching.memory_limits(LaunchOptions(memory=MB * 700))[0] == 700 * MB


def test_equal_blocks():
    assert equal(7, 3) == [3, 3, 1]
    assert equal(0, 3) == []


@pytest.mark.parametrize("where", ["device", "disk", "half"])
@pytest.mark.parametrize("kind", ["model", "model packed", "model_dir"])
def test_the_planner_counts_as_the_runtime(request, kind, where):
    """Of blocks of one length: the planner's memory is the runtime's, or a little more."""
    (folder, shape), compress = request.getfixturevalue(kind.split()[0]), kind.endswith("packed")
    for prompt, new, changes in ((200, 32, {}), (64, 4, {"gpu_batch": 24, "num_batches": 1}), (10, 100, {})):
        chosen = policy_of(where, compress_weights=compress, compress_cache=compress, **changes)
        work = Workload(prompt_len=prompt, gen_len=new)
        planned = predict(shape, HOST, work, chosen)
        with OpenModel(folder, chosen, RunOptions(scratch=folder, threads=1)) as opened:
            need = opened.need([(prompt, prompt + new - 1)] * chosen.block_size)
            starting = opened.shortage(None)
        assert starting == (0, 0)  # without limits nothing is short
        assert 0.93 * planned.peak_device < need.memory(accelerated=False) <= 1.01 * planned.peak_device
        assert need.scratch == pytest.approx(planned.peak_disk, rel=0.02, abs=64 * 4096)


@pytest.mark.parametrize("where", ["device", "disk"])
def test_the_planner_counts_recurrent_states(tmp_path, where):
    """In memory, wherever the rest of a sequence lies."""
    rule = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 64, "value_head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 3072, "vocab_size": 2000, "head_dim": 64}
    config = {**sizes, **{f"linear_{name}": size for name, size in rule.items()}}
    folder = make_checkpoint(tmp_path / "model", Variant("qwen3_5_text", config), dtype="bfloat16")
    shape, chosen, work = load_shape(str(folder)), policy_of(where), Workload(prompt_len=200, gen_len=32)
    assert shape.state_bytes == 2 * 4 * (64 * 8 * 64 + 3 * 2 * 8 * 64)  # of two layers: heads, and a convolution
    planned = predict(shape, HOST, work, chosen)
    with OpenModel(folder, chosen, RunOptions(scratch=folder, threads=1)) as opened:
        need = opened.need([(200, 231)] * chosen.block_size)
    assert 0.93 * planned.peak_device < need.memory(accelerated=False) <= 1.01 * planned.peak_device


def test_of_a_pipeline_a_stage_s_layers_and_all_blocks_in_flight_are_counted(model, tmp_path, monkeypatch):
    folder, shape = model
    sizes, policy = [(20, 29)] * 48, policy_of()
    with OpenModel(
        folder, policy, RunOptions(scratch=tmp_path, threads=1), stage=split_model(shape, 2, WORK)[-1]
    ) as opened:
        needed = opened.need(sizes[: 2 * policy.block_size]).memory(accelerated=False)
    options = LaunchOptions(scratch=tmp_path / "scratch", device="cpu", policy=policy)
    monkeypatch.setattr(launching, "memory_limits", lambda options: (0, needed))
    assert prepare(folder, shape, sizes, options, stages=2).blocks == (24, 24)
    with pytest.raises(BudgetError, match="the weights need"):  # of all layers
        prepare(folder, shape, sizes, options)
    monkeypatch.setattr(launching, "memory_limits", lambda options: (0, needed - 1))
    with pytest.raises(BudgetError, match="a block of 24 sequences"):
        prepare(folder, shape, sizes, options, stages=2)


def test_a_ragged_job_is_planned_by_its_blocks(model, tmp_path, monkeypatch):
    """A few long prompts do not make the blocks of all others small, and every block keeps to the limits."""
    folder, shape = model
    monkeypatch.setattr(launching, "memory_limits", lambda options: (0, 90 * MB))
    sizes = [(400, 450)] * 6 + [(20, 29)] * 400
    options = LaunchOptions(scratch=tmp_path / "scratch", device="cpu", threads=2)
    lines = []
    found = prepare(folder, shape, sizes, options, report=lines.append)
    assert sum(found.blocks) == len(sizes)
    assert f"406 sequences in blocks of {min(found.blocks)}-{max(found.blocks)}" in lines[0]
    with OpenModel(folder, found.policy, RunOptions(scratch=tmp_path, threads=1, memory=90 * MB)) as opened:
        opened.check(None)
        for block in in_blocks(sizes, found.blocks):
            opened.check(block)
    # Against all blocks as if they were of the longest.
    work = Workload(prompt_len=400, gen_len=51)
    longest = launching.plan_policy(shape, work, found.options, requests=len(sizes))
    priced = [
        predict_job(shape, found.options, each, launching.workloads(sizes, counts))
        for each, counts in ((found.policy, found.blocks), (longest, equal(len(sizes), longest.block_size)))
    ]
    assert priced[0]["throughput"] >= priced[1]["throughput"]


def test_a_limit_of_a_gpus_memory_needs_one(model, tmp_path):
    options = LaunchOptions(scratch=tmp_path / "scratch", device="cpu", gpu_memory=GB)
    with pytest.raises(UsageError, match="gpu_memory is a GPU's"):
        prepare(*model, [(20, 29)], options)


def test_what_cannot_be_held_is_refused_with_numbers(model, tmp_path, monkeypatch):
    folder, shape = model
    options = LaunchOptions(scratch=tmp_path / "scratch", device="cpu")
    monkeypatch.setattr(launching, "memory_limits", lambda options: (300 * MB, 30 * MB))
    told = r"not fit the limits on this machine: it needs .* more memory .*; --memory 300 MB leaves the model 30 MB:"
    with pytest.raises(BudgetError, match=told):
        prepare(folder, shape, [(400, 450)] * 3, options)
    given = dataclasses.replace(options, policy=policy_of())
    with pytest.raises(BudgetError, match=r"the weights need .* MB of memory, and 30 MB is the limit"):
        prepare(folder, shape, [(400, 450)] * 3, given)
    monkeypatch.setattr(launching, "memory_limits", lambda options: (0, 90 * MB))
    with pytest.raises(BudgetError, match=r"a block of 12 sequences of up to 451 tokens need"):
        prepare(folder, shape, [(400, 450)] * 30, given)
    assert prepare(folder, shape, [(20, 29)] * 30, given).blocks == (12, 12, 6)


def test_where_no_planned_block_fits_the_least_memory_is_said(model, tmp_path, monkeypatch):
    """The planner's count is a little less than the runtime's."""
    folder, shape = model
    monkeypatch.setattr(launching, "memory_limits", lambda options: (300 * MB, 250 * MB))
    monkeypatch.setattr(launching, "plan_policy", lambda *job, **sizes: policy_of("disk"))
    short = iter(range(40, 0, -1))
    monkeypatch.setattr(OpenModel, "shortage", lambda self, sizes: (next(short) * MB, 0))
    said = r"up to 451 tokens needs at least --memory 3(\d\d) MB, not 300 MB; give it that, .*--compress weights,cache"
    with pytest.raises(BudgetError, match=said) as refused:
        prepare(folder, shape, [(400, 450)] * 3, LaunchOptions(scratch=tmp_path / "scratch", device="cpu"))
    assert next(short) < 40 - 5  # there were several plans
    assert f"--memory {300 + next(short) + 5} MB" in str(refused.value)  # of the last plan, the least


def test_a_disk_is_planned_with_what_scratch_files_leave_free(model_dir, tmp_path, monkeypatch):
    """What is accepted here, the runtime has room for."""
    folder, shape = model_dir
    policy, sizes = policy_of("disk"), [(20, 29)] * 12
    with OpenModel(folder, policy, RunOptions(scratch=folder, threads=1)) as opened:
        needed = opened.need(sizes).scratch + MARGIN_NBYTES
    options = LaunchOptions(scratch=tmp_path, device="cpu", policy=policy, memory=4 * 10**9)
    for free in (needed, needed - 1):
        with monkeypatch.context() as patch:
            patch.setattr(launching.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
            if free == needed:
                assert prepare(folder, shape, sizes, options).blocks == (12,)
                check_space(tmp_path, needed - MARGIN_NBYTES)
                continue
            with pytest.raises(BudgetError, match="in scratch files"):
                prepare(folder, shape, sizes, options)


@pytest.mark.cgroup
@pytest.mark.parametrize("compress", ["none", "weights,cache"])
def test_a_job_keeps_to_its_memory(model, tmp_path, compress):
    """`offload run` on a ragged job, under a control group of exactly its limit; page cache counts there, so the
    process's own peak is what is compared."""
    folder, _ = model
    dice = random.Random(4)
    lines = [
        {"prompt": [dice.randrange(4, 2000) for _ in range(length)], "max_tokens": 3}
        for length in [300] * 4 + [40] * 20 + [200] * 6
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = int(run_python("-c", _BASE).stdout)
    limit = base + 48 * 2**20 + 85 * MB  # the interpreter, its margin, and less than half of what it would like
    command = [sys.executable, REPOSITORY / "bench/offload/workers/job.py"]
    command += [json.dumps({"scratch": str(tmp_path / "scratch"), "threads": 2}), folder, "-i", tmp_path / "in.jsonl"]
    command += ["-o", tmp_path / "out.jsonl", "--memory", limit, "--compress", compress, "--json", "--device", "cpu"]
    try:
        with MemoryGroup(limit) as group:
            done = subprocess.run(group.entering([*map(str, command)]), capture_output=True, text=True, check=False)
            kills = group.kills
    except GroupError as error:
        pytest.skip(str(error))
    assert kills == 0
    assert done.returncode == 0, done.stderr
    document = document_of(done)
    assert document["measured"]["new_tokens"] == 3 * len(lines)
    assert document["measured"]["peak_rss_bytes"] <= limit
    tiers, planned = document["measured"]["tiers"], document["predicted"]["tiers"]
    assert 0 < tiers["device"] + tiers["cpu"] <= 85 * MB + 16 * MB
    assert set(planned) == {"device", "cpu", "disk"}


_BASE = """
from flashllm.base.machine import process_nbytes
from flashllm.offload import cli_run, model_text
from flashllm.offload.jobs import job, results
from flashllm.offload.launch import load_search
load_search()
print(process_nbytes())
"""
