"""One run of a peer in a process of its own, for offload_run.py: settings in, results out.

`accelerate`: transformers over weights that accelerate reads from disk for each step; with `device`, computed there,
from the disk or from memory. `llama`: llama.cpp's batched decoding over a mapped file of the Llama-2-7B shape
(bench/peer/dummy_gguf.py makes it), whose layers have as many weights as OPT-6.7B's; it has no OPT. Tokens go in and
out as ids: the weights are dummies.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flashllm.base.machine import num_cores


def accelerate(settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of the prompts' pass and of the steps after it, each the difference of two calls of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_cores())
    with tempfile.TemporaryDirectory(dir=settings["scratch"]) as folder:
        dtype, on = getattr(torch, settings["dtype"]), settings.get("device")
        if on is None:  # computed by the CPU
            model = AutoModelForCausalLM.from_pretrained(
                settings["model"], dtype=dtype, device_map={"": "disk"}, offload_folder=folder
            )
        else:
            from accelerate import cpu_offload, disk_offload

            model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
            if settings["weights"] == "memory":
                cpu_offload(model, execution_device=torch.device(on))
            else:
                disk_offload(model, folder, execution_device=torch.device(on))
        generator = torch.Generator().manual_seed(1)
        vocab = model.config.vocab_size
        prompts = torch.randint(4, vocab, (settings["batch"], settings["prompt"]), generator=generator).to(on or "cpu")

        def seconds(new: int) -> float:
            started = time.perf_counter()
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
            )
            return time.perf_counter() - started

        prefill_s = seconds(1)
        return {"prefill_s": prefill_s, "decode_s": seconds(settings["new"]) - prefill_s}


def llama(settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of the prompts' pass, `ubatch` tokens at once, and of the steps after it, a token of each sequence."""
    import llama_cpp

    batch, prompt, new = settings["batch"], settings["prompt"], settings["new"]
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    choices = llama_cpp.llama_model_default_params()
    choices.use_extra_bufts = False  # no copy of the weights in another order: under a limit it would not live
    model = llama_cpp.llama_model_load_from_file(os.fsencode(settings["gguf"]), choices)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = batch * (prompt + new)
    params.n_batch = params.n_ubatch = settings["ubatch"]
    params.n_seq_max = batch
    params.n_threads = params.n_threads_batch = num_cores()
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise OSError("llama.cpp cannot make its context")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    room = llama_cpp.llama_batch_init(settings["ubatch"], 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, wants logits) of each row."""
        room.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            room.token[i], room.pos[i], room.n_seq_id[i] = token, position, 1
            room.seq_id[i][0], room.logits[i] = sequence, wants
        status = llama_cpp.llama_decode(context, room)
        if status != 0:
            raise OSError(f"llama_decode returned {status}")

    prompts = np.random.default_rng(1).integers(4, vocab, (batch, prompt)).tolist()
    together = max(settings["ubatch"] // prompt, 1)
    next_ids: list[int] = []
    started = time.perf_counter()
    for first in range(0, batch, together):
        members = range(first, min(first + together, batch))
        decode([(prompts[s][i], i, s, i == prompt - 1) for s in members for i in range(prompt)])
        next_ids += [likeliest(llama_cpp, context, (row + 1) * prompt - 1, vocab) for row in range(len(members))]
    prefilled = time.perf_counter()
    for step in range(new - 1):
        decode([(token, prompt + step, sequence, True) for sequence, token in enumerate(next_ids)])
        next_ids = [likeliest(llama_cpp, context, row, vocab) for row in range(batch)]
    return {"prefill_s": prefilled - started, "decode_s": time.perf_counter() - prefilled}


def likeliest(library: Any, context: Any, row: int, vocab: int) -> int:
    return int(np.ctypeslib.as_array(library.llama_get_logits_ith(context, row), (vocab,)).argmax())


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {"accelerate": accelerate, "llama": llama}


def main() -> int:
    settings = json.loads(sys.argv[1])
    times = PEERS[settings["peer"]](settings)
    batch, new = settings["batch"], settings["new"]
    result = {
        **{key: settings[key] for key in ("peer", "batch", "prompt", "new")},
        **times,
        "throughput": batch * new / (times["prefill_s"] + times["decode_s"]),
        "decode_throughput": batch * (new - 1) / times["decode_s"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
