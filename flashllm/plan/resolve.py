"""`resolve` decides everything about a run before anything is loaded.

The one place where a `RunConfig`, a model and the profile of its drive become a `Plan`. Loads no weights.
"""

from dataclasses import dataclass, replace
from functools import partial

from flashllm.base.machine import num_cores
from flashllm.base.units import format_size
from flashllm.config import Mode, RunConfig
from flashllm.errors import BudgetError, UsageError
from flashllm.format.manifest import has_prefetch_predictors
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.format.popularity import Popularity, read_popularity
from flashllm.plan.activity import from_shares
from flashllm.plan.latency import dense_token, prefetch_pays
from flashllm.plan.memory import Conditions, plan_memory
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.profile.choice import choose_reader
from flashllm.profile.costs import ReaderChoice
from flashllm.profile.machine import Profile
from flashllm.profile.store import find_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model will be run."""

    memory: MemoryPlan
    reader: ReaderChoice
    threads: int  # of compute
    mode: Mode
    prefetch: bool  # the next layer's rows are read before its turn
    loads: bool  # where every row has room, what no token wanted yet is read behind those that come
    profile: Profile | None  # the drive's profile; None where it has none
    popularity: Popularity | None  # by which the neuron caches were shared out
    notices: tuple[str, ...]  # what the user should know, a line each
    reasons: tuple[str, ...]  # why the model is run as it is, where there is nothing to do about it


def resolve(config: RunConfig, model: ModelDir, *, available: int, process: int) -> Plan:
    """The plan of a run of `model`.

    Args:
        available: bytes the process could still take (`base.machine.available_nbytes`).
        process: bytes it holds with its libraries loaded and no model (`base.machine.process_nbytes`).

    Raises:
        UsageError: the model cannot run in this mode, or its context is shorter than asked for.
        BudgetError: the memory does not suffice; the message says by how much.
        FormatError, FlashIOError: the popularity file is damaged or cannot be read.
    """
    mode: Mode = config.mode if config.mode is not None else "sparse" if model.manifest.sparse else "dense"
    check_mode(mode, model)
    notices = _sparse_prompts(mode, model) if config.prompts == "sparse" else []
    profile, problem = find_profile(model.rows_file, config.store)
    if problem is not None:
        notices.append(problem)
    reader = choose_reader(
        profile,
        model.manifest.rows.stride,
        io_threads=config.io_threads,
        direct=config.direct,
        io_backend=config.io_backend,
        unpacks=model.manifest.in_place is not None,
    )
    popularity = read_popularity(model.path, model.manifest)
    conditions = Conditions(
        available=available,
        process=process,
        dense=mode == "dense",
        popularity=popularity,
        io_threads=reader.depth,
        max_gap=reader.max_gap,
        prefetch=_names_the_next_layer(mode, model),
    )
    memory_plan = partial(plan_memory, model.manifest, model.block, config)
    try:
        memory = memory_plan(conditions)
    except BudgetError:
        if reader.source != "calibration":
            raise
        # What the profile chose takes more room than the default; no run fails for its profile.
        reader = choose_reader(None, model.manifest.rows.stride, io_threads=None, direct=config.direct)
        conditions = replace(conditions, io_threads=reader.depth, max_gap=reader.max_gap)
        memory = memory_plan(conditions)
    prefetch = memory.prefetch_rows > 0
    if prefetch and profile is not None and profile.direct and config.direct:
        activity = from_shares(model.manifest, memory, popularity, reader.max_gap)
        if not prefetch_pays(model, memory, costs=profile, choice=reader, activity=activity):
            prefetch, memory = False, memory_plan(replace(conditions, prefetch=False))
    if mode == "dense" and not model.architecture.experts:
        notices += _streaming(model, memory, profile)
    notices += _small_cache(model, memory)
    if config.speculate != "off" and model.block.recurrent:
        notices.append("no tokens are drafted: layers keep a state, which a wrong draft would have changed for good")
    reason = (
        f"no neuron of this model is ever exactly zero ({model.architecture.activation}), so none can be left out: "
        "mode dense, without predictors"
    )
    return Plan(
        memory=memory,
        reader=reader,
        threads=config.threads if config.threads is not None else num_cores(),
        mode=mode,
        prefetch=prefetch,
        loads=memory.cache_policy == "frequency",  # another one's caches forget what no token wants
        profile=profile,
        popularity=popularity,
        notices=tuple(notices),
        reasons=(reason,) if config.mode is None and mode == "dense" else (),
    )


def _names_the_next_layer(mode: Mode, model: ModelDir) -> bool:
    """True where something names what the next layer will read: its router, which is there, or predictors of it."""
    if model.architecture.unit_rows > 1:
        return True
    return mode == "sparse" and has_prefetch_predictors(model.path, model.manifest)


def _sparse_prompts(mode: Mode, model: ModelDir) -> list[str]:
    """A notice. UsageError where prompts cannot be computed so."""
    if mode == "dense":
        raise UsageError(f"{model.path}: sparse prompts need mode sparse or oracle; in mode dense every neuron counts")
    return [f"prompts are computed as mode {mode} computes single tokens, not densely"]


def _streaming(model: ModelDir, memory: MemoryPlan, profile: Profile | None) -> list[str]:
    """A notice on every token of a dense run whose neurons do not fit; none where they all fit."""
    token = dense_token(model, memory, costs=profile)
    if not token.bytes_read:
        return []
    read, all_nbytes = format_size(token.bytes_read), format_size(token.ffn_nbytes)
    if token.total_s is None:
        time = "how long that takes is not known: `flashllm calibrate` measures the drive"
    else:
        time = f"at this drive's {format_size(token.read_bps)}/s about {token.total_s:.2f} s a token"
    twice = " (some rows twice: values wait for those of all neurons)" if model.block.waiting else ""
    return [
        f"dense: each token reads {read} of the {all_nbytes} of neurons{twice}, which memory has no room for; {time}"
    ]


def _small_cache(model: ModelDir, memory: MemoryPlan) -> list[str]:
    """That the neuron caches hold less than a token of a mixture of experts reads; nothing where they hold more."""
    cycle, layers = model.architecture.cycle, model.architecture.mixtures
    if not cycle or min(memory.cache_rows[layer] for layer in layers) >= cycle:
        return []
    of_each = [(memory.cache_rows[layer], memory.layer_row_nbytes[layer]) for layer in layers]
    held = format_size(sum(rows * nbytes for rows, nbytes in of_each))
    needed = format_size(sum(cycle * nbytes for _, nbytes in of_each))
    advice = (
        "most of them are read again for every token, though those chosen most often stay"
        if memory.cache_policy == "frequency"
        else f"under the cache policy {memory.cache_policy} nearly all are read again for every token; frequency keeps "
        "those chosen most often"
    )
    return [f"the neuron caches hold {held}, and a token's experts are {needed}: {advice}; --memory gives them more"]


def check_mode(mode: Mode, model: ModelDir) -> None:
    """UsageError, saying what to do, where `model` cannot run in `mode`."""
    if mode == "dense":
        return
    if mode == "oracle" and model.architecture.experts:
        raise UsageError(
            f"{model.path}: mode oracle is not for mixtures of experts, whose router is exact; use --mode sparse, or "
            "--mode dense for all neurons of the experts it names"
        )
    if not model.manifest.sparse:
        other = ", or convert it again with --sparsify, which costs quality" if model.architecture.gated else ""
        raise UsageError(
            f"{model.path}: mode {mode} needs an activation of the ReLU family, zero for most neurons; "
            f"this model's is {model.architecture.activation}: use --mode dense{other}"
        )
    routed = model.architecture.experts and not model.architecture.sparse
    if mode == "sparse" and PREDICTORS not in model.manifest.files and not model.manifest.resident_gate and not routed:
        raise UsageError(
            f"{model.path} has no predictors, which mode sparse needs; train them with "
            f"`flashllm train {model.path}`, or use --mode dense"
        )
