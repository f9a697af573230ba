"""Peak memory of a block on each tier (paper B, appendix A.3), as affine forms in the nine fractions.

A peak is what lives on the tier for the whole block plus the working memory of the worst moment. It knows no times.
"""

from flashllm.offload.planner.costs import COMPRESSED, CostModel
from flashllm.offload.planner.host_costs import HostCostModel
from flashllm.offload.planner.host_peaks import host_limits
from flashllm.offload.planner.linear import CC, CD, CG, HC, HD, HG, WC, WD, WG, Linear, constant


def _cache_bytes(model: CostModel) -> float:
    """Keys and values of every block in flight, all layers, at their full length; and recurrent states."""
    per_sequence = model.workload.full_context * model.cache_token_bytes * model.shape.kept_layers
    return model.sequences * (per_sequence + model.shape.state_bytes)


def _weight_bytes(model: CostModel) -> float:
    return model.weight_bytes * model.shape.layers + model.embedding_bytes


def device_peaks(model: CostModel) -> list[Linear]:
    """Device bytes in prefill and after it, one form for each moment that may be the worst (gpu_peak of A.3)."""
    m, shape, dt = model.method, model.shape.largest, model.shape.dtype_bytes
    s, total, gbs = model.workload.prompt_len, model.workload.full_context, m.gpu_batch
    # Two layers in flight, the one computed and the one arriving; the output head arrives when no layer does.
    most = shape.layer_bytes / model.shape.layer_bytes * model.weight_bytes
    arriving = (WC + WD) * max(2 * most, model.head_bytes)
    expanded = max(shape.matrix_params) * dt if m.compress_weights else 0  # one matrix at a time, in 16 bits
    logits = gbs * shape.vocab * dt

    def working(tokens: int, context: int, attended: Linear) -> list[Linear]:
        rows = gbs * tokens * dt
        seen = gbs * context * shape.kv_token_bytes * (1 + COMPRESSED * m.compress_cache)
        scores = gbs * shape.heads * tokens * context * dt
        return [
            constant(rows * (shape.hidden + shape.query_dim + 2 * shape.kv_dim)),
            attended * (rows * shape.query_dim + seen + scores),
            constant(rows * (shape.hidden + shape.ffn * (2 if shape.gated else 1))),
            constant(logits + rows * 2 * shape.hidden),
        ]

    # The prompt's attention is always the device's. After that it attends to its own share of the cache, and without
    # CPU attention to the rest as that arrives, double-buffered.
    attended = CG if m.cpu_attention else CG + 2 * (CC + CD)
    peaks = []
    for tokens, works in ((s, working(s, s, constant(1))), (1, working(1, total, attended))):
        hidden = tokens * shape.activation_token_bytes
        home = WG * _weight_bytes(model) + CG * _cache_bytes(model) + HG * (hidden * model.sequences)
        home += arriving + expanded + (HC + HD) * (hidden * gbs)
        peaks += [home + work for work in works]
    return peaks


def cpu_peaks(model: CostModel) -> list[Linear]:
    """CPU bytes in prefill and after it (cpu_peak of A.3)."""
    m, shape = model.method, model.shape
    s, total, gbs = model.workload.prompt_len, model.workload.full_context, m.gpu_batch
    hidden = shape.activation_token_bytes
    home = WC * _weight_bytes(model) + CC * _cache_bytes(model)
    prefill = (
        home + HC * (s * hidden * model.sequences) + (WC + WD) * model.weight_bytes + (HC + HD) * (s * hidden * gbs)
    )
    decode = home + HC * (hidden * model.sequences) + WD * model.weight_bytes + HD * (2 * hidden * gbs)
    decode += CD * (2 * gbs * total * model.cache_token_bytes)
    if m.cpu_attention:
        scores = 2 * gbs * shape.heads * total * shape.dtype_bytes
        expanded = gbs * total * shape.kv_token_bytes if m.compress_cache else 0
        decode += (CC + CD) * (scores + expanded + gbs * shape.query_dim * shape.dtype_bytes)
    return [prefill, decode]


def disk_peak(model: CostModel) -> Linear:
    """Disk bytes (nvme_peak of A.3)."""
    hidden = model.workload.prompt_len * model.shape.activation_token_bytes * model.sequences
    return WD * _weight_bytes(model) + CD * _cache_bytes(model) + HD * hidden


def memory_limits(model: CostModel) -> list[tuple[str, Linear, int]]:
    """(tier, peak, bytes the tier has) for every peak that must fit."""
    if isinstance(model, HostCostModel):
        return host_limits(model)
    hardware = model.hardware
    rows = [("device", peak, hardware.device_usable) for peak in device_peaks(model)]
    rows += [("cpu", peak, hardware.cpu_usable) for peak in cpu_peaks(model)]
    return [*rows, ("disk", disk_peak(model), hardware.disk_capacity)]
