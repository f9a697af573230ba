"""The two commands of each row of results in bench/README.md, and all of them one after the other, for a night.

    python bench/overnight.py OUT                   every row; a run goes on where it was stopped
    python bench/overnight.py OUT --only olmoe ...  those alone
    python bench/overnight.py OUT --plan            says what would run here, and what is lacking for the others

OUT gets a row's document (NAME.json: the last line that it printed), what it said (NAME.log) and the models, which stay
or, with --discard, go behind the last row that uses them. A row whose NAME.json is there is done. What a machine lacks
(root and a memory control group, room, llama.cpp, files that the row reads and no command makes, which must lie in OUT)
is said, and the row skipped. The last line is one JSON document; exit status 1 where a row failed.
"""

import argparse
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from memory_group import GroupError, MemoryGroup

from flashllm.base.units import format_size, parse_size

REPOSITORY = Path(__file__).resolve().parents[1]
SLACK_NBYTES = 5 << 30  # that stay free on the drive


class Row(NamedTuple):
    """What is measured, by a command that runs in OUT, of models, each made there by a command of MODELS."""

    name: str
    results: tuple[str, ...]  # below bench/: what was measured so
    models: tuple[str, ...]
    measure: str
    needs: tuple[str, ...] = ()  # files in OUT


def _breakdown(model: str, memory: str, more: str = "--engines flashllm --tokens 40") -> str:
    return f"python bench/engine/latency_breakdown.py --model {model} --memory {memory} --cgroup --read-first {more}"


def _both(file: str, memory: str) -> str:
    limit = f" --memory {memory}" if memory else ""
    return f"python bench/protocol.py {file}{limit} --beside llama.cpp"


def _whole(model: str, results: str, limits: str, prompt: int = 512, more: str = "") -> Row:
    """The row of whole_model.py's documents, a file of `model`; `results`: their names, in short."""
    command = f"python bench/peer/whole_model.py {model} --memory {limits} --prompt {prompt}{more}"
    paths = tuple(f"peer/results/whole_{name}.json" for name in results.split())
    return Row(f"whole-{paths[0].removeprefix('peer/results/whole_').removesuffix('.json')}", paths, (model,), command)


def _on(document: str, machines: str) -> str:
    """A document's names: the first machine's, and those of others."""
    return " ".join((document, *(f"{document}_{machine}" for machine in machines.split())))


def _widths(model: str, limits: str) -> str:
    more = "--plan --tokens 24 --prompt 16 --cgroup --read-first"
    return f"python bench/engine/memory_curve.py --model {model} --limits {limits} {more}"


def _batches(more: str) -> str:
    return f"python bench/offload/offload_run.py opt67-8 {more} --peers llama:32 --gguf llama7b-8.gguf"


def _job(memory: str, compress: str, peer: str, gguf: str) -> str:
    shape = f"--sequences 64 --prompt 32 --new 16 --memory {memory}"
    return f"python bench/offload/offload_run.py opt67-32 {shape} --runs --jobs {compress} --peers {peer} --gguf {gguf}"


def _scores(model: str, more: str) -> str:
    return f"python bench/quality/task_scores.py {model} --tasks TASKS --text wiki.test.raw {more}"


_SYNTHETIC = "python tools/make_synthetic_"
_OPT = f"{_SYNTHETIC}model.py"
_GGUF = "python bench/peer/dummy_gguf.py"
_4_BITS = "--encoding int4_32 --resident-encoding int4_32"
_LAYERS = "python tools/make_dummy_checkpoint.py opt67-{0} --shape opt-6.7b --layers {0} --tokenizer flashllm/demo"

# Gigabytes on the drive, of a GGUF file with what is converted of it; the command.
MODELS: Mapping[str, tuple[float, str]] = {
    "opt67": (14, f"{_OPT} opt67 --shape opt-6.7b"),
    "opt67-bf12": (11, f"{_OPT} opt67-bf12 --shape opt-6.7b --encoding bf12 --resident-encoding bf12"),
    "opt67-i8": (8, f"{_OPT} opt67-i8 --shape opt-6.7b --encoding int8_32 --resident-encoding int8_32"),
    "opt67-q4": (4, f"{_OPT} opt67-q4 --shape opt-6.7b {_4_BITS} --predictor-bits 4"),
    "opt67-4": (3, _LAYERS.format(4)),
    "opt67-8": (5, _LAYERS.format(8)),
    "opt67-32": (18, _LAYERS.format(32)),  # with a job's scratch files
    "llama7b-8.gguf": (4, f"{_GGUF} llama-2-7b llama7b-8.gguf --layers 8 --type f16"),
    "llama7b.gguf": (27, f"{_GGUF} llama-2-7b llama7b.gguf --type f16"),
    "llama7b-q4.gguf": (4, f"{_GGUF} llama-2-7b llama7b-q4.gguf --type q4_0"),
    "olmoe.gguf": (9, f"{_GGUF} olmoe-1b-7b olmoe.gguf"),
    "llama-tq2.gguf": (2, f"{_GGUF} llama-2-7b llama-tq2.gguf --type tq2_0"),
    "olmoe-q2.gguf": (4, f"{_GGUF} olmoe-1b-7b olmoe-q2.gguf --type q2_k"),
    "qwen8-q4.gguf": (5, f"{_GGUF} qwen3-30b-a3b qwen8-q4.gguf --layers 8"),
    "dsv2.gguf": (12, f"{_GGUF} deepseek-v2-lite dsv2.gguf"),
    "glm8.gguf": (5, f"{_GGUF} glm-4.7-flash glm8.gguf --layers 8"),
    "nemotron8.gguf": (6, f"{_GGUF} nemotron-3-nano nemotron8.gguf --layers 8"),
    "gemma-e4b.gguf": (10, f"{_GGUF} gemma-4-e4b gemma-e4b.gguf"),
    "gpt-oss.gguf": (25, f"{_GGUF} gpt-oss-20b gpt-oss.gguf --type mxfp4"),
    "q36.gguf": (23, f"{_GGUF} qwen3.6-35b-a3b q36.gguf"),
    "q30.gguf": (21, f"{_GGUF} qwen3-30b-a3b q30.gguf"),
    "qwen8": (12, f"{_SYNTHETIC}experts.py qwen8 --shape qwen3-30b-a3b --layers 8"),
    "qwen8.gguf": (23, f"{_GGUF} qwen3-30b-a3b qwen8.gguf --layers 8 --type bf16"),
    "olmoe16": (14, f"{_SYNTHETIC}experts.py olmoe16 --shape olmoe"),
    "olmoe16.gguf": (28, f"{_GGUF} olmoe-1b-7b olmoe16.gguf --type f16"),
    "llama-q4r": (4, f"{_SYNTHETIC}gated.py llama-q4r --gate rows {_4_BITS}"),
    "llama-relu": (14, f"{_SYNTHETIC}gated.py llama-relu --gate resident"),
    "llama-rows": (14, f"{_SYNTHETIC}gated.py llama-rows --gate rows"),
    "reads.bin": (13, "python bench/io/overlap.py file reads.bin --size 12GiB"),
    "smol32": (1, "flashllm convert smollm2 smol32 --bits 16 --dtype float32"),
    "SMOLLM2": (1, "python bench/quality/folders.py smol32 SMOLLM2"),
    "relu": (1, "flashllm convert RELUFIED relu --dtype bfloat16"),
    "relu-64": (1, "flashllm convert RELUFIED relu-64 --dtype bfloat16"),
    "relu-resident": (1, "flashllm convert RELUFIED relu-resident --gate resident --dtype bfloat16"),
    "relu-4bit": (1, "flashllm convert RELUFIED relu-4bit --gate 4bit --dtype bfloat16"),
}
_SMOLLM2 = ("smol32", "SMOLLM2")
_WIDTHS = ("engine/results/memory_opt-6.7b_widths_zen4.json",)
_PEERS = ("offload/results/offload_peers_2.json",)
_JOBS = ("offload/results/offload_run_whole.json",)
_LLAMA = ("peer/results/report_llama-2-7b.json",)
_OLMOES = _on("olmoe-1b-7b_512", "avx2 avx2_2 avx2_8gb avx2_8gb_2 avx2_8gb_3 avx2_8gb_4 avx512 avx512_8gb zen4 zen5")
_QWEN8 = ("engine/results/breakdown_qwen3_30b_a3b_8layers.json",)
_BOOKS, _WIKI, _C4, _TASKS = "books4.jsonl.gz", "wiki.test.raw", "C4.txt", "TASKS"
_TRAIN = (
    "python predictors/train_predictor.py {0} --data-files c4.jsonl.gz books3.jsonl.gz --samples 96 "
    "--tokens-per-sample 512"
)
_EVALUATE = (
    "python predictors/evaluate.py {0} --text wiki.test.raw books4.jsonl.gz --tokens 4096 --layer-tokens 2048 "
    "--tasks lambada,arc_easy,piqa --tasks-dir TASKS --items 60 --curve --without 0 4 8 16 --samples 32 --plots plots"
)
_JUDGED = ("RELUFIED", "wiki.test.raw", "books4.jsonl.gz", "TASKS")
_TRAINED = ("c4.jsonl.gz", "books3.jsonl.gz", *_JUDGED)
_RELUFIED = "cache/results/predictors_smollm2_relufied"

ROWS = (
    Row("opt-6.7b", ("engine/results/breakdown_opt-6.7b.json",), ("opt67",),
        _breakdown("opt67", "7.0GB", "--engines naive,hybrid,paper,flashllm --tokens 60 --dense-tokens 3")),
    Row("opt-6.7b-first-token",
        (*(f"engine/results/first_token_opt-6.7b{machine}.json" for machine in ("", "_zen5")),), ("opt67",),
        "python bench/engine/first_token.py --model opt67 --memory 7.0GB --cgroup"),
    Row("opt-6.7b-ablation", ("engine/results/ablation_opt-6.7b.json",), ("opt67",),
        "python bench/engine/ablation.py --model opt67 --memory 7.0GB --cgroup --tokens 40 --dense-tokens 4"),
    Row("opt-6.7b-memory", ("engine/results/memory_opt-6.7b.json",), ("opt67",),
        "python bench/engine/memory_curve.py --model opt67 --shares 0.45,0.5,0.6,0.75,1.0 --cgroup --tokens 36"),
    Row("opt-6.7b-long", ("engine/results/long_opt-6.7b.json",), ("opt67",),
        "python bench/engine/long_generation.py --model opt67 --memory 7.0GB --cgroup --tokens 1000"),
    Row("opt-6.7b-16bit", _WIDTHS, ("opt67",), _widths("opt67", "5.5GB,7.0GB")),
    Row("opt-6.7b-12bit", _WIDTHS, ("opt67-bf12",), _widths("opt67-bf12", "5.5GB,7.0GB")),
    Row("opt-6.7b-8bit", _WIDTHS, ("opt67-i8",), _widths("opt67-i8", "4.0GB,5.5GB,7.0GB")),
    Row("opt-6.7b-4bit", _WIDTHS, ("opt67-q4",), _widths("opt67-q4", "2.4GB,4.0GB,5.5GB,7.0GB")),
    Row("opt-6.7b-4bit-breakdown",
        (*(f"engine/results/breakdown_opt-6.7b_4bit_{machine}.json" for machine in ("zen4", "avx512", "zen5")),),
        ("opt67-q4",),
        _breakdown("opt67-q4", "2.4GB")),
    Row("opt-6.7b-report", (*(f"engine/results/report_opt-6.7b_{number}.json" for number in (1, 2)),), ("opt67-q4",),
        "python bench/engine/traced.py protocol opt67-q4 --memory 2.4GB"),
    Row("opt-6.7b-7gb-report", ("peer/results/report_opt-6.7b.json",), ("opt67",),
        "python bench/engine/traced.py protocol opt67 --memory 7.0GB"),
    Row("llama-2-7b", _LLAMA, ("llama7b.gguf",), _both("llama7b.gguf", "7.0GB")),
    Row("llama-2-7b-in-memory", _LLAMA, ("llama7b.gguf",), _both("llama7b.gguf", "")),
    Row("olmoe", ("peer/results/report_olmoe_q4_k_m.json",), ("olmoe.gguf",), _both("olmoe.gguf", "2.4GB")),
    Row("smollm2-report", (*(f"engine/results/report_smollm2_{number}.json" for number in (1, 2)),), (),
        "python bench/protocol.py smollm2 --memory 200MB"),
    Row("olmoe-report", (*(f"engine/results/report_olmoe_{number}.json" for number in (1, 2)),), ("olmoe.gguf",),
        "python bench/protocol.py olmoe.gguf --memory 2.4GB"),
    Row("gpt-oss", ("peer/results/report_gpt-oss-20b.json",), ("gpt-oss.gguf",), _both("gpt-oss.gguf", "6.3GB")),
    _whole("q36.gguf", _on("qwen3.6-35b-a3b", "avx512"), "8GB 12GB 16GB", 2048),
    _whole("dsv2.gguf", _on("deepseek-v2-lite", "zen5"), "5GB 7.8GB", more=" --tokens 32"),
    _whole("gemma-e4b.gguf", _on("gemma-4-e4b", "zen5"), "2.3GB 3.45GB", more=" --tokens 32"),
    _whole("glm8.gguf", _on("glm-4.7-flash_8layers", "avx512 zen5"), "1.6GB 2.4GB", more=" --tokens 32 --rounds 2"),
    _whole("nemotron8.gguf", _on("nemotron-3-nano_8layers", "avx512 zen5"), "1.95GB 2.92GB",
           more=" --tokens 32 --rounds 2"),
    _whole("olmoe.gguf", _OLMOES, "2.4GB 8GB", more=" --rounds 2"),
    _whole("olmoe.gguf", _on("olmoe-1b-7b_2048", "avx2 avx512 avx512_8gb zen4 zen5"), "2.4GB 8GB", 2048, " --rounds 2"),
    _whole("olmoe.gguf", "olmoe-1b-7b_2048_zen5_best", "8GB", 2048,
           " --peer micro_batch=512 micro_batch=2048 repack,micro_batch=2048"),
    _whole("olmoe.gguf", _on("olmoe-1b-7b_4000", "avx2 avx512"), "2.4GB", 4000,
           " --rounds 2"),
    _whole("llama-tq2.gguf", "llama-2-7b_tq2_0_avx512", "4GB", 128, " --tokens 32 --rounds 2"),
    _whole("olmoe-q2.gguf", "olmoe-1b-7b_q2_k_512", "1.6GB", more=" --rounds 3"),
    _whole("q30.gguf", "qwen3-30b-a3b_zen5", "6GB 12GB", more=" --tokens 16"),
    _whole("qwen8-q4.gguf", _on("qwen3-30b-a3b_8layers_8192", "zen5"), "1.7GB", 8192,
           " --tokens 8 --peer micro_batch=2048"),
    _whole("qwen8-q4.gguf", _on("qwen3-30b-a3b_8layers_11000", "avx512 zen5"), "1.7GB", 11000,
           " --tokens 8 --peer micro_batch=2048"),
    Row("qwen3-30b", (*_QWEN8, "engine/results/breakdown_qwen3_30b_a3b_8layers_zen5.json"), ("qwen8",),
        _breakdown("qwen8", "5.4GB")),
    Row("qwen3-30b-llama", _QWEN8, ("qwen8.gguf",), _both("qwen8.gguf", "5.4GB")),
    Row("olmoe-16bit", ("engine/results/breakdown_olmoe.json",), ("olmoe16",), _breakdown("olmoe16", "7.2GB")),
    Row("olmoe-16bit-llama", ("peer/results/peer_olmoe.json",), ("olmoe16.gguf",), _both("olmoe16.gguf", "7.2GB")),
    Row("llama-relu-4bit", ("engine/results/breakdown_llama7b_4bit.json",), ("llama-q4r",),
        _breakdown("llama-q4r", "2.4GB")),
    Row("llama-relu-resident", ("engine/results/breakdown_llama7b_relu_resident.json",), ("llama-relu",),
        _breakdown("llama-relu", "8.8GB")),
    Row("llama-relu", ("engine/results/breakdown_llama7b_relu_half.json",), ("llama-rows",),
        _breakdown("llama-rows", "6.75GB")),
    Row("batches-4-layers", ("offload/results/offload_run.json", "offload/results/offload_run_zen5.json"), ("opt67-4",),
        "python bench/offload/offload_run.py opt67-4 --batch 64 --prompt 32 --new 16 --memory 2.6GB "
        "--runs '16 bit' '4-bit weights and cache'"),
    Row("batches-long", _PEERS, ("opt67-8", "llama7b-8.gguf"),
        _batches("--batch 64 --prompt 128 --new 32 --memory 3.0GB --runs '16 bit'")),
    Row("batches", _PEERS, ("opt67-8", "llama7b-8.gguf"),
        _batches("--batch 64 --prompt 32 --new 8 --memory 2.2GB --runs '16 bit'")),
    Row("batches-4bit", ("offload/results/offload_run_4bit.json",), ("opt67-8", "llama7b-8.gguf"),
        _batches("--sequences 128 --batch 128 --prompt 16 --new 8 --memory 2.6GB --runs '4-bit weights and cache'")),
    Row("batches-whole", _JOBS, ("opt67-32", "llama7b.gguf"), _job("7.0GB", "none", "llama:32", "llama7b.gguf")),
    Row("batches-whole-4bit", _JOBS, ("opt67-32", "llama7b-q4.gguf"),
        _job("2.6GB", "weights,cache", "llama:16", "llama7b-q4.gguf")),
    Row("batches-olmoe",
        (*(f"offload/results/offload_run_olmoe{machine}.json" for machine in ("", "_zen4")),), ("olmoe.gguf",),
        "python bench/offload/offload_run.py olmoe.gguf --sequences 64 --prompt 32 --new 16 --memory 2.4GB --layers 16 "
        "--runs --jobs none --peers llama:64 llama:32 --gguf olmoe.gguf"),
    Row("planner", ("offload/results/run_accuracy.json",), ("opt67-4",),
        "python bench/offload/run_accuracy.py opt67-4"),
    Row("reader", ("io/results/reader_curve.json",), ("reads.bin",),
        "python bench/io/reader.py --file reads.bin --sizes 4KiB,8KiB,16KiB,32KiB,64KiB,128KiB,256KiB --rounds 5 "
        "--stream-sizes 1MiB,4MiB,8MiB --threads 8,32,64 --queue-depths 8,32,64,128"),
    Row("quality", ("quality/results/task_scores_smollm2.json",), _SMOLLM2,
        _scores("SMOLLM2", "--calibration C4.txt --windows 8 --length 512 --out scores.json --items 100 hellaswag=60 "
                "mmlu=57 --names lambada arc_easy piqa hellaswag arc_challenge mmlu --rows transformers dense bfloat16 "
                "bf12+bf12 int8_32+int8_32 'int4_32_min+int4_32_min+int8_32*' int4_32+int4_32+int8_32 int4_32 "
                "+int4_32 int4_32:down 30% '30% sparse' 50% 60% 70% 80%"), (_TASKS, _WIKI, _C4)),
    Row("quality-q4_0", ("quality/results/task_scores_smollm2_q4_0.json",), _SMOLLM2,
        _scores("SMOLLM2", "--names --windows 4 --out q4_0.json --rows dense 'llama.cpp smollm2-q4_0.gguf' "
                "int4_32+int4_32+int8_32"), (_TASKS, _WIKI, "smollm2-q4_0.gguf")),
    Row("quality-cache", ("quality/results/cache_bits_smollm2.json",), _SMOLLM2,
        _scores("SMOLLM2", "--names --windows 12 --length 2048 --out cache.json --rows dense 'dense cache 8' "
                "'dense cache 4'"), (_TASKS, _WIKI)),
    Row("quality-demo", ("quality/results/task_scores_demo.json",), (),
        _scores("flashllm/demo", "--calibration C4.txt --names --windows 8 --length 256 --out demo.json --rows dense "
                "int8_32+int8_32 int4_32+int4_32 int4_32"), (_TASKS, _WIKI, _C4)),
    Row("quality-offload", ("offload/results/offload_quality.json", "offload/results/offload_quality_encodings.json"),
        _SMOLLM2, "python bench/offload/offload_quality.py SMOLLM2 --text wiki.test.raw --windows 8 --length 256 "
        "--calibrate C4.txt", (_WIKI, _C4)),
    Row("quality-offload-paper", ("offload/results/offload_quality_paper.json",), _SMOLLM2,
        "python bench/offload/offload_quality.py SMOLLM2 --text wiki.test.raw --windows 8 --length 256 "
        "--lambada lambada.jsonl --words 100 --rows 0 3", (_WIKI, "lambada.jsonl")),
    Row("predictors-demo", ("cache/results/predictors_demo.json",), (),
        "python predictors/evaluate.py flashllm/demo --text wiki.test.raw books4.jsonl.gz --tokens 10240 "
        "--layer-tokens 4096", (_WIKI, _BOOKS)),
    Row("relufication", ("quality/results/relufication_smollm2.json",), _SMOLLM2,
        "python tools/relufy.py SMOLLM2 RELUFIED --work WORK --text books1.jsonl.gz c4.jsonl.gz books2.jsonl.gz "
        "chat.jsonl --test wiki.test.raw --tokens 1075200 --length 512 --calibration 32 --test-windows 8 --every 25000 "
        "--precision bfloat16", ("books1.jsonl.gz", "c4.jsonl.gz", "books2.jsonl.gz", "chat.jsonl", _WIKI)),
    Row("relufied", (f"{_RELUFIED}.json",), ("relu",), f"{_TRAIN} && {_EVALUATE}".format("relu"), _TRAINED),
    Row("relufied-64", (f"{_RELUFIED}_rank_64.json",), ("relu-64",),
        f"{_TRAIN} --ranks 64 && {_EVALUATE}".format("relu-64"), _TRAINED),
    Row("relufied-gates", (f"{_RELUFIED}_gates.json",), ("relu-4bit",), _EVALUATE.format("relu-4bit"), _JUDGED),
    Row("relufied-naming", ("engine/results/predictor_share_smollm2_relufied.json",),
        ("relu", "relu-4bit", "relu-resident"),
        "python bench/engine/predictor_share.py relu relu-4bit relu-resident --tokens 256 --threads 2", _TRAINED[:3]),
    *(Row(f"{model}-flash", ("engine/results/breakdown_smollm2_relufied.json",), (model,),
          _breakdown(model, "330MB", "--engines flashllm --prompt 64"), ("RELUFIED",))
      for model in ("relu", "relu-4bit", "relu-resident")),
)  # fmt: skip


def block() -> str:
    """The rows' commands as bench/README.md has them; a model's with the first row that uses it."""
    lines, made = [], set[str]()
    for row in ROWS:
        reads = f"; reads {', '.join(row.needs)}" if row.needs else ""
        lines += [f"# {row.name}{reads}", *(MODELS[model][1] for model in row.models if model not in made), row.measure]
        made |= set(row.models)
    return "```sh\n" + "\n".join(lines) + "\n```\n"


def commands(line: str) -> Iterator[list[str]]:
    """A line's commands, for this Python and from any folder: what the repository has by its path."""
    for command in line.split(" && "):
        program, *words = shlex.split(command)
        words = [str(REPOSITORY / word) if "/" in word and (REPOSITORY / word).exists() else word for word in words]
        yield [sys.executable, *(["-m", "flashllm.cli"] if program == "flashllm" else []), *words]


def lacking(row: Row, out: Path) -> list[str]:
    """What this machine has not got for a row."""
    found = [f"{name} in {out}" for name in row.needs if not (out / name).exists()]
    if re.search(r"(beside |peers |')llama|whole_model", row.measure) and not importlib.util.find_spec("llama_cpp"):
        found.append("llama-cpp-python")
    limits = re.search(r"--(?:memory|limits)((?: \S*\d[MG]?B\b)+)", row.measure)
    if limits is not None or "--cgroup" in row.measure:
        try:
            MemoryGroup(64 << 20).close()
        except GroupError as error:
            found.append(str(error))
    if limits is not None:
        most = max(map(parse_size, limits[1].replace(",", " ").split()))
        if most > psutil.virtual_memory().available:
            found.append(f"{format_size(most)} of free memory")
    nbytes = 1e9 * sum(MODELS[model][0] for model in row.models if not (out / model).exists())
    if nbytes and shutil.disk_usage(out).free < nbytes + SLACK_NBYTES:
        found.append(f"{format_size(nbytes + SLACK_NBYTES)} free on the drive")
    return found


def run(row: Row, out: Path) -> str | None:
    """Make what is not there, and measure; the reason where it failed."""
    lines = [*(MODELS[model][1] for model in row.models if not (out / model).exists()), row.measure]
    said = ""
    with (out / f"{row.name}.log").open("w", encoding="utf-8") as log:
        for command in (command for line in lines for command in commands(line)):
            print("+", shlex.join(command), file=log, flush=True)
            done = subprocess.run(command, cwd=out, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
            log.write(said := done.stdout)
            if done.returncode:
                return f"status {done.returncode}; {log.name} says why"
    document = said.rstrip().rpartition("\n")[2]
    try:
        json.loads(document)
    except ValueError:
        return f"its last line is no JSON document; it is in {log.name}"
    part = out / f"{row.name}.json.part"
    part.write_text(document + "\n", encoding="utf-8")
    part.rename(out / f"{row.name}.json")
    return None


def discard(row: Row, later: Sequence[Row], out: Path) -> None:
    """Remove the models that no later row uses."""
    for model in set(row.models) - {model for one in later for model in one.models}:
        path = out / model
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="ROW")
    parser.add_argument("--plan", action="store_true", help="run nothing")
    parser.add_argument("--discard", action="store_true", help="remove each model behind the last row that uses it")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if args.only is None or row.name in args.only]
    ended: dict[str, str] = {}
    for number, row in enumerate(rows):
        if (out / f"{row.name}.json").exists():
            ended[row.name] = "done before"
        elif lacks := lacking(row, out):
            ended[row.name] = f"skipped: needs {'; '.join(lacks)}"
        elif args.plan:
            ended[row.name] = "would run"
        else:
            start = time.monotonic()
            failed = run(row, out)
            ended[row.name] = f"failed: {failed}" if failed else f"done in {(time.monotonic() - start) / 60:.1f} min"
        print(f"{row.name}: {ended[row.name]}", flush=True)
        if args.discard and not args.plan:
            discard(row, rows[number + 1 :], out)
    print(json.dumps(ended))
    return 1 if any(said.startswith("failed") for said in ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
