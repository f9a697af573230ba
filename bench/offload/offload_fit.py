"""Fits the T4 machine's constants to the figures of paper B that may be used, and prints them.

Used: tables 1, 3 (one GPU, decoding throughput), 4, and the generation throughput of two cells of table 2: 30B and
175B at prompt 512. Not used: the other cells of table 2, also where table 3 repeats one (6.7B generation throughput),
table 5's ablations, and every row with compression or four GPUs: those are predicted (bench/offload/offload_plan.py).
Table 4's prefill weight read is left out: 768 s for bytes that take 98 s in every decoding step, which no bandwidth can
give to both; it is reported.

    python bench/offload/offload_fit.py
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares

from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner.costs import CostModel
from flashllm.offload.planner.predict import predict
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import load_shape
from flashllm.profile.rates import RateCurve

GEN_LEN = 32
OPT_175B = load_shape("opt-175b")


def paper_policy(gpu_batch: int, num_batches: int, percent: Sequence[int], **methods: object) -> Policy:
    """A policy as the paper writes it: wg, wc, cg, cc, hg, hc in per cent, the rest on disk."""
    wg, wc, cg, cc, hg, hc = (value / 100 for value in percent)
    return Policy(
        gpu_batch=gpu_batch, num_batches=num_batches,
        wg=wg, wc=wc, wd=1 - wg - wc, cg=cg, cc=cc, cd=1 - cg - cc, hg=hg, hc=hc, hd=1 - hg - hc,
        **methods,  # type: ignore[arg-type]
    )  # fmt: skip


# Policies of the two cells: table 5. Of 6.7B: everything on the GPU (section 6.1), batch 2, the largest that fits.
POLICY_30B = paper_policy(64, 2, (20, 80, 0, 100, 0, 100), cpu_attention=True)
POLICY_175B = paper_policy(32, 8, (0, 50, 0, 0, 0, 100), cpu_attention=True)
POLICY_6B7 = paper_policy(2, 1, (100, 0, 100, 0, 100, 0), overlap=False)

# name -> (start, description); every parameter is a rate, fitted in log
PARAMETERS = {
    "gemm": (20e12, "flop/s"),
    "device_bandwidth": (250e9, "B/s"),
    "ctog": (10e9, "B/s"),
    "dtoc": (2.6e9, "B/s"),
    "store_small": (0.3e9, "B/s, device to disk, decoding's new keys and values"),
    "store_large": (2.4e9, "B/s, device to disk, prefill's"),
    "cpu_attention": (16e9, "key and value B/s"),
}


def machine(values: Sequence[float]) -> Hardware:
    """The T4 machine with these rates. Store rates have knots at the two sizes table 4 shows."""
    gemm, bandwidth, ctog, dtoc, small, large, attention = (float(value) for value in values)
    new = POLICY_175B.gpu_batch * OPT_175B.kv_token_bytes / 2
    return dataclasses.replace(
        T4,
        gemm=RateCurve.flat(gemm),
        bmm=RateCurve.flat(gemm / 2),  # not identified by any figure used; attention is a few per cent of prefill
        device_bandwidth=RateCurve.flat(bandwidth),
        ctog=RateCurve.flat(ctog),
        gtoc=RateCurve.flat(ctog),  # PCIe is symmetric; no figure shows device-to-CPU copies alone
        dtoc=RateCurve.flat(dtoc),
        ctod=RateCurve(((new, small), (new * 512, large))),
        cpu_attention=RateCurve.flat(attention),
    )


def stage_seconds(hardware: Hardware) -> dict[str, float]:
    """Table 4's rows, overlap off: what each component takes alone, for a whole block."""
    shape, policy, work = OPT_175B, POLICY_175B, Workload(prompt_len=512, gen_len=GEN_LEN)
    model = CostModel(shape=shape, hardware=hardware, workload=work, method=policy)
    only = {  # the same stages with one kind of tensor off the device
        "weights": (0, policy.wc, policy.wd, 1, 0, 0, 1, 0, 0),
        "cache": (1, 0, 0, 0, 0, 1, 1, 0, 0),
    }
    layers, steps = shape.layers, GEN_LEN - 1
    read = {kind: model.decode["ctog"].value(x) + model.decode["dtoc"].value(x) for kind, x in only.items()}
    first = model.prefill["ctog"].value(only["weights"]) + model.prefill["dtoc"].value(only["weights"])
    return {
        "prefill compute": layers * model.prefill["comp"].value(policy.placement),
        "prefill weight (R)": layers * first,
        "prefill cache (W)": layers * model.prefill["ctod"].value(only["cache"]),
        "decode compute": steps * layers * model.decode["comp"].value(policy.placement),
        "decode weight (R)": steps * layers * read["weights"],
        "decode cache (R)": steps * layers * model.decode["dtoc"].value(only["cache"]),
        "decode cache (W)": steps * layers * model.decode["ctod"].value(only["cache"]),
    }


TABLE_4 = {
    "prefill compute": 2220.0,
    "prefill weight (R)": 768.0,
    "prefill cache (W)": 261.0,
    "decode compute": 1498.0,
    "decode weight (R)": 3047.0,
    "decode cache (R)": 7046.0,
    "decode cache (W)": 124.0,
}
LEFT_OUT = "prefill weight (R)"

Metric = Callable[[Hardware], float]


def _throughput(model: str, policy: Policy, metric: str) -> Metric:
    shape, work = load_shape(model), Workload(prompt_len=512, gen_len=GEN_LEN)
    return lambda hardware: float(getattr(predict(shape, hardware, work, policy), metric))


ROWS: tuple[tuple[str, Metric, float], ...] = (
    ("table 3, 6.7B decoding", _throughput("opt-6.7b", POLICY_6B7, "decode_throughput"), 38.28),
    ("table 3, 30B decoding", _throughput("opt-30b", POLICY_30B, "decode_throughput"), 11.52),
    ("table 3, 175B decoding", _throughput("opt-175b", POLICY_175B, "decode_throughput"), 0.83),
    ("table 2, 30B at 512", _throughput("opt-30b", POLICY_30B, "throughput"), 7.32),
    ("table 2, 175B at 512", _throughput("opt-175b", POLICY_175B, "throughput"), 0.69),
)


def compare(hardware: Hardware) -> list[tuple[str, float, float]]:
    """(figure, model's, paper's) for every figure used, and the one of table 4 that is left out."""
    stages = stage_seconds(hardware)
    rows = [(f"table 4, {name}", stages[name], value) for name, value in TABLE_4.items()]
    return rows + [(name, metric(hardware), value) for name, metric, value in ROWS]


def fit() -> tuple[dict[str, float], Hardware]:
    """The rates of least squared log ratio over all figures used."""

    def residuals(logs: np.ndarray) -> np.ndarray:
        rows = compare(machine(np.exp(logs)))
        return np.array([np.log(ours / paper) for name, ours, paper in rows if not name.endswith(LEFT_OUT)])

    start = np.log([value for value, _ in PARAMETERS.values()])
    solved = np.exp(least_squares(residuals, start, xtol=1e-10).x)
    return dict(zip(PARAMETERS, (float(value) for value in solved), strict=True)), machine(solved)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args(argv)
    values, hardware = fit()
    for name, value in values.items():
        print(f"{name:18s} {value:10.4g} {PARAMETERS[name][1]}", file=sys.stderr)
    rows = compare(hardware)
    for name, ours, paper in rows:
        note = "  (left out)" if name.endswith(LEFT_OUT) else ""
        print(f"{name:30s} {ours:10.4g} paper {paper:10.4g} {ours / paper - 1:+7.1%}{note}", file=sys.stderr)
    print(json.dumps({"fitted": values, "rows": [{"figure": n, "model": o, "paper": p} for n, o, p in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
