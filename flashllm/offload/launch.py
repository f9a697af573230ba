"""From what a user wants to a runner: limits, methods, a policy that is given or planned. Runs nothing."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashllm.base.machine import available_nbytes, default_limit, num_cores, process_nbytes
from flashllm.base.processes import beside_nbytes
from flashllm.base.units import format_size
from flashllm.base.user_dirs import user_cache_dir
from flashllm.errors import BudgetError, UsageError
from flashllm.offload.accelerators import DEVICES, Device, choose_accelerator, free_nbytes
from flashllm.offload.jobs.blocks import Size, cut, equal, in_blocks
from flashllm.offload.planner.local import load_search, local_hardware, plan_policy, predict_job
from flashllm.offload.planner.packing import PACKED_BITS, PACKING
from flashllm.offload.policy import COMPRESSIBLE, Method, Policy, Workload, compression
from flashllm.offload.runtime.opened import OpenModel
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.runtime.tiers.scratch import MARGIN_NBYTES
from flashllm.offload.shape import ModelShape
from flashllm.offload.stages import split_model
from flashllm.profile.quick import WORTH_NBYTES, take_quick_profile
from flashllm.profile.store import device_of

CACHE_BITS = (4, 8)  # of a compressed number; the first is the default
_METHODS = ("compress_weights", "compress_cache", "attention_sparsity")
_MARGIN_NBYTES = 48 * 2**20  # for the interpreter's own growth: prompts, texts, answers of a block
_LEAST_TO_MEASURE = 256 << 20  # bytes of memory for the operands of products and attention
_STEP_NBYTES = 1 << 20  # by which a plan that was too large is made smaller, besides what was short
_PLANS = 3  # tried for a size of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How a user wants a model run. None: as the policy says, or by default. UsageError for what cannot be."""

    memory: int | None = None  # bytes for everything the process holds; None: four fifths of what is free
    device: Device = "auto"  # what the device tier is: a GPU where torch has one, or the CPU
    gpu_memory: int | None = None  # bytes of the device tier on a GPU; None: all that is free
    policy: Policy | None = None  # None: planned
    compress: frozenset[str] | None = None  # of COMPRESSIBLE
    sparse_attention: float | None = None  # share of the value cache that is read
    cache_bits: int = CACHE_BITS[0]
    weight_bits: int = PACKED_BITS[0]
    overlap: bool | None = None
    threads: int | None = None  # None: one a core
    scratch: Path | None = None  # None: in the user's cache directory
    processes: int = 1  # of a pipeline on this machine, which share what is free of it, and its cores

    def __post_init__(self) -> None:
        for name in ("memory", "gpu_memory", "threads", "processes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be at least 1, not {value!r}")
        if self.device not in DEVICES:
            raise UsageError(f"--device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        compression(self.compress or ())
        if self.sparse_attention is not None and not 0 < self.sparse_attention <= 1:
            raise UsageError(f"sparse_attention must be above 0 and at most 1, not {self.sparse_attention!r}")
        for name, widths in (("cache_bits", CACHE_BITS), ("weight_bits", PACKED_BITS)):
            if getattr(self, name) not in widths:
                among = ", ".join(map(str, sorted(widths)))
                raise UsageError(f"{name} must be one of {among}, not {getattr(self, name)!r}")

    @property
    def methods(self) -> dict[str, Any]:
        """The fields of a `Method` that change answers, whoever says so."""
        policy = self.policy or Method(gpu_batch=1)
        methods: dict[str, Any] = {name: getattr(policy, name) for name in _METHODS}
        if self.compress is not None:
            methods |= compression(self.compress)
        if self.sparse_attention is not None:
            methods["attention_sparsity"] = self.sparse_attention
        return methods

    @property
    def packed_bits(self) -> int | None:
        """The width of compressed weights; None where they are not compressed."""
        return self.weight_bits if self.methods["compress_weights"] else None

    @property
    def scratch_folder(self) -> Path:
        """The folder of scratch files; it may not exist yet."""
        return user_cache_dir() / "scratch" if self.scratch is None else self.scratch

    def answers_depend_on(self, shape: ModelShape) -> dict[str, Any]:
        """The settings that change a model's answers: memory, tiers, batches and threads do not."""
        bits, methods = self.packed_bits, self.methods
        return {
            "weights": [bits, PACKING] if bits or shape.stored else None,
            "cache": ["kivi", self.cache_bits] if methods["compress_cache"] else None,
            "sparse_attention": methods["attention_sparsity"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to be: the policy, the limits it was made for, and its blocks."""

    policy: Policy
    options: RunOptions
    blocks: tuple[int, ...]  # how many of the job's sequences go through the runner at once, in their order
    limit: int  # bytes for everything the process holds


def memory_limits(options: LaunchOptions) -> tuple[int, int]:
    """Bytes that this process may hold, and of them those for the model. BudgetError where nothing is left for it."""
    process = process_nbytes() + beside_nbytes()
    free = process + available_nbytes() // options.processes
    limit = options.memory if options.memory is not None else default_limit(free)
    memory = limit - process - _MARGIN_NBYTES
    if memory <= 0:
        raise BudgetError(
            f"--memory {format_size(limit)} is taken by the interpreter and its libraries ({format_size(process)}, and "
            f"{format_size(_MARGIN_NBYTES)} for their growth): nothing is left for the model; "
            f"give it more than {format_size(limit - memory)}"
        )
    return limit, memory


def profile_drive(model: Path, launch: "Launch", dtype: str | None, *, say: Callable[[str], None]) -> None:
    """Take a quick profile of the drive, where the policy reads from it, so that it can be planned by what the drive
    and products reach. Not of a drive other than the model's: its files are what is read."""
    folder, memory = launch.options.scratch, launch.options.memory or 0
    files = sorted(model.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if (
        not launch.policy.uses_disk
        or not files
        or dtype is None
        or memory < _LEAST_TO_MEASURE
        or files[-1].stat().st_size < WORTH_NBYTES
        or device_of(folder) != device_of(files[-1])
    ):
        return
    if failure := take_quick_profile(files[-1], room=memory, say=say, dtype=dtype, writes_in=folder):
        say(failure)


def prepare(
    model: Path,
    shape: ModelShape,
    sizes: Sequence[Size],
    options: LaunchOptions,
    *,
    stages: int = 1,
    profiles: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Launch:
    """The policy for sequences of these `sizes`, the longest first: the given one, or a planned one; and their blocks.

    Whichever it is, every block is counted as the runtime will, and keeps to the limits: longer sequences come in
    smaller blocks. For a pipeline of `stages` the policy is every stage's, for its share of the layers, with as many
    blocks in flight. With `profiles` the drive of a planned policy that reads is measured, where it has no fresh
    profile, and the policy planned again. `report` gets lines on where a planned policy comes from. BudgetError where
    the limits cannot hold the job.
    """
    if options.policy is None:
        load_search()
    accelerator = find_accelerator(options, stages=stages)
    gpu_memory = options.gpu_memory
    if accelerator is None and gpu_memory is not None:
        raise UsageError("gpu_memory is a GPU's, and the CPU computes here: leave it out; memory limits what it takes")
    if accelerator is not None and gpu_memory is None:  # before memory is counted, of which a GPU's context takes some
        gpu_memory = free_nbytes(accelerator)
    limit, memory = memory_limits(options)
    run = run_options(options, memory=memory, accelerator=accelerator, gpu_memory=gpu_memory)
    job = _Job(model=model, shape=shape, sizes=sizes, options=run, limit=limit)
    if options.policy is not None:
        return job.given(options.policy, stages)
    launch = job.planned() if stages == 1 else job.pipeline(stages)
    if profiles and stages == 1 and accelerator is None:
        known = local_hardware(shape, run)
        profile_drive(model, launch, shape.dtype, say=report)
        if local_hardware(shape, run) != known:
            launch = job.planned()
    counts = "-".join(str(count) for count in sorted({min(launch.blocks), max(launch.blocks)}))
    blocks = f"the job's {len(sizes)} sequences in blocks of {counts}"
    report(f"planned a policy from {local_hardware(shape, run).source}: {describe(launch.policy)}; {blocks}")
    return launch


def run_options(
    options: LaunchOptions, *, memory: int, accelerator: str | None = None, gpu_memory: int | None = None
) -> RunOptions:
    """`options` on this machine, of which the model may take so much. Makes the folder of scratch files."""
    folder = options.scratch_folder
    folder.mkdir(parents=True, exist_ok=True)
    return RunOptions(
        scratch=folder,
        memory=memory,
        disk=max(0, shutil.disk_usage(folder).free - MARGIN_NBYTES) // options.processes,
        accelerator=accelerator,
        gpu_memory=gpu_memory,
        threads=options.threads or max(1, num_cores() // options.processes),
        weight_bits=options.weight_bits,
        cache_bits=options.cache_bits,
        methods=options.methods,
        overlap=options.overlap,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A job to be launched: the sizes of its sequences, and what it may take."""

    model: Path
    shape: ModelShape
    sizes: Sequence[Size]
    options: RunOptions
    limit: int

    def given(self, policy: Policy, stages: int) -> Launch:
        """With the policy that was given, as far as options do not say otherwise. A block that is too large is refused:
        whoever gives a policy says how large it is. Of a pipeline the last stage's share is counted, which is this
        process's; the others count their own."""
        options = self.options
        overlap = policy.overlap if options.overlap is None else options.overlap
        policy = replace(policy, **options.methods, overlap=overlap)
        stage = split_model(self.shape, stages, workload_of(self.sizes, max))[-1]
        counts = equal(len(self.sizes), policy.block_size * stages)
        with OpenModel(self.model, policy, options, stage=stage) as opened:
            opened.check(None)
            for block in in_blocks(self.sizes, counts):
                opened.check(block)
                self._check_disk(opened.need(block).scratch)
        return self._launch(policy, counts)

    def planned(self) -> Launch:
        """With the best of the policies for the longest sequences and for middling ones, by the time of all blocks."""
        middling = workload_of(self.sizes, lambda values: -(-sum(values) // len(values)))
        launches: list[Launch] = []
        refused: list[BudgetError] = []
        for workload in dict.fromkeys((workload_of(self.sizes, max), middling)):
            try:
                launches += self._plans(workload)
            except BudgetError as error:
                refused.append(error)
        if not launches:
            raise refused[0]
        return min(launches, key=self._seconds)

    def _seconds(self, launch: Launch) -> float:
        predicted = predict_job(self.shape, self.options, launch.policy, workloads(self.sizes, launch.blocks))
        return float(predicted["prefill_s"] + predicted["decode_s"])

    def pipeline(self, stages: int) -> Launch:
        """With one policy for all stages, each of which counts again for its own layers."""
        policy = self._plan(workload_of(self.sizes, max), self.options, stages)
        return self._launch(policy, equal(len(self.sizes), policy.block_size * stages))

    def _plan(self, workload: Workload, options: RunOptions, stages: int = 1) -> Policy:
        try:
            return plan_policy(self.shape, workload, options, requests=len(self.sizes), stages=stages)
        except BudgetError as error:
            left = f"--memory {format_size(self.limit)} leaves the model {format_size(options.memory or 0)}"
            raise BudgetError(f"{error}; {left}: give it that much more") from error

    def _plans(self, workload: Workload) -> list[Launch]:
        """The best policies for prompts of one size of which all blocks of the job fit; BudgetError where none is.

        The planner's forms are close to what the runtime counts, and not exact: what a block of its size is short of is
        planned away, for a block that is cut by one sequence may cost as much as two.
        """
        options, found, lacking = self.options, list[Launch](), list[tuple[int, int]]()
        alike = (workload.prompt_len, workload.positions)
        for _ in range(_PLANS):
            try:
                policy = self._plan(workload, options)
            except BudgetError:
                if lacking:
                    break
                raise
            with OpenModel(self.model, policy, self.options) as opened:
                starting = opened.shortage(None)
                # The sequences that take most: of the longest prompt, and of the most positions.
                ends = max(self.sizes), max(self.sizes, key=lambda size: size[1])
                least = _most(starting, *(opened.shortage([size]) for size in ends))
                short = _most(least, opened.shortage([alike] * min(policy.block_size, len(self.sizes))))
                counts = cut(self.sizes, policy.block_size, opened.fits) if max(starting) <= 0 else None
                for block in in_blocks(self.sizes, counts or ()):
                    self._check_disk(opened.need(block).scratch)
            lacking.append(least)
            if counts is not None:
                found.append(self._launch(policy, counts))
            less = [
                size and size - more - _STEP_NBYTES * (more > 0)
                for size, more in zip((options.memory, options.gpu_memory), short, strict=True)
            ]
            if short == (0, 0) or any(size is not None and size <= 0 for size in less):
                break
            options = replace(options, memory=less[0], gpu_memory=less[1])
        if not found:
            raise BudgetError(self._refusal(min(lacking)))
        return found

    def _refusal(self, short: tuple[int, int]) -> str:
        """Say what one sequence takes for which limits are `short` by so much, and what to do."""
        longest = max(positions for _, positions in self.sizes) + 1
        memory, gpu = short
        needs = []
        if memory > 0:
            needs.append(f"--memory {format_size(self.limit + memory)}, not {format_size(self.limit)}")
        if gpu > 0:
            limit = self.options.gpu_memory or 0
            needs.append(f"{format_size(limit + gpu)} of the GPU's memory, not {format_size(limit)}")
        return (
            f"one sequence of up to {longest} tokens needs at least {' and '.join(needs)}; give it that, pack with "
            "--compress weights,cache, or ask for fewer tokens"
        )

    def _launch(self, policy: Policy, blocks: Sequence[int]) -> Launch:
        return Launch(policy=policy, options=self.options, blocks=tuple(blocks), limit=self.limit)

    def _check_disk(self, nbytes: int) -> None:
        options = self.options
        if nbytes > options.disk:
            raise BudgetError(
                f"the policy does not fit: a block puts {format_size(nbytes)} in scratch files, and {options.scratch} "
                f"has room for {format_size(options.disk)}; make room there, give more memory, or another folder from "
                "Python (`scratch` of OffloadEngine)"
            )


def _most(*shortages: tuple[int, int]) -> tuple[int, int]:
    """The largest shortage of memory, and of an accelerator's memory, in bytes; 0 where none is short."""
    memory, gpu = zip(*shortages, strict=True)
    return max(0, *memory), max(0, *gpu)


def workload_of(sizes: Sequence[Size], of: Callable[[list[int]], int]) -> Workload:
    """One size of prompts for many: the maximum, or a mean."""
    prompts, answers = [prompt for prompt, _ in sizes], [positions + 1 - prompt for prompt, positions in sizes]
    return Workload(prompt_len=of(prompts), gen_len=of(answers))


def workloads(sizes: Sequence[Size], blocks: Sequence[int]) -> list[tuple[int, Workload]]:
    """(sequences, their longest prompt and answer) of each block, for the cost model."""
    return [(len(block), workload_of(block, max)) for block in in_blocks(sizes, blocks)]


def find_accelerator(options: LaunchOptions, *, stages: int = 1) -> str | None:
    """Torch's name of the accelerator that is the device tier; None for the CPU. UsageError where it cannot be had."""
    if stages == 1:
        return choose_accelerator(options.device)
    if options.device == "cuda":
        raise UsageError("a pipeline's stages compute on CPUs for now: use --device cpu, or one process for the GPU")
    return None


def describe(policy: Policy) -> str:
    parts = [f"batches of {policy.gpu_batch} sequences, {policy.num_batches} a block"]
    for kind, name in (("w", "weights"), ("c", "cache"), ("h", "activations")):
        parts.append(f"{name} {' + '.join(policy.shares(kind))}")
    compressed = [name for name in COMPRESSIBLE if getattr(policy, f"compress_{name}")]
    if compressed:
        parts.append(f"compressed {' and '.join(compressed)}")
    if not policy.overlap:
        parts.append("one layer in memory at a time")
    return ", ".join(parts)
