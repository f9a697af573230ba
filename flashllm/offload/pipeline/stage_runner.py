"""The processes of a pipeline at work: the driver, who has the head and the sequences, and the others, who serve it.

The driver says a plan (the policy, how it is executed, who has which layers), each process loads its layers and
answers; then it says blocks of prompts, one at a time, and each runs its layers for them and answers what that took.
As many blocks of the policy as there are stages are in flight at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flashllm.base.files import Closing
from flashllm.errors import PeerLost, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs import sequences as jobs
from flashllm.offload.jobs.measures import BlockMeasure, Totals
from flashllm.offload.pipeline.ring import Ring, Word
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import Runner, RunOptions
from flashllm.offload.stages import Stage

_VERSION = 3


class PipelineRunner(Closing):
    """A model over the processes of a ring, seen from the last one: like `Runner`. A context manager.

    The ring outlives it. Raises as Runner does for this process's part, and PeerLost, with its message, where another
    process fails.
    """

    def __init__(
        self, ring: Ring, model: Path, policy: Policy, stages: Sequence[Stage], options: RunOptions, *, fingerprint: str
    ) -> None:
        """`fingerprint` is of the model: a process with another one fails."""
        if len(stages) != ring.place.world or not ring.place.is_last:
            raise ValueError(f"{len(stages)} stages, and process {ring.place.rank} of {ring.place.world} to drive them")
        self.policy, self._ring = policy, ring
        self.stage_measures: list[BlockMeasure] = []  # of the last block, in the order of the stages
        ring.say(
            {
                "word": "plan",
                "version": _VERSION,
                "fingerprint": fingerprint,
                "policy": policy.to_json(),
                "options": options.bits,
                "stages": [asdict(stage) for stage in stages],
            }
        )
        self._runner = _open(ring, model, policy, stages[-1], options)
        try:
            ready = _answer(ring, "ready")
        except BaseException:
            self._runner.close()
            raise
        self.notices = [*ready["notices"], *_notices(ring, self._runner)]

    @property
    def peak_device_nbytes(self) -> int | None:
        """As `Runner.peak_device_nbytes`, of this process."""
        return self._runner.peak_device_nbytes

    def run(self, sequences: Sequence[jobs.Sequence], progress: Callable[[int], None] | None = None) -> BlockMeasure:
        """As `Runner.run`; `busy` and bytes are the sums over all stages."""
        unfinished = [sequence for sequence in sequences if not sequence.finished]
        if not unfinished:
            return BlockMeasure()
        prompts = [sequence.prompt.tolist() for sequence in unfinished]
        new = [sequence.options.max_new_tokens for sequence in unfinished]
        self._ring.say({"word": "block", "prompts": prompts, "max_new_tokens": new})
        measure = _run(self._ring, self._runner, unfinished, progress)
        done = _answer(self._ring, "done")
        self.stage_measures = [*(BlockMeasure(**each) for each in done["measures"]), measure]
        totals = Totals()
        for each in self.stage_measures:
            totals.add(each, 0)
        return replace(measure, busy=totals.busy, bytes_read=totals.bytes_read, bytes_written=totals.bytes_written)

    def stop(self) -> None:
        """End the block under way, which raises Stopped; the ring cannot be used after it. Any thread may call it."""
        self._runner.stop()

    def close(self) -> None:
        self._runner.close()


def serve(ring: Ring, model: Path, options: RunOptions, *, fingerprint: str) -> None:
    """Be a stage other than the last until the driver ends the ring, with packed numbers as wide as the driver's, for
    answers depend on them. Errors as Runner's, and PeerLost."""
    plan = ring.hear()
    if plan is None:
        return
    _pass_on(ring, plan)
    if plan.get("word") != "plan" or plan.get("version") != _VERSION:
        raise PeerLost("the driver of the pipeline is of another version of flashllm; use one on all machines")
    if plan["fingerprint"] != fingerprint:
        raise UsageError(f"{model}: is not the model that the driver of the pipeline has; their files differ")
    stage = Stage(**plan["stages"][ring.place.rank])
    options = replace(options, **plan["options"])
    policy = Policy.from_json(plan["policy"])
    with _open(ring, model, policy, stage, options) as runner:
        before = _answer(ring, "ready") if ring.place.rank else {"word": "ready", "notices": []}
        ring.say(before | {"notices": [*before["notices"], *_notices(ring, runner)]})
        while (block := ring.hear()) is not None:
            _pass_on(ring, block)
            sequences = [
                jobs.Sequence(prompt, SamplingOptions(max_new_tokens=new), decoder=None, end_ids=frozenset())
                for prompt, new in zip(block["prompts"], block["max_new_tokens"], strict=True)
            ]
            measure = _run(ring, runner, sequences, None)
            before = _answer(ring, "done") if ring.place.rank else {"word": "done", "measures": []}
            ring.say(before | {"measures": [*before["measures"], asdict(measure)]})


def _pass_on(ring: Ring, word: Word) -> None:
    if ring.place.next != ring.place.world - 1:
        ring.say(word)


def _answer(ring: Ring, word: str) -> Word:
    """The answer of the process before this to a word."""
    heard = ring.hear()
    if heard is None or heard.get("word") != word:
        raise PeerLost(f"process {ring.place.previous} of the pipeline did not answer as one of this version does")
    return heard


def _open(ring: Ring, model: Path, policy: Policy, stage: Stage, options: RunOptions) -> Runner:
    runner = Runner(model, policy, options, stage=stage)
    ring.dtype, ring.width = runner.states_dtype, runner.block.d_model
    return runner


def _run(
    ring: Ring, runner: Runner, sequences: Sequence[jobs.Sequence], progress: Callable[[int], None] | None
) -> BlockMeasure:
    ring.on_failure(runner.stop)
    return runner.run(sequences, progress, ring)


def _notices(ring: Ring, runner: Runner) -> list[str]:
    return [f"process {ring.place.rank}: {notice}" for notice in runner.notices]
