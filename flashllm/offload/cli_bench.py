"""`flashllm offload bench MODEL`: prefill and decoding speeds over prompt lengths, new tokens and batches.

The table is that of llama.cpp's batched-bench, so that the two can be laid side by side: PP prompt tokens of each of B
sequences, TG new tokens, N_KV positions in the cache at the end; T seconds, S tokens a second.
"""

import argparse
import dataclasses
import itertools
import json
from typing import Any

from flashllm.base.command_line import print_json, say, whole
from flashllm.offload.cli_run import add_engine_arguments, launch_options

_COLUMNS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")


def add_arguments(verbs: Any) -> None:
    """Adds `bench` to the verbs of `flashllm offload`."""
    bench = verbs.add_parser(
        "bench",
        help="prefill and decoding speeds over batches",
        description="Runs made-up prompts through the model and prints a row for every combination of sizes.",
    )
    bench.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a flashllm directory or a hub id")
    bench.add_argument("--prompt-len", type=_sizes, default=[128], metavar="S,…", help="prompt tokens (default: 128)")
    bench.add_argument("--gen-len", type=_sizes, default=[32], metavar="N,…", help="new tokens (default: 32)")
    bench.add_argument("--batch", type=_sizes, default=[1, 8, 32], metavar="B,…", help="sequences (default: 1,8,32)")
    bench.add_argument("--json", action="store_true", help="one JSON document on standard output")
    add_engine_arguments(bench)
    bench.set_defaults(offload_main=main)


def main(args: argparse.Namespace) -> int:
    """Measure, a row at a time."""
    from flashllm.errors import UsageError
    from flashllm.offload.launch import open_runner, prepare, profile_drive
    from flashllm.offload.model_text import ModelText
    from flashllm.offload.policy import Workload

    options = launch_options(args)
    model = ModelText.load(args.model)
    longest = Workload(prompt_len=max(args.prompt_len), gen_len=max(args.gen_len))
    if longest.full_context > model.encoder.context:
        raise UsageError(f"{longest.full_context} positions are more than the model's {model.encoder.context}")
    size = longest.prompt_len, longest.full_context - 1
    if not args.no_profile:
        profile_drive(model.path, model.shape, options, say=say)
    launch = prepare(model.path, model.shape, [size] * max(args.batch), options, report=say)
    rows = []
    with open_runner(model.path, launch, options) as runner:
        if not args.json:
            print("|" + "|".join(f"{name:>9s}" for name in _COLUMNS) + "|", flush=True)
        for sizes in itertools.product(args.prompt_len, args.gen_len, args.batch):
            row = _row(runner, model.encoder.vocab, *sizes)
            rows.append(row)
            if not args.json:
                print("|" + "|".join(_cell(row[name]) for name in _COLUMNS) + "|", flush=True)
    if args.json:
        document = {"policy": launch.policy.to_json(), "options": _plain(options), "rows": rows}
        print_json(document)
    return 0


def _row(runner: Any, vocab: int, prompt_len: int, gen_len: int, batch: int) -> dict[str, Any]:
    """One block. Its prompts are arbitrary ids: their products take as long as those of any text."""
    import numpy as np

    from flashllm.generate.sampling import SamplingOptions
    from flashllm.offload.jobs.sequences import Sequence

    ids = np.random.default_rng(prompt_len).integers(0, vocab, (batch, prompt_len))
    sampling = SamplingOptions(max_new_tokens=gen_len, ignore_eos=True)
    measure = runner.run([Sequence(prompt.tolist(), sampling, decoder=None, end_ids=frozenset()) for prompt in ids])
    prompts, new = batch * prompt_len, batch * (gen_len - 1)  # the prompt's pass gives the first new token
    seconds = measure.prefill_s + measure.decode_s
    return {
        "PP": prompt_len,
        "TG": gen_len,
        "B": batch,
        "N_KV": batch * (prompt_len + gen_len),
        "T_PP s": measure.prefill_s,
        "S_PP t/s": _rate(prompts, measure.prefill_s),
        "T_TG s": measure.decode_s,
        "S_TG t/s": _rate(new, measure.decode_s),
        "T s": seconds,
        "S t/s": _rate(batch * (prompt_len + gen_len), seconds),
        "throughput": _rate(batch * gen_len, seconds),
        "busy": measure.busy,
        "bytes_read": measure.bytes_read,
        "bytes_written": measure.bytes_written,
    }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _cell(value: float) -> str:
    return f"{value:9d}" if isinstance(value, int) else f"{value:9.4g}"


def _sizes(text: str) -> list[int]:
    """An argument like 1,8,32."""
    return [whole(1)(part) for part in text.split(",")]


def _plain(options: Any) -> dict[str, Any]:
    """The options as JSON has them."""
    fields = dataclasses.asdict(options) | {"policy": None}
    text = json.dumps(fields, default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value))
    return dict(json.loads(text))
