"""Table 3's scaling on one machine: the same model over 1, 2 and 4 local processes, in tokens a second.

    python tools/make_dummy_checkpoint.py opt13 --shape opt-1.3b --tokenizer DIR
    python bench/offload/offload_pipeline.py opt13 --batch 16 --prompt 128 --new 32

Every process has `--batch` x `--num-batches` sequences for each stage in flight, as the planner's pipelines have: two
processes answer twice as many sequences as one. What table 3 gains from the memory of more machines one machine cannot
show: the processes share its cores, threads = cores / processes (one at least, so more processes than cores compete),
its memory and its disk. So no gain is expected here. What is measured is what a pipeline costs, which on as many
machines would be its loss: `of_one` is the throughput beside one process's, about 1 at best on the same cores, and
`bubble` the share of a block's time in which the busiest stage did not compute. The last line is one JSON document.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from offload_run import command_line, placement

from flashllm.base.machine import num_cores
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.measures import BlockMeasure
from flashllm.offload.jobs.sequences import Sequence
from flashllm.offload.pipeline.place import Place
from flashllm.offload.pipeline.ring import Ring, meet
from flashllm.offload.pipeline.stage_runner import PipelineRunner, serve
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.runtime.run import Runner, RunOptions
from flashllm.offload.shape import load_shape
from flashllm.offload.stages import split_model

COMPUTE = "compute"  # the activity's name in BlockMeasure.busy
WARM_PROMPT = 2  # tokens of each prompt before the measured ones
TINY = {"batch": 2, "num_batches": 1, "prompt": 9, "new": 4}


def sequences(settings: dict[str, Any], count: int, vocab: int, *, warm: bool = False) -> list[Sequence]:
    """Random prompts; every sequence takes all its tokens. `warm`: short ones, that touch all weights twice."""
    prompt, new = (min(settings["prompt"], WARM_PROMPT), 2) if warm else (settings["prompt"], settings["new"])
    greedy = SamplingOptions(max_new_tokens=new, ignore_eos=True)
    prompts = np.random.default_rng(1).integers(4, vocab, (count, prompt)).tolist()
    return [Sequence(prompt, greedy, decoder=None, end_ids=frozenset()) for prompt in prompts]


def policy_of(settings: dict[str, Any]) -> Policy:
    on_disk = settings["weights_disk"]
    placed = placement("g") | {"wg": 1 - on_disk, "wd": on_disk}
    return Policy(gpu_batch=settings["batch"], num_batches=settings["num_batches"], **placed)


def measured(measure: BlockMeasure, requests: int, compute_s: list[float]) -> dict[str, Any]:
    """A run's figures; `compute_s` of each stage. The prompts' pass gives the first token of each request."""
    seconds = measure.prefill_s + measure.decode_s
    return {
        "prefill_s": measure.prefill_s,
        "decode_s": measure.decode_s,
        "throughput": measure.new_tokens / seconds,
        "decode_throughput": (measure.new_tokens - requests) / measure.decode_s,
        "stage_compute_s": compute_s,
        "bubble": 1 - max(compute_s) / seconds,
        "bytes_read": measure.bytes_read,
    }


def options_of(settings: dict[str, Any]) -> RunOptions:
    return RunOptions(scratch=Path(settings["scratch"]), threads=settings["threads"])


def drive(ring: Ring | None, settings: dict[str, Any]) -> dict[str, Any]:
    """One short block to warm up, one measured, at the last process or the only one."""
    path, options = Path(settings["model"]), options_of(settings)
    policy, shape = policy_of(settings), load_shape(settings["model"])
    stages = 1 if ring is None else ring.place.world
    if ring is None:
        with Runner(path, policy, options) as alone:
            made = sequences(settings, policy.block_size, shape.vocab)
            alone.run(sequences(settings, policy.block_size, shape.vocab, warm=True))
            measure = alone.run(made)
        compute, layers = [measure.busy[COMPUTE]], [shape.layers]
    else:
        split = split_model(shape, stages, Workload(prompt_len=settings["prompt"], gen_len=settings["new"]))
        with PipelineRunner(ring, path, policy, split, options, fingerprint="") as runner:
            made = sequences(settings, stages * policy.block_size, shape.vocab)
            runner.run(sequences(settings, stages * policy.block_size, shape.vocab, warm=True))
            measure = runner.run(made)
        compute = [each.busy[COMPUTE] for each in runner.stage_measures]
        layers = [stage.num_layers for stage in split]
    # The first block's tokens, to compare: the prompts of one process are the first of more.
    tokens = [list(each.output) for each in made[: policy.block_size]]
    result = {"processes": stages, "threads": settings["threads"], "layers": layers, "sequences": len(made)}
    return result | measured(measure, len(made), compute) | {"tokens": tokens}


def stage(settings: dict[str, Any]) -> int:
    """Be one process of a run; the one that drives prints the result."""
    place = Place.from_torchrun()
    if place is None:
        print(json.dumps(drive(None, settings)))
        return 0
    with meet(place) as ring:
        if place.is_last:
            print(json.dumps(drive(ring, settings)))
        else:
            serve(ring, Path(settings["model"]), options_of(settings), fingerprint="")
    return 0


def run(world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One run over `world` processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = settings | {"threads": max(1, num_cores() // world)}
    command = [sys.executable, __file__, "--stage", json.dumps(settings)]
    protocol = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | protocol | {"RANK": str(rank)})
        for rank in range(world)
    ]
    waiting = time.perf_counter()
    outputs = [process.communicate()[0] for process in started]
    print(f"{world} processes took {time.perf_counter() - waiting:.0f} s, starting included", file=sys.stderr)
    if any(process.returncode for process in started):
        raise SystemExit(f"a process of {world} failed")
    result: dict[str, Any] = json.loads(outputs[-1].splitlines()[-1])
    return result


def make_tiny(path: Path) -> Path:
    """A random OPT of five layers."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=300, num_hidden_layers=5, max_position_embeddings=64, **sizes)
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="Hugging Face folder with safetensors")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=16, help="sequences computed at once")
    parser.add_argument("--num-batches", type=int, default=1, help="batches that share a load of weights")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--weights-disk", type=float, default=0.0, help="share of the weights on disk")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="folder for scratch files")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, for a test")
    parser.add_argument("--note", default="", help="conditions to keep with the result")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stage is not None:
        return stage(json.loads(args.stage))
    if (args.model is None) != args.tiny:
        parser.error("give a model, or --tiny")
    names = ("batch", "num_batches", "prompt", "new", "weights_disk")
    settings = {name: getattr(args, name) for name in names} | {"scratch": str(args.scratch)}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            settings |= TINY | {"model": str(make_tiny(Path(folder)))}
        else:
            settings["model"] = args.model
        print(f"roof: {num_cores()} cores, whatever the processes: of_one is about 1 at best", file=sys.stderr)
        rows = []
        for world in args.processes:
            row = run(world, settings)
            row["of_one"] = row["throughput"] / rows[0]["throughput"] if rows else 1.0
            rows.append(row)
            rates = f"{row['throughput']:.4g} tokens/s, {row['decode_throughput']:.4g} decoding"
            shares = f"{row['of_one']:.2f} of the first, bubble {row['bubble']:.0%}"
            how = f"{world} processes x {row['threads']} threads, layers {row['layers']}"
            print(f"{how}: {rates}, {shares}", file=sys.stderr)
    tokens = [row.pop("tokens") for row in rows]
    document = {
        "benchmark": "offload_pipeline",
        "command": command_line(__file__, argv),
        "model": Path(settings["model"]).name,
        "settings": {name: settings[name] for name in names},
        "cores": num_cores(),
        "load_average": os.getloadavg()[0],
        "note": args.note,
        "seconds": time.perf_counter() - started,
        "same_tokens": all(each == tokens[0] for each in tokens),
        "rows": rows,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if document["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
