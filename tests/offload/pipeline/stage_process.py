"""One process of a pipeline for the tests, made by fork from a process that has imported everything."""

import json
import os
import time
from pathlib import Path

from offload_runs import sequences

from flashllm.errors import FlashError
from flashllm.offload.pipeline.place import Place
from flashllm.offload.pipeline.ring import meet
from flashllm.offload.pipeline.stage_runner import PipelineRunner, serve
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import RunOptions
from flashllm.offload.stages import split


def drive(ring, settings):
    Path(settings["met"]).touch()
    path, scratch = Path(settings["model"]), Path(settings["scratch"])
    policy = Policy.from_json(settings["policy"])
    stages = split(settings["layers"], ring.place.world, head=0.5)
    tokens = []
    with PipelineRunner(ring, path, policy, stages, RunOptions(scratch=scratch, threads=1), fingerprint="1") as runner:
        Path(settings["ready"]).touch()
        for _ in range(settings["blocks"]):
            made = sequences(settings["prompts"], settings["new"])
            measure = runner.run(made)
            tokens.append([list(each.output) for each in made])
    computed = sum(each.busy["compute"] for each in runner.stage_measures)
    assert measure.busy["compute"] == computed > 0
    return {"tokens": tokens, "new_tokens": measure.new_tokens, "stages": len(runner.stage_measures)}


def main(settings, out, environment):
    """Be the process of this environment; write what came of it to `out`."""
    os.environ.update(environment)
    place = Place.from_torchrun()
    try:
        with meet(place, timeout_s=settings["timeout_s"], connect_s=120.0) as ring:
            if place.is_last:
                result = drive(ring, settings)
            else:
                memory = settings["memory"] if place.rank == 0 else None
                options = RunOptions(scratch=Path(settings["scratch"]), threads=1, memory=memory)
                serve(ring, Path(settings["model"]), options, fingerprint=settings["fingerprint"])
                result = {}
    except FlashError as error:
        result = {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
    Path(out).write_text(json.dumps(result))
    os._exit(0)  # a link's thread may still wait for a neighbour that hangs
