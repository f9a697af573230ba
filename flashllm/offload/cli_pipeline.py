"""`flashllm offload run` over several processes: `torchrun --nproc-per-node N -m flashllm offload run MODEL ...`.

Every process holds its share of the layers. The last one reads the job, chooses tokens and writes answers; the others
serve it. Which one a process is, it learns from torchrun (pipeline/place.py).
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashllm.base.command_line import say
from flashllm.base.text import one_line
from flashllm.errors import INTERRUPTED, FlashError, UsageError
from flashllm.offload.pipeline.place import LOOPBACK

if TYPE_CHECKING:
    from flashllm.offload.jobs.blocks import Size
    from flashllm.offload.launch import Launch, LaunchOptions
    from flashllm.offload.model_text import ModelText
    from flashllm.offload.pipeline.place import Place
    from flashllm.offload.pipeline.ring import Ring
    from flashllm.offload.pipeline.stage_runner import PipelineRunner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "pipeline",
        "Started by torchrun, the processes share the layers; the last one reads IN and writes OUT. --memory is each "
        "process's. Connections are neither encrypted nor authenticated: use a private network.",
    )
    group.add_argument(
        "--listen", default=LOOPBACK, metavar="ADDRESS", help="of this machine, for the others (default: %(default)s)"
    )


def run(args: argparse.Namespace, place: "Place", options: "LaunchOptions", drive: "Callable[[Ring], int]") -> int:
    """Join the ring; then `drive` it, at the last place, or serve. Errors of any process end all of them."""
    if place.local < place.world and args.listen == LOOPBACK:
        raise UsageError("processes on several machines need --listen with an address of this machine")
    from flashllm.offload.pipeline.ring import meet

    ring: Ring | None = None
    try:
        with meet(place, address=args.listen) as ring:
            return drive(ring) if place.is_last else _serve(args.model, ring, options)
    except (FlashError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if ring is not None and ring.is_waiting:  # in native code, under which an interpreter cannot end
            prefix = "flashllm: " if interrupted else "flashllm: error: "
            print(prefix + one_line(str(error) or "interrupted"), file=sys.stderr, flush=True)
            os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else error.exit_status)
        raise


def open_pipeline(ring: "Ring", model: "ModelText", launch: "Launch", sizes: "Sequence[Size]") -> "PipelineRunner":
    """The model over the ring, its layers split for sequences of these sizes. Errors as `PipelineRunner`."""
    from flashllm.offload.launch import workload_of
    from flashllm.offload.pipeline.stage_runner import PipelineRunner
    from flashllm.offload.stages import split_model

    stages = split_model(model.shape, ring.place.world, workload_of(sizes, max))
    fingerprint = model.fingerprint
    return PipelineRunner(ring, model.path, launch.policy, stages, launch.options, fingerprint=fingerprint)


def _serve(model: str, ring: "Ring", options: "LaunchOptions") -> int:
    from flashllm.offload.launch import memory_limits, run_options
    from flashllm.offload.model_text import ModelText
    from flashllm.offload.pipeline.stage_runner import serve

    opened = ModelText.load(model, say=say)
    _, memory = memory_limits(options)
    serve(ring, opened.path, run_options(options, memory=memory), fingerprint=opened.fingerprint)
    return 0
