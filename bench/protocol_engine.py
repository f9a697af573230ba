"""One engine's part of `protocol.py`, in a process of its own: a prompt and the tokens after it, twice.

    python bench/protocol_engine.py '{"engine": "flashllm", "model": DIR, "prompt": 128, "ids": ...}'

The first time nothing is cached (*cold*), the second time the caches are as the first left them (*warm*). All ids are
given, those behind the prompt too: what is computed depends on no engine's choice of a token. Prints one JSON document.
llama.cpp runs as llama-cpp-python has it, with its own defaults but for the options "repack", "micro_batch" and
"flash_attention" (auto, disabled, enabled).
"""

import ctypes
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flashllm.base.machine import peak_process_nbytes
from flashllm.errors import FlashError

RUNS = ("cold", "warm")
_Step = Callable[[list[int]], dict[str, Any]]


def flashllm(settings: dict[str, Any]) -> dict[str, Any]:
    """This engine, by the same calls as a session's."""
    from flashllm.config import RunConfig
    from flashllm.engine.model import Model

    finite = True
    start = time.perf_counter()
    with Model.open(Path(settings["model"]), RunConfig(**settings["options"])) as model:
        loaded_s, runs = time.perf_counter() - start, []
        for _ in RUNS:
            with model.new_sequence() as sequence:

                def step(ids: list[int], sequence: Any = sequence) -> dict[str, Any]:
                    nonlocal finite
                    model.meter.restart()
                    logits = model.step([(sequence, ids)])
                    times = dataclasses.asdict(model.meter.take())
                    finite = finite and bool(np.isfinite(logits).all())
                    return times

                runs.append(_run(step, settings))
        plan = model.plan
        return {
            "load_s": loaded_s,
            "runs": runs,
            "finite": finite,
            "mode": plan.mode,
            "threads": plan.threads,
            "direct_io": model.direct_io,
            "notices": model.notices,
            "reader": dataclasses.asdict(model.reader),
            "plan": plan.memory.as_dict(),
        }


def llama_cpp(settings: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp over the mapped file."""
    engine: Any = importlib.import_module("llama_cpp")  # has no types
    quiet = engine.llama_log_callback(lambda level, text, data: None)
    engine.llama_log_set(quiet, ctypes.c_void_p(0))
    engine.llama_backend_init()
    start = time.perf_counter()
    model_params = engine.llama_model_default_params()
    # Under a limit the weights stay as the file has them: copies in another order would not fit beside it.
    options = settings["options"]
    model_params.use_extra_bufts = options.get("repack", options["memory"] is None)
    model = engine.llama_model_load_from_file(os.fsencode(settings["model"]), model_params)
    if model is None:
        raise FlashError(f"{settings['model']}: llama.cpp cannot load it")
    params = engine.llama_context_default_params()
    params.n_ctx = len(settings["ids"]) + 1
    params.n_threads = params.n_threads_batch = options["threads"]
    params.n_ubatch = options.get("micro_batch", params.n_ubatch)
    if "flash_attention" in options:
        params.flash_attn_type = getattr(engine, f"LLAMA_FLASH_ATTN_TYPE_{options['flash_attention'].upper()}")
    context = engine.llama_init_from_model(model, params)
    if context is None:
        raise FlashError(f"{settings['model']}: llama.cpp cannot run it")
    loaded_s = time.perf_counter() - start

    def step(ids: list[int]) -> dict[str, Any]:
        before, began = _bytes_read(), time.perf_counter()
        for first in range(0, len(ids), params.n_batch):
            part = ids[first : first + params.n_batch]
            array = (engine.llama_token * len(part))(*part)  # the batch points to it
            if status := engine.llama_decode(context, engine.llama_batch_get_one(array, len(part))):
                raise FlashError(f"llama_decode returned {status}")
        engine.llama_get_logits_ith(context, -1)  # waits for them
        total_ms = 1e3 * (time.perf_counter() - began)
        return {"total_ms": total_ms, "bytes_read": _bytes_read() - before}

    runs = []
    for _ in RUNS:
        engine.llama_memory_clear(engine.llama_get_memory(context), True)
        runs.append(_run(step, settings))
    return {"load_s": loaded_s, "runs": runs, "version": engine.__version__}


def _run(step: _Step, settings: dict[str, Any]) -> dict[str, Any]:
    ids, prompt = settings["ids"], settings["prompt"]
    return {"prompt": step(ids[:prompt]), "tokens": [step([one]) for one in ids[prompt:]]}


def _bytes_read() -> int:
    """Bytes that this process had read from storage so far, those of mapped files included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(fields["read_bytes"])


def main(argv: list[str] | None = None) -> int:
    settings = json.loads((sys.argv[1:] if argv is None else argv)[0])
    try:
        result = (flashllm if settings["engine"] == "flashllm" else llama_cpp)(settings)
    except FlashError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_status
    print(json.dumps({**result, "peak_bytes": peak_process_nbytes()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
