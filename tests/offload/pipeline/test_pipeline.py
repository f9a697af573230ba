"""A pipeline of processes: the tokens of one process, bit for bit; and whoever dies, all end."""

import json
import multiprocessing
import os
import random
import signal
import socket
import time
from contextlib import contextmanager

import offload_runs
import pytest
import stage_process
import torch
from arch_models import VARIANTS, make_checkpoint
from offload_runs import DEVICE, MIXED
from scripts import REPOSITORY, document_of, run_python
from tiny_models import make_tiny_opt

from flashllm.errors import PeerLost
from flashllm.offload.pipeline.place import Place
from flashllm.offload.pipeline.ring import Ring
from flashllm.offload.policy import Policy

LENGTHS, NEW = (1, 7, 63, 64, 65, 100, 3, 130, 20), (20, 3, 9, 20, 1, 12, 5, 20, 2)  # the first end early, batches too
TIMEOUT_S = 4.0
NOTICED_S = 2.0  # a process whose connections the system closes, on a machine that does something else besides


@pytest.fixture(scope="module")
def context():
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["flashllm.offload.pipeline.stage_runner"])  # what takes long to import
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder, layers) by name."""
    root = tmp_path_factory.mktemp("pipeline")
    made = {"opt": (make_tiny_opt(root / "opt", num_layers=5, context=192, dtype="float16"), 5)}
    for name, variant, dtype in (
        ("mixture", "qwen2_moe and a dense layer", "float32"),
        ("llama tied", "llama tied", "bfloat16"),
        ("bloom", "bloom six heads", "float16"),
        ("bitnet", "bitnet tied, biases", "bfloat16"),
        ("qwen3_5", "qwen3_5", "bfloat16"),
    ):
        made[name] = make_checkpoint(root / name, VARIANTS[variant], dtype=dtype), 3
    return made


def policy(place=MIXED, **other):
    return offload_runs.policy(place, place, place, **{"gpu_batch": 2, "num_batches": 2, **other}).to_json()


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 256, (count,), generator=generator).tolist() for count in LENGTHS]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def processes(context, world, tmp_path, model, **settings):
    """Starts a pipeline; gives (processes, the folder of their results)."""
    (tmp_path / "scratch").mkdir(exist_ok=True)
    path, layers = model
    settings = {
        "model": str(path),
        "layers": layers,
        "scratch": str(tmp_path / "scratch"),
        "met": str(tmp_path / "met"),
        "ready": str(tmp_path / "ready"),
        "prompts": prompts(),
        "new": NEW,
        "policy": policy(),
        "blocks": 1,
        "timeout_s": TIMEOUT_S,
        "fingerprint": "1",
        "memory": None,
        **settings,
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    started = [
        context.Process(
            target=stage_process.main, args=(settings, str(tmp_path / f"{rank}.json"), address | {"RANK": str(rank)})
        )
        for rank in range(world)
    ]
    for each in started:
        each.start()
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.join()


def wait_for(path, started):
    while not path.exists():
        assert all(each.is_alive() for each in started)
        time.sleep(0.01)


def results(started, tmp_path, within_s=60.0):
    """What each process wrote; None for one that was killed."""
    ends = time.monotonic() + within_s
    for each in started:
        each.join(max(0.0, ends - time.monotonic()))
        assert not each.is_alive(), "a process did not end"
    paths = [tmp_path / f"{rank}.json" for rank in range(len(started))]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def alone(model, tmp_path, chosen):
    (tmp_path / "alone").mkdir(exist_ok=True)
    return offload_runs.answers(model[0], prompts(), tmp_path / "alone", Policy.from_json(chosen), NEW)


CASES = [
    (2, "llama tied", {}),
    (2, "mixture", {}),
    (2, "bloom", {}),
    (3, "bitnet", {}),
    (3, "qwen3_5", {}),  # stages that keep states alone, and one that attends
    (2, "opt", {"place": DEVICE, "gpu_batch": 9, "num_batches": 1}),
    (3, "opt", {"overlap": False, "compress_weights": True, "compress_cache": True}),
    (4, "opt", {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_processes_give_the_tokens_of_one(context, models, tmp_path, case):
    world, name, other = case
    chosen = policy(**other)
    with processes(context, world, tmp_path, models[name], policy=chosen, blocks=2) as started:
        *others, last = results(started, tmp_path)
    assert others == [{}] * (world - 1)
    expected = alone(models[name], tmp_path, chosen)
    assert last == {"tokens": [expected, expected], "new_tokens": sum(NEW), "stages": world}
    assert not list((tmp_path / "scratch").iterdir())


LONG = {"blocks": 10_000, "new": [50] * len(LENGTHS), "policy": policy(DEVICE)}


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_a_killed_process_ends_all(context, models, tmp_path, world, victim):
    with processes(context, world, tmp_path, models["opt"], **LONG) as started:
        wait_for(tmp_path / "ready", started)
        time.sleep(0.3)
        os.kill(started[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        ends = results(started, tmp_path, TIMEOUT_S)
    assert ends[victim] is None
    for end in ends[:victim] + ends[victim + 1 :]:
        assert end["error"] == "PeerLost"
        assert f"process {victim} of the pipeline ended" in end["message"]
        assert end["at"] - killed < NOTICED_S


@pytest.mark.parametrize("seed", range(5))
def test_a_process_killed_at_any_moment_ends_the_other(context, models, tmp_path, seed):
    moments = random.Random(seed)
    with processes(context, 2, tmp_path, models["opt"], **LONG) as started:
        victim = moments.randrange(2)
        wait_for(tmp_path / "met", started)  # while they connect, the rendezvous has a time-out of its own
        time.sleep(moments.uniform(0, 0.3))
        os.kill(started[victim].pid, signal.SIGKILL)
        ends = results(started, tmp_path, TIMEOUT_S)
    assert ends[1 - victim]["error"] == "PeerLost"


def test_a_process_that_hangs_ends_all_within_the_timeout(context, models, tmp_path):
    """As one whose machine lost its network: nobody closes the connection."""
    with processes(context, 3, tmp_path, models["opt"], timeout_s=1.5, **LONG) as started:
        wait_for(tmp_path / "ready", started)
        os.kill(started[1].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        results([started[0], started[2]], tmp_path, 15.0)
        ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)]
    for end in ends:
        assert end["error"] == "PeerLost"
        assert end["at"] - stopped < 1.5 + NOTICED_S


def test_a_process_that_never_comes_is_given_up_in_time():
    """Lost before the first link, when no pulse could be missed."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"link 0 to 1 .* within 1 s.*reach each other"):
        Ring(Place(rank=0, world=2, local=2), torch.distributed.HashStore(), connect_s=1.0)
    assert time.monotonic() - began < 1 + NOTICED_S


def test_a_failure_is_told_to_all(context, models, tmp_path):
    with processes(context, 3, tmp_path, models["opt"], memory=1000) as started:
        ends = results(started, tmp_path)
    assert [end["error"] for end in ends] == ["BudgetError", "PeerLost", "PeerLost"]
    assert all("process 0 of the pipeline failed: the weights need" in end["message"] for end in ends[1:])


def test_another_model_is_refused(context, models, tmp_path):
    with processes(context, 2, tmp_path, models["opt"], fingerprint="2") as started:
        ends = results(started, tmp_path)
    assert [end["error"] for end in ends] == ["UsageError", "PeerLost"]
    assert all("their files differ" in end["message"] for end in ends)


def test_offload_run_under_torchrun(models, tmp_path):
    path, _ = models["opt"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fields = json.dumps({"policy": policy(DEVICE), "scratch": str(tmp_path / "scratch")})
    asked = enumerate(zip(prompts(), NEW, strict=True))
    lines = [{"custom_id": str(index), "prompt": prompt, "max_tokens": new} for index, (prompt, new) in asked]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [REPOSITORY / "bench/offload/workers/job.py", fields, path, "-i", source, "-o", out, "--json"]
    document = document_of(run_python(*command))
    assert document["measured"]["new_tokens"] == sum(NEW)
    assert document["predicted"] is None
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(int(each["custom_id"]) for each in answers) == list(range(len(lines)))
    used = {each["custom_id"]: each["completion_tokens"] for each in answers}
    assert used == {str(index): new for index, new in enumerate(NEW)}
