"""What llama.cpp does on the same work, batch 1: dummy models of the Llama-2-7B shape and of mixtures of experts.

    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf   # built for this CPU
    python bench/peer/peer_llama.py make llama-7b-f16.gguf
    python bench/peer/peer_llama.py run llama-7b-f16.gguf --memory 7.0GB --tokens 10
    python bench/peer/peer_llama.py run llama-7b-f16.gguf --tokens 30
    python bench/peer/peer_llama.py quantise llama-7b-f16.gguf llama-7b-q4_0.gguf
    python bench/peer/peer_llama.py make olmoe-8.gguf --shape olmoe --layers 8
    python bench/peer/peer_llama.py run olmoe-8.gguf --memory 3.4GB --walk
    python bench/peer/peer_llama.py quantise olmoe.gguf olmoe-q4_k_m.gguf --type q4_k_m

The weights are dummies (13.5 GB; the text means nothing, so tokens go in and out as ids); sizes, reads and times are
real (`same_file.py` runs flashllm on the same file beside it). With --memory the whole process runs in a memory control
group of that size from a cold page cache (needs root); without, the model is first read into memory whole. Either way
the mapped file is llama.cpp's default; --no-mmap holds the weights in memory of the process's own. Prints each token's
time and the bytes read from storage for it; the last line is one JSON document.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import dummy_experts
import memory_group
import numpy as np

from flashllm.base.machine import available_nbytes, num_cores
from flashllm.base.units import format_size, parse_size

LAYERS, HIDDEN, FFN, HEADS, VOCAB, CONTEXT = 32, 4096, 11008, 32, 32000, 4096  # Llama-2-7B
SLACK_NBYTES = 1 << 30  # beside the weights: KV cache, buffers, interpreter


def tensors(layer_count: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, in the order of the file. One-dimensional ones are fp32, the others fp16."""
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN, HIDDEN),
        "attn_v": (HIDDEN, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    layers = [(f"blk.{i}.{name}.weight", shape) for i in range(layer_count) for name, shape in layer.items()]
    ends = [("output_norm.weight", (HIDDEN,)), ("output.weight", (VOCAB, HIDDEN))]
    return [("token_embd.weight", (VOCAB, HIDDEN)), *layers, *ends]


def make_experts(path: Path, shape: dummy_experts.Shape) -> None:
    """Write a mixture of experts of this shape."""
    total = dummy_experts.nbytes(shape)
    if shutil.disk_usage(path.parent).free < total + SLACK_NBYTES:
        raise OSError(f"{path}: {format_size(total)} do not fit on this drive")
    dummy_experts.make(path, shape)


def make(path: Path, layers: int = LAYERS) -> None:
    """Write the model, a tensor in memory at a time; with fewer `layers` for measurements that are scaled."""
    import gguf

    def data(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.ones(shape, np.float32) if len(shape) == 1 else random[: shape[0] * shape[1]].reshape(shape)

    largest = max(np.prod(shape) for _, shape in tensors(layers))
    random = (np.random.default_rng(0).standard_normal(largest, dtype=np.float32) * HIDDEN**-0.5).astype(np.float16)
    total = sum(data(shape).nbytes for _, shape in tensors(layers))
    if shutil.disk_usage(path.parent).free < total + SLACK_NBYTES:
        raise OSError(f"{path}: {format_size(total)} do not fit on this drive")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, shape in tensors(layers):
        dtype = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(name, shape, dtype, data(shape).nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors(layers):
        print(name, file=sys.stderr)
        writer.write_tensor_data(data(shape))
    writer.close()


def quantise(path: Path, out: Path, kind: str) -> None:
    """The model in fewer bits, by llama.cpp's own quantiser."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(out), ctypes.byref(params)):
        raise OSError(f"{path}: llama.cpp cannot quantise it")


def bytes_read() -> int:
    """Bytes this process had read from storage so far, page faults included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def read_whole(path: Path) -> None:
    """Leave the file in the page cache."""
    buffer = bytearray(64 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The run itself, in this process."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    if args.whole and not args.no_mmap:
        read_whole(args.model)
    start = time.perf_counter()
    model_params = llama_cpp.llama_model_default_params()
    if args.no_mmap:
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    model_params.use_extra_bufts = not args.no_repack
    model = llama_cpp.llama_model_load_from_file(os.fsencode(args.model), model_params)
    if model is None:
        raise OSError(f"{args.model}: llama.cpp cannot load it")
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx = args.prompt + args.tokens + 1
    context_params.n_batch = context_params.n_ubatch = args.prompt
    context_params.n_threads = context_params.n_threads_batch = args.threads
    context = llama_cpp.llama_init_from_model(model, context_params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    loaded_s = time.perf_counter() - start

    def decode(ids: list[int]) -> tuple[int, float, int]:
        """(the likeliest next token, seconds, bytes read)."""
        before, began = bytes_read(), time.perf_counter()
        array = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids)))
        if status != 0:
            raise OSError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocab,))
        return int(logits.argmax()), time.perf_counter() - began, bytes_read() - before

    walk = list(range(args.prompt + args.tokens))
    prompt = walk[: args.prompt] if args.walk else np.random.default_rng(1).integers(0, vocab, args.prompt).tolist()
    token, prompt_s, prompt_bytes = decode(prompt)
    times, reads = [], []
    for following in walk[args.prompt :]:
        token, seconds, nbytes = decode([following if args.walk else token])
        times.append(seconds)
        reads.append(nbytes)
        print(f"token {len(times)}: {seconds:.3f} s, {format_size(nbytes)} read", file=sys.stderr, flush=True)
    return {
        "llama_cpp_python": llama_cpp.__version__,
        "load_s": loaded_s,
        "prompt_s": prompt_s,
        "prompt_read_bytes": prompt_bytes,
        "token_s": times,
        "token_read_bytes": reads,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The run in a process of its own, capped where --memory is given; with its summary."""
    command = [sys.executable, __file__, "measure", str(args.model), "--prompt", str(args.prompt)]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads)]
    command += [*(["--no-mmap"] if args.no_mmap else []), *(["--walk"] if args.walk else [])]
    capped = None
    with tempfile.TemporaryFile() as output:
        if args.memory is None:
            needed = args.model.stat().st_size + SLACK_NBYTES
            if available_nbytes() < needed:
                raise OSError(f"{format_size(available_nbytes())} of memory are free, {format_size(needed)} are needed")
            subprocess.run([*command, "--whole"], stdout=output, check=True)
        else:
            capped = memory_group.run_capped(command, args.memory, stdout=output)
            if capped.returncode:
                raise OSError(f"the capped run ended with {capped.returncode} ({capped.kills} kills for the limit)")
        output.seek(0)
        result = json.load(output)
    times = result["token_s"][1:] or result["token_s"]  # the first one follows the prompt's other order of reads
    print(
        f"token: median {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f}), "
        f"{format_size(statistics.median(result['token_read_bytes']))} read; prompt {result['prompt_s']:.2f} s"
    )
    return {
        "benchmark": "peer_llama",
        "weights": "dummy",
        "model_bytes": args.model.stat().st_size,
        "memory": args.memory,
        "mmap": not args.no_mmap,
        "walk": args.walk,
        "prompt": args.prompt,
        "threads": args.threads,
        "token_median_s": statistics.median(times),
        "capped": None if capped is None else asdict(capped),
        **result,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="write the dummy model")
    maker.add_argument("model", type=Path)
    maker.add_argument("--shape", choices=("llama-2-7b", *dummy_experts.SHAPES), default="llama-2-7b")
    maker.add_argument("--layers", type=int, help="fewer than the shape has")
    maker.add_argument("--vocab", type=int, help="of a mixture of experts: another than the shape has")
    quantiser = verbs.add_parser("quantise", help="write a model in fewer bits")
    quantiser.add_argument("model", type=Path)
    quantiser.add_argument("out", type=Path)
    quantiser.add_argument("--type", choices=("q4_0", "q4_k_m", "q8_0"), default="q4_0", help="default: q4_0")
    for verb, summary in (("run", "measure, in a process of its own"), ("measure", "the process that `run` starts")):
        runner = verbs.add_parser(verb, help=summary)
        runner.add_argument("model", type=Path)
        runner.add_argument("--prompt", type=int, default=128, help="tokens")
        runner.add_argument("--tokens", type=int, default=10, help="to generate")
        runner.add_argument("--threads", type=int, default=num_cores(), help="default: cores")
        runner.add_argument("--no-mmap", action="store_true", help="weights in the process's own memory")
        runner.add_argument("--walk", action="store_true", help="tokens 0, 1, 2 ...: see dummy_experts.py")
        if verb == "run":
            runner.add_argument("--memory", type=parse_size, help="limit of everything, page cache included")
        else:
            runner.add_argument("--whole", action="store_true", help="read the file into the page cache first")
            runner.add_argument("--no-repack", action="store_true", help="weights as the file has them: no copies")
    args = parser.parse_args(argv)
    try:
        if args.verb == "make":
            if args.shape == "llama-2-7b":
                make(args.model, args.layers or LAYERS)
                return 0
            shape = dummy_experts.SHAPES[args.shape]
            changed = {"layers": args.layers or shape.layers, "vocab": args.vocab or shape.vocab}
            make_experts(args.model, dataclasses.replace(shape, **changed))
            return 0
        if args.verb == "quantise":
            quantise(args.model, args.out, args.type)
            return 0
        print(json.dumps(run(args) if args.verb == "run" else measure(args)))
        return 0
    except ImportError as error:
        print(f"peer_llama: {error}; pip install llama-cpp-python==0.3.36 gguf", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError, memory_group.GroupError) as error:
        print(f"peer_llama: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
