"""Random machines × models × lengths: is the search's policy ever beaten, over a limit, or a crash?

For each case 200 random feasible policies are drawn, over whole tensors and over free fractions, half of them near the
search's own answer, where a better one would hide. The search must not be worse than any; its peaks must fit; a case
that fits nowhere must be refused with a resource named, and no random policy may fit it either.

    python bench/offload/offload_random.py --cases 1000 --json bench/offload/results/offload_random.json
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashllm.errors import BudgetError
from flashllm.offload.machine.hardware import COMBINE, Hardware
from flashllm.offload.planner.predict import price
from flashllm.offload.planner.program import TIERS, PlacementProgram
from flashllm.offload.planner.search import SearchSpace, search
from flashllm.offload.policy import Method, Policy, Workload
from flashllm.offload.shape import ModelShape, load_shape
from flashllm.profile.rates import RateCurve

GPU_BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUM_BATCHES = (1, 2, 4, 8, 16)
OPTS = ("opt-1.3b", "opt-13b", "opt-175b", "opt-2.7b", "opt-30b", "opt-6.7b", "opt-66b")  # seeds count on the order
# The integer program closes to 1e-6 of its optimum; a row of HiGHS may be off by 1e-7.
TOLERANCE = 1e-5
RESOURCES = ("more memory", "device memory", "CPU memory", "disk space")


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def random_curve(rng: random.Random, low: float, high: float) -> RateCurve:
    rate = log_uniform(rng, low, high)
    if rng.random() < 0.5:
        return RateCurve.flat(rate)
    return RateCurve(((1e4, rate * rng.uniform(0.05, 1)), (1e6, rate * rng.uniform(0.3, 1)), (1e8, rate)))


def random_hardware(rng: random.Random) -> Hardware:
    disk = 0 if rng.random() < 0.2 else int(log_uniform(rng, 1e9, 4e12))
    return Hardware(
        name="random",
        device=rng.choice(["cuda", "cpu"]),
        device_memory=int(log_uniform(rng, 2e8, 1e11)),
        device_reserved=int(rng.uniform(0, 2e8)),
        cpu_memory=int(log_uniform(rng, 1e9, 1e12)),
        cpu_reserved=int(rng.uniform(0, 1e9)),
        disk_capacity=disk,
        ctog=random_curve(rng, 1e9, 6e10),
        gtoc=random_curve(rng, 1e9, 6e10),
        dtoc=random_curve(rng, 5e7, 1e10),
        ctod=random_curve(rng, 5e7, 1e10),
        gemm=random_curve(rng, 1e11, 3e14),
        bmm=random_curve(rng, 5e10, 1e14),
        device_bandwidth=random_curve(rng, 1e10, 3e12),
        cpu_attention=random_curve(rng, 1e9, 1e11),
        cpu_bandwidth=random_curve(rng, 5e9, 2e11),
        combine=rng.choice(COMBINE),
    )


def random_shape(rng: random.Random) -> ModelShape:
    if rng.random() < 0.3:
        return load_shape(rng.choice(OPTS))
    head_dim = rng.choice([64, 128])
    kv_heads = rng.choice([1, 2, 4, 8, 32])
    heads = kv_heads * rng.choice([1, 2, 4, 7])
    hidden = heads * head_dim
    return ModelShape(
        name="random", layers=rng.randint(1, 80), hidden=hidden, ffn=int(hidden * rng.uniform(2, 6)), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=rng.choice([1000, 32000, 256000]), gated=rng.random() < 0.5,
        tied=rng.random() < 0.5, dtype_bytes=rng.choice([2, 2, 4]),
    )  # fmt: skip


def random_space(rng: random.Random) -> SearchSpace:
    compress = rng.random() < 0.3
    forbid = frozenset(rng.sample(TIERS, rng.choice([0, 0, 0, 1])))
    return SearchSpace(
        gpu_batches=GPU_BATCHES,
        num_batches=NUM_BATCHES,
        cpu_attention=rng.choice([(True, False), (True,), (False,)]),
        compress_weights=compress or rng.random() < 0.1,
        compress_cache=compress,
        attention_sparsity=rng.choice([1.0, 1.0, 0.1]),
        overlap=(rng.random() < 0.9,),
        forbid=forbid,
    )


def random_placement(rng: random.Random, program: PlacementProgram, near: Policy | None, whole: bool) -> np.ndarray:
    """Nine fractions on the tiers allowed: whole tensors or free, anywhere or near a given policy."""
    shape, method = program.model.shape, program.model.method
    tiers = [tier for tier in range(3) if program.upper[tier] > 0]
    parts = np.zeros((3, 3))
    if whole:
        favourite = rng.choice(tiers)
        for params in shape.matrix_params:
            tier = favourite if rng.random() < 0.7 else rng.choice(tiers)
            parts[0, tier] += params / shape.layer_params
        for kind, grains in ((1, method.gpu_batch), (2, method.gpu_batch)):
            cuts = sorted(rng.choice([0, grains, rng.randint(0, grains)]) for _ in tiers[1:])
            counts = [high - low for low, high in zip([0, *cuts], [*cuts, grains], strict=True)]
            parts[kind, rng.sample(tiers, len(tiers))] = np.array(counts) / grains
        return parts.ravel()
    sharpness = rng.choice([0.1, 1.0])
    for kind in range(3):
        parts[kind, tiers] = [rng.gammavariate(sharpness, 1) + 1e-12 for _ in tiers]
    free = (parts / parts.sum(axis=1, keepdims=True)).ravel()
    if near is not None:
        step = rng.choice([0.5, 0.1, 0.01, 1e-3, 1e-5])  # what fits is convex, so small steps stay inside
        free = (1 - step) * np.array(near.placement) + step * free
    return free


def plausible(program: PlacementProgram, placement: np.ndarray) -> bool:
    """A quick look before pricing: no forbidden tier, no memory row over its limit."""
    memory = ~program.rows[:, 9:].any(axis=1)
    fits = (program.rows[memory, :9] @ placement <= program.limits[memory] + 1e-3).all()
    return bool(fits and (placement <= program.upper[:9] + 1e-12).all())


def corners(program: PlacementProgram, rng: random.Random) -> list[np.ndarray]:
    """Feasible placements at corners of what fits, by least random objectives; any mixture of them fits too."""
    found = []
    for _ in range(12):
        objective = np.append([rng.gauss(0, 1) for _ in range(9)], np.zeros(3))
        if solution := program.solve(objective, program.rows, program.limits, whole=False):
            found.append(solution[1])
    return found


def check_case(seed: int, *, policies: int) -> dict[str, Any]:
    """One case: what came of the search, and the best of the random feasible policies against it."""
    rng = random.Random(seed)
    shape, hardware, space = random_shape(rng), random_hardware(rng), random_space(rng)
    workload = Workload(prompt_len=rng.choice([1, 16, 128, 512, 2048]), gen_len=rng.choice([1, 2, 32, 256]))
    record: dict[str, Any] = {"seed": seed, "faults": []}
    plan = None
    start = time.perf_counter()
    try:
        plan = search(shape, hardware, workload, space)
    except BudgetError as error:
        record["refused"] = str(error)
        if not any(resource in str(error) for resource in RESOURCES):
            record["faults"].append("the refusal names no resource")
    record["seconds"] = time.perf_counter() - start
    if plan is not None:
        record["throughput"] = plan.prediction.throughput
        if plan.prediction.over:
            record["faults"].append(f"over a limit: {plan.prediction.over}")
        if plan.relaxed_throughput < plan.prediction.throughput * (1 - TOLERANCE):
            record["faults"].append("rounding gained throughput")
    programs = {}
    space = space.on(hardware)
    for method in space.methods():
        programs[method] = PlacementProgram(space.model(shape, hardware, workload, method), forbid=space.forbid)
    methods = list(programs)
    feasible = attempts = 0
    best = 0.0
    mixtures: list[np.ndarray] = []
    while feasible < policies and attempts < 30 * policies:
        attempts += 1
        if plan is None and attempts > 10 * policies:
            break
        whole, near = rng.random() < 0.5, plan.policy if plan is not None and rng.random() < 0.5 else None
        method = rng.choice(methods) if near is None else method_of(near)
        program = programs[method]
        placement = random_placement(rng, program, None if whole else near, whole)
        if plan is not None and attempts > 10 * policies:  # little fits: mix corners of it, for the search's own pair
            whole, method = False, method_of(plan.policy)
            program = programs[method]
            mixtures = mixtures or corners(program, rng)
            shares = np.array([rng.gammavariate(0.3, 1) + 1e-12 for _ in mixtures])
            placement = shares @ np.array(mixtures) / shares.sum()
        if not plausible(program, placement):
            continue
        policy = program.policy(placement)
        prediction = price(program.model, policy)
        if prediction.over:
            continue
        feasible += 1
        best = max(best, prediction.throughput)
        limit = 0.0 if plan is None else plan.prediction.throughput if whole else plan.relaxed_throughput
        if prediction.throughput > limit * (1 + TOLERANCE):
            kind = "whole tensors" if whole else "free fractions"
            record["faults"].append(f"beaten by {kind}: {prediction.throughput} > {limit}: {policy}")
    return record | {"feasible": feasible, "best_random": best}


def method_of(policy: Policy) -> Method:
    """A policy without its placement."""
    return Method(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(Method)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--policies", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    records = []
    for case in range(args.cases):
        records.append(check_case(args.seed + case, policies=args.policies))
        for fault in records[-1]["faults"]:
            print(f"case {args.seed + case}: {fault}", file=sys.stderr)
        if (case + 1) % 100 == 0:
            print(f"{case + 1} cases", file=sys.stderr)
    planned = [record for record in records if "throughput" in record]
    seconds = sorted(record["seconds"] for record in records)
    summary = {
        "command": f"python bench/offload/offload_random.py --cases {args.cases} --policies {args.policies} "
        f"--seed {args.seed}",
        "cases": len(records),
        "planned": len(planned),
        "refused": len(records) - len(planned),
        "faulty_cases": sum(bool(record["faults"]) for record in records),
        "random_policies": sum(record["feasible"] for record in records),
        "planned_cases_with_fewer_policies": sum(record["feasible"] < args.policies for record in planned),
        "fewest_policies": min((record["feasible"] for record in planned), default=0),
        "median_search_s": seconds[len(seconds) // 2],
        "longest_search_s": seconds[-1],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))
    return 1 if summary["faulty_cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
