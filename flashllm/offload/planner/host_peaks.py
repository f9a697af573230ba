"""Peak memory of the runtime on a machine whose device is its CPU, as affine forms in the nine fractions.

It counts what flashllm/offload/runtime allocates: weights and their two staging buffers, pages of the cache and the
buffers they pass, states, and the working memory of a layer's worst moment. A test compares with the runtime's plans.
"""

from flashllm._core import PAGE_TOKENS
from flashllm.offload.planner.host_costs import HostCostModel
from flashllm.offload.planner.linear import CC, CD, CG, HC, HD, HG, WC, WD, WG, Linear, constant
from flashllm.offload.planner.packing import late_layers
from flashllm.offload.runtime.ops import ROWS_TOGETHER
from flashllm.offload.runtime.tasks import BUFFERS
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, round_up
from flashllm.offload.runtime.tiers.weight_plan import GATHERED_ROWS
from flashllm.offload.shape import ModelShape
from flashllm.plan.prompts import COLUMN_PADS

SPARE = 24 << 20  # stacks, readers' bounce buffers, what an allocator holds back


def sealed_pages(model: HostCostModel) -> int:
    """Pages of a sequence in a layer that get full."""
    return model.workload.positions // PAGE_TOKENS


def weights(model: HostCostModel) -> tuple[Linear, float]:
    """Weights in memory while a run lasts, and what bringing them there takes besides."""
    shape, layer = model.shape, model.weight_bytes
    buffers = BUFFERS if model.method.overlap else 1
    kept = (WG + WC) * (layer * shape.layers) + (WC + WD) * (buffers * layer)
    table = shape.vocab * shape.hidden * shape.dtype_bytes
    policy = model.policy
    if policy is not None and policy.wc + policy.wd > 0:  # perhaps with all of what the largest layer has more
        kept += buffers * (model.largest_layer_bytes - layer)
    kept += model.head_bytes if model.head_tier != "d" else 0
    if model.head_tier != "g" and policy is not None:  # it passes the layers' buffers, which it may be larger than
        kept += buffers * max(0.0, model.head_bytes - (policy.wc + policy.wd) * layer)
    embedding_tier = "d" if policy is None else policy.embedding_tier(tied=shape.tied)
    if not shape.tied and embedding_tier != "d":
        kept += table
    if (embedding_tier == "d" and not shape.tied) or model.head_tier == "d":
        kept += GATHERED_ROWS * (round_up(shape.hidden * shape.dtype_bytes) + ALIGNMENT)
    vectors = 6 * shape.hidden + shape.query_dim + 2 * shape.kv_dim + 2 * shape.ffn  # norms and biases, in fp32
    kept += shape.layers * shape.experts * shape.hidden * (4 + shape.dtype_bytes)  # routers, and what experts add
    kept += shape.layers * shape.beside * shape.hidden * (3 if shape.gated else 2) * shape.dtype_bytes
    kept += shape.layers * vectors * 4 + shape.positions * shape.hidden * shape.dtype_bytes
    kept += shape.layers * shape.scale_bytes
    bits = model.weight_bits if model.method.compress_weights else None
    return kept, shape.largest.packed_bytes(bits, -1)[1]


def cache(model: HostCostModel) -> Linear:
    """The cache's pages in memory and the buffers that pages pass; recurrent states, which do not move."""
    m, positions = model.method, model.workload.positions
    sequences, states = model.sequences * model.shape.kept_layers, model.sequences * model.shape.state_bytes
    full, prompt = sealed_pages(model), -(-model.workload.prompt_len // PAGE_TOKENS)
    staged = CD * (m.gpu_batch * BUFFERS * full * model.sealed_bytes)
    arriving = m.gpu_batch * prompt * (BUFFERS * model.page_bytes)
    outbox = m.gpu_batch * prompt * model.sealed_bytes
    if not m.compress_cache:
        pages = -(-positions // PAGE_TOKENS)
        kept = (CG + CC) * (sequences * pages * model.page_bytes) + CD * (sequences * model.page_bytes)
        return kept + staged + CD * (arriving + outbox) + states
    kept = constant(sequences * model.page_bytes) + (CG + CC) * (sequences * full * model.sealed_bytes)
    has_disk = model.policy is None or model.policy.cd > 0
    return kept + staged + constant(arriving + (outbox if has_disk else 0)) + states


def states(model: HostCostModel, tokens: int) -> Linear:
    """Hidden states of all batches between two layers; those on disk pass buffers."""
    m = model.method
    row = tokens * model.shape.activation_token_bytes
    kept = (HG + HC) * (model.sequences * row)
    return kept + (HC + HD) * (2 * m.gpu_batch * row) + HD * ((BUFFERS + 1) * m.gpu_batch * row)


def working(shape: ModelShape, rows: int, sequences: int) -> int:
    """The worst of a batch's moments, `rows` tokens of `sequences`: embedding, a layer, head."""
    shape = shape.largest
    item, wide, part = shape.dtype_bytes, 4, min(rows, ROWS_TOGETHER)
    embedding = rows * 2 * shape.hidden * item + part * 2 * shape.hidden * wide
    states = part * (6 if shape.experts else 4) * shape.hidden * wide
    # Queries, keys, values, what is made of them.
    attention = part * (2 * (shape.query_dim + shape.kv_dim) + shape.mixer_values) * wide
    widest = max(shape.ffn_active, shape.hidden, shape.query_dim)
    # Inputs in fp32, some columns apart, and in the dtype, results, what is rounded.
    products = (part + COLUMN_PADS) * widest * wide + part * widest * 3 * item
    layer = states + attention + products + part * shape.ffn_active * (1 + shape.gated) * wide
    head = sequences * (shape.vocab + 2 * shape.hidden) * wide + sequences * 2 * shape.hidden * item
    # A batch's own states come on top where they are not among those kept; the first layer's are always new.
    return max(embedding, layer, head)


def host_limits(model: HostCostModel) -> list[tuple[str, Linear, int]]:
    """As `peaks.memory_limits`."""
    hardware, shape = model.hardware, model.shape
    kept, starting = weights(model)
    kept += SPARE
    cached = cache(model)
    rows = [("device", kept + starting, hardware.device_usable)] if starting else []
    for tokens in (model.workload.prompt_len, 1):
        batch = model.method.gpu_batch
        peak = kept + cached + states(model, tokens) + working(shape, batch * tokens, batch)
        rows.append(("device", peak, hardware.device_usable))
    on_disk = CD * (model.sequences * shape.kept_layers * sealed_pages(model) * model.sealed_bytes)
    on_disk += HD * (model.sequences * model.workload.prompt_len * shape.activation_token_bytes)
    if not model.method.compress_weights and not shape.stored:  # read from the model's own files, where they are there
        on_disk += WD * (shape.assembled * shape.ffn_params * shape.dtype_bytes * shape.layers)
    else:
        on_disk += WD * (model.weight_bytes * shape.layers)
        if (
            model.policy is not None and model.policy.wd > 0
        ):  # whole matrices are: perhaps all that late layers have more
            on_disk += (1 - model.policy.wd) * late_layers(shape.layers) * model.late_bytes
    return [*rows, ("cpu", constant(0), hardware.cpu_usable), ("disk", on_disk, hardware.disk_capacity)]
