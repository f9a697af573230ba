"""A run: the sequences of one block, through the model or a stage of it, as the policy says.

The schedule's squares (a batch, a token, a layer) become tasks; this says what each task does. One layer beyond the
model's stands for the output head, which is loaded and computed like the others. Of a stage of a pipeline, what the
first layer takes comes from the stage before, and what the last one makes goes to the stage after.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.base.files import Closing
from flashllm.base.machine import return_freed_memory
from flashllm.base.processes import OneProcess
from flashllm.errors import FlashError
from flashllm.offload.jobs import sequences as jobs
from flashllm.offload.jobs.measures import BlockMeasure
from flashllm.offload.planner.schedules import Action, Step, schedule
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.device_tier import Need, Sizes
from flashllm.offload.runtime.executor import Executor, Stopped
from flashllm.offload.runtime.opened import OpenModel
from flashllm.offload.runtime.ops import Array as DeviceArray
from flashllm.offload.runtime.ops import Projected
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.runtime.tasks import Task, tasks
from flashllm.offload.runtime.tiers.activations import Activations
from flashllm.offload.runtime.tiers.arrangement import Arrangement, arrange
from flashllm.offload.runtime.tiers.kv import KvCache
from flashllm.offload.runtime.tiers.scratch import Scratch, ScratchFile, open_reader
from flashllm.offload.runtime.tiers.states import RecurrentStates
from flashllm.offload.stages import Stage

Array = NDArray[Any]


class Neighbours(Protocol):
    """The stages before and after this one in a pipeline, which is a ring: the last gives tokens to the first. What is
    given for a batch's token says which places of the batch still run; none: the batch has ended, which a stage passes
    on, and the last one is not told, as it knows. `give` does not wait. `take` waits, and raises PeerLost where the
    giver is gone, Stopped where `ending()` becomes true."""

    def give(self, batch: int, token: int, active: Sequence[int], values: Array) -> None:
        """To the stage after this: hidden states [rows, d_model], or from the last stage token ids [active]."""

    def take(self, batch: int, token: int, ending: Callable[[], bool]) -> tuple[list[int], Array]:
        """From the stage before this: the places that run, and the values."""


class Runner(OneProcess, Closing):
    """A model, or a stage of one, loaded as a policy says, ready to run blocks of sequences. A context manager.

    A forked child cannot use it: `run` raises UsageError there, and `close` does nothing.

    Raises BudgetError where weights and working memory exceed the limits, FlashIOError where the scratch folder cannot
    hold what the policy puts on disk, and what `open_weights` raises.
    """

    def __init__(self, model: Path, policy: Policy, options: RunOptions, *, stage: Stage | None = None) -> None:
        super().__init__()
        self.policy, self.options = policy, options
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        self._reader = open_reader()
        if options.memory is not None:
            return_freed_memory()
        with ExitStack() as parts:  # what is open is closed where something fails
            self._opened = opened = parts.enter_context(OpenModel(model, policy, options, stage=stage))
            self.block, self.stage, self.num_layers = opened.block, opened.source.stage, opened.source.num_layers
            self._ops, self._attention = opened.tier.ops, opened.attention
            self.states_dtype = np.dtype(self._ops.storage)  # of hidden states
            opened.check(None)
            files = parts.enter_context(Scratch(options.scratch, opened.plan.scratch_nbytes))
            store = opened.tier.open_weights(
                opened.source, opened.plan, pool=opened.pool, scratch=files, reader=self._reader
            )
            self._weights = parts.enter_context(store)
            self.notices = self._weights.notices
            self._parts = parts.pop_all()

    def run(
        self,
        sequences: Sequence[jobs.Sequence],
        progress: Callable[[int], None] | None = None,
        neighbours: Neighbours | None = None,
    ) -> BlockMeasure:
        """Run every sequence to its end. `progress` is called with the new tokens so far, from a worker.

        A stage needs its `neighbours`; only the last one chooses tokens, and all must be given the same prompts.
        Raises BudgetError where they do not fit the memory left, FlashIOError, Stopped after `stop`, PeerLost.
        """
        self.check_process()
        unfinished = [sequence for sequence in sequences if not sequence.finished]
        if not unfinished:
            return BlockMeasure()
        if neighbours is None and not (self.stage.is_first and self.stage.is_last):
            raise ValueError("a stage of a pipeline needs its neighbours")
        return _Run(self, unfinished, progress or (lambda count: None), neighbours).execute()

    @property
    def peak_device_nbytes(self) -> int | None:
        """Most bytes taken of an accelerator's memory so far; None where there is none."""
        return self._opened.tier.peak_nbytes

    def need(self, sizes: Sizes) -> Need:
        """Bytes that sequences take of each tier, the weights included: (prompt tokens, cached positions) each."""
        return self._opened.need(sizes)

    def fits(self, sizes: Sizes) -> bool:
        return self._opened.fits(sizes)

    def stop(self, error: FlashError | None = None) -> None:
        """End the run under way, which raises `error`, or Stopped. Any thread may call it."""
        with self._lock:
            if self._executor is not None:
                self._executor.stop(error)

    def close(self) -> None:
        if not self.in_child:
            self._parts.close()


def sizes_of(sequences: Sequence[jobs.Sequence]) -> list[tuple[int, int]]:
    """Prompt tokens, and positions that the cache holds at most, of each sequence."""
    return [(len(sequence.prompt), sequence.max_length - 1) for sequence in sequences]


class _Batch:
    """A batch's sequences, and which of them still run."""

    def __init__(self, members: Sequence[jobs.Sequence]) -> None:
        self.members = members
        self.active = [row for row, sequence in enumerate(members) if not sequence.finished]

    def positions(self, token: int) -> list[int | None]:
        """Places of each member's token number `token` > 0; None for those that have ended."""
        active = set(self.active)
        return [
            len(sequence.prompt) + token - 1 if row in active else None for row, sequence in enumerate(self.members)
        ]


class _Run:
    """One block of sequences, under way."""

    def __init__(
        self,
        runner: Runner,
        sequences: Sequence[jobs.Sequence],
        progress: Callable[[int], None],
        neighbours: Neighbours | None,
    ) -> None:
        self.r, self._progress, self._neighbours = runner, progress, neighbours
        self._last_layer = runner.num_layers if runner.stage.is_last else runner.num_layers - 1
        policy, block = runner.policy, runner.block
        sizes = sizes_of(sequences)
        self._arrangement: Arrangement = arrange(sizes, policy)
        gbs = policy.gpu_batch
        self._batches = [_Batch(sequences[first : first + gbs]) for first in range(0, len(sequences), gbs)]
        self._tokens = max(sequence.options.max_new_tokens for sequence in sequences)
        self._new_tokens = 0
        self._began = self._prefilled = 0.0
        self._is_ending: Callable[[], bool] = lambda: False
        self._measure = BlockMeasure(prompt_tokens=sum(len(sequence.prompt) for sequence in sequences))
        runner._opened.check(sizes)
        self._measure.tiers = asdict(runner.need(sizes))
        kv_disk = KvCache.disk_nbytes(runner._attention, self._arrangement)
        itemsize = runner._ops.storage.itemsize
        hidden_disk = Activations.disk_nbytes(self._arrangement, width=block.d_model, itemsize=itemsize)
        self._scratch = Scratch(runner.options.scratch, kv_disk + hidden_disk)
        self._disk: ScratchFile | None = None
        with ExitStack() as parts:  # closed where something fails; else `execute` closes it
            parts.enter_context(self._scratch)
            if kv_disk + hidden_disk:
                self._disk = self._scratch.create("run", kv_disk + hidden_disk, runner._reader)
            self._kv = runner._opened.tier.open_cache(runner._attention, sizes, policy, disk=self._disk)
            self._activations = Activations(
                self._arrangement, runner._ops, width=block.d_model, disk=self._disk, offset=kv_disk
            )
            self._recurrent = RecurrentStates(runner._opened.layers, self._arrangement)
            parts.pop_all()

    def execute(self) -> BlockMeasure:
        weights = self.r._weights
        read = weights.bytes_read
        policy = self.r.policy
        # Where nothing moves there is nothing to overlap, and handing tasks to workers would only cost.
        moves = policy.uses_cpu or policy.uses_disk or self._neighbours is not None
        with self._scratch, Executor(self._work, overlap=policy.overlap and moves) as executor:
            with self.r._lock:
                self.r._executor = executor
            self._is_ending = lambda: executor.is_ending
            self._began = self._prefilled = time.perf_counter()
            try:
                executor.run(tasks(self._steps(), buffers=self.r._weights.plan.staging_buffers))
            finally:
                with self.r._lock:
                    self.r._executor = None
                self._is_ending = lambda: True  # not the executor, which has this: no cycle keeps the cache's memory
            ended = time.perf_counter()
            measure = self._measure
            measure.prefill_s, measure.decode_s = self._prefilled - self._began, ended - self._prefilled
            measure.new_tokens = self._new_tokens
            measure.bytes_read = weights.bytes_read - read + (self._disk.bytes_read if self._disk else 0)
            measure.bytes_written = self._disk.bytes_written if self._disk else 0
            measure.busy = {str(action): seconds for action, seconds in executor.busy_s.items()}
            return measure

    @property
    def _is_over(self) -> bool:
        return not any(batch.active for batch in self._batches)

    def _steps(self) -> Iterator[Step]:
        """The schedule, up to where every sequence has ended."""
        batches, layers = len(self._batches), self._last_layer + 1
        group = batches if self._neighbours is None else self.r.policy.num_batches
        for step in schedule(batches=batches, tokens=self._tokens, layers=layers, group=group):
            if self._is_over:
                return
            yield step

    def _work(self, task: Task) -> None:
        with self.r._ops.task():
            self._do(task)

    def _do(self, task: Task) -> None:
        step = task.step
        if self._is_over:  # handed out before the last sequence ended
            return
        if step.action is Action.LOAD_WEIGHTS:
            self.r._weights.load(step.layer, task.weights)
            return
        batch, is_head = self._batches[step.batch], step.layer == self.r.num_layers
        if step.action is Action.COMPUTE:
            if batch.active:
                self._compute(task, batch)
        elif step.action is Action.LOAD_ACTIVATION:
            if step.layer == 0 and batch.active:
                self._take(step, batch)
            elif batch.active:
                self._activations.load(step.batch, task.square, self._rows_by_tier(step, batch))
        elif step.action is Action.LOAD_CACHE:
            if not is_head and batch.active and self._attends(step):
                self._kv.load(task, batch.positions(step.token))
        elif is_head or not batch.active:
            return
        elif step.action is Action.STORE_ACTIVATION and step.layer == self._last_layer:
            if self._neighbours is not None:
                states = self.r._ops.to_host(self._activations.take(step.batch, task.square))
                self._neighbours.give(step.batch, step.token, batch.active, states)
        elif step.action is Action.STORE_ACTIVATION:
            self._activations.store(step.batch, self._rows_by_tier(step, batch))
        elif self._attends(step):
            self._kv.store_prompt(task) if step.token == 0 else self._kv.store_step(task)

    def _attends(self, step: Step) -> bool:
        return self.r._attention[step.layer] is not None

    def _take(self, step: Step, batch: _Batch) -> None:
        """Take what the stage before this made of a batch: hidden states, or for the first stage tokens."""
        first = self.r.stage.is_first
        if self._neighbours is None or (first and step.token == 0):
            return
        active, values = self._neighbours.take(step.batch, step.token, self._is_ending)
        if active and first:
            for row, token_id in zip(active, values.tolist(), strict=True):
                batch.members[row].output.append(token_id)
        elif active:
            self._activations.put(step.batch, self.r._ops.from_host(values))
        else:  # passed on at once: where all batches have ended no task follows
            self._neighbours.give(step.batch, step.token, active, values)
        batch.active = active

    def _rows_by_tier(self, step: Step, batch: _Batch) -> tuple[int, int, int]:
        """Rows of a batch's states on the device, the CPU tier and the disk, which follow each other."""
        counts = dict.fromkeys("gcd", 0)
        for row, place in enumerate(self._arrangement.batches[step.batch]):
            if step.token == 0:
                counts[place.hidden_tier] += place.prompt
            elif row in batch.active:
                counts[place.hidden_tier] += 1
        return counts["g"], counts["c"], counts["d"]

    def _compute(self, task: Task, batch: _Batch) -> None:
        step, runner = task.step, self.r
        if step.layer == 0 and step.token > 0:
            self._kv.begin_step(step.batch, step.token, batch.active, self._positions(batch, step.token).tolist())
        embeds = step.layer == 0 and runner.stage.is_first
        x = self._embed(batch, step.token) if embeds else self._activations.take(step.batch, task.square)
        if step.layer == runner.num_layers:
            self._choose(task, batch, x)
            return

        number = runner.stage.first + step.layer
        keep = self._kv.prompt if step.token == 0 else self._kv.decode

        def attend(first: int, made: Projected, out: DeviceArray) -> None:
            keep(task, first, made, out, sinks=weights.vectors.get("sinks"))

        weights, where = runner._weights.layer(step.layer, task.weights), self._positions(batch, step.token)
        states = self._recurrent.lend(step.layer, step.batch, batch.active)
        x = runner._ops.layer(number, weights, x, where, attend, decoding=step.token > 0, states=states)
        self._activations.put(step.batch, x)

    def _positions(self, batch: _Batch, token: int) -> NDArray[np.int64]:
        if token == 0:
            return np.concatenate([np.arange(len(sequence.prompt), dtype=np.int64) for sequence in batch.members])
        return np.array([position for position in batch.positions(token) if position is not None], np.int64)

    def _embed(self, batch: _Batch, token: int) -> DeviceArray:
        if token == 0:
            ids = np.concatenate([np.asarray(sequence.prompt, np.int64) for sequence in batch.members])
        else:
            ids = np.array([batch.members[row].last_token for row in batch.active], np.int64)
        weights = self.r._weights
        return self.r._ops.embed(weights.ends(), weights.embedding_rows(ids), self._positions(batch, token))

    def _choose(self, task: Task, batch: _Batch, x: Array) -> None:
        """The output head, and each sequence's next token."""
        if task.step.token == 0:
            ends = np.cumsum([len(sequence.prompt) for sequence in batch.members]) - 1
            x = self.r._ops.rows(x, ends)
        scores = self.r._ops.logits(self.r._weights.ends(task.weights), x)
        for row, scored in zip(list(batch.active), scores, strict=True):
            batch.members[row].accept(scored)
        self._new_tokens += len(batch.active)
        batch.active = [row for row in batch.active if not batch.members[row].finished]
        if self._neighbours is not None and task.step.token + 1 < self._tokens:
            ids = np.array([batch.members[row].last_token for row in batch.active], np.int64)
            self._neighbours.give(task.step.batch, task.step.token + 1, batch.active, ids)
        if task.step.token == 0:
            self._prefilled = time.perf_counter()
        self._progress(self._new_tokens)


__all__ = ["RunOptions", "Runner", "Stopped"]
