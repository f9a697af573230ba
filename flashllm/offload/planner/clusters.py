"""Several machines by model: pipeline parallelism (paper B, section 4.4, table 3) and a decentralised pipeline of
whole layers over a network (section 6.4, figure 5). It prices; nothing is sent anywhere."""

import dataclasses
from dataclasses import dataclass

from flashllm.errors import BudgetError
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.planner.costs import Method
from flashllm.offload.planner.host_costs import cost_model
from flashllm.offload.planner.predict import Prediction, price
from flashllm.offload.planner.search import SearchSpace, search
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One link between two machines."""

    bandwidth: float  # bytes/s
    delay_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, not {self.bandwidth!r}")
        if not self.delay_s >= 0:
            raise ValueError(f"delay_s must not be negative, not {self.delay_s!r}")

    def seconds(self, nbytes: float) -> float:
        return self.delay_s + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """`machines` equal stages, each under `policy` for its share of the layers; as many blocks in flight."""

    machines: int
    policy: Policy
    stage: Prediction  # of one block on one stage
    prefill_s: float
    decode_s: float
    throughput: float  # tokens/s of the whole pipeline, prefill included
    decode_throughput: float


def pipeline(
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    *,
    machines: int,
    network: Network,
    space: SearchSpace | None = None,
    policy: Policy | None = None,
) -> PipelinePlan:
    """The pipeline's best policy (or the price of a given one), the search being that of one machine (section 4.4).

    Every machine computes layers / machines (rounded up) of each of `machines` blocks in turn. Raises BudgetError.
    """
    if machines < 1:
        raise ValueError(f"machines must be positive, not {machines!r}")
    part = dataclasses.replace(shape, layers=-(-shape.layers // machines))
    space = dataclasses.replace(space or SearchSpace(), blocks_in_flight=machines)
    if policy is None:
        plan = search(part, hardware, workload, space)
        policy, stage = plan.policy, plan.prediction
    else:
        stage = price(space.model(part, hardware, workload, Method.of(policy)), policy)
    steps, blocks = workload.gen_len - 1, machines
    step_s = stage.decode_s / steps if steps else 0.0
    hop = network.seconds(policy.block_size * shape.activation_token_bytes) if machines > 1 else 0.0
    first = network.seconds(policy.block_size * workload.prompt_len * shape.activation_token_bytes) if hop else 0.0
    # Hops overlap with the work of other blocks; a slot lasts as long as the slower. Prefill fills the pipeline:
    # machines - 1 slots of bubbles (table 3's text).
    prefill_s = (blocks + machines - 1) * max(stage.prefill_s, first)
    decode_s = steps * blocks * max(step_s, hop)
    sequences = blocks * policy.block_size
    return PipelinePlan(
        machines=machines,
        policy=policy,
        stage=stage,
        prefill_s=prefill_s,
        decode_s=decode_s,
        throughput=sequences * workload.gen_len / (prefill_s + decode_s),
        decode_throughput=sequences * steps / decode_s if decode_s else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decentralised:
    """A chain of machines that each keep whole layers on their device, Petals' way, for `clients` batches at once."""

    stages: int
    chains: int  # disjoint chains the machines make
    latency_s: float  # of one batch
    throughput: float  # tokens/s of all machines together


def decentralised(
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    *,
    machines: int,
    network: Network,
    batch: int,
    clients: int,
) -> Decentralised:
    """What a pipeline of whole layers without offloading gives (section 6.4): activations cross the network between
    all stages, and every client's cache lies on the devices.

    Raises BudgetError when the machines' devices do not hold the model and the caches together.
    """
    n = workload.gen_len
    policy = Policy(gpu_batch=batch, wg=1, wc=0, wd=0, cg=1, cc=0, cd=0, hg=1, hc=0, hd=0)
    for layers in range(shape.layers, 0, -1):  # as many layers a machine as fit: fewer hops
        stages = -(-shape.layers // layers)
        if stages > machines:
            break
        part = dataclasses.replace(shape, layers=layers)
        share = max(1, clients * stages // machines)  # batches of which one chain holds the caches
        model = cost_model(part, hardware, workload, Method.of(policy), blocks_in_flight=share)
        stage = price(model, policy)
        if stage.over:
            continue
        chains = machines // stages
        prompt_hop = network.seconds(batch * workload.prompt_len * shape.activation_token_bytes)
        token_hop = network.seconds(batch * shape.activation_token_bytes)
        latency = stages * (stage.prefill_s + prompt_hop + stage.decode_s + (n - 1) * token_hop)
        # A stage serves its clients one after another; what a link carries is bound by its bandwidth, not its delay.
        wire = (prompt_hop - network.delay_s) + (n - 1) * (token_hop - network.delay_s)
        busiest = max(stage.prefill_s + stage.decode_s, wire)
        throughput = min(clients * batch * n / latency, chains * batch * n / busiest)
        return Decentralised(stages=stages, chains=chains, latency_s=latency, throughput=throughput)
    raise BudgetError(f"{machines} devices like that of {hardware.name} do not hold {shape.name} and {clients} caches")


def tokens_per_dollar(throughput: float, *, watts: float = 250.0, usd_per_kwh: float = 0.2) -> float:
    """Tokens for a dollar of electricity (section 6.3; its defaults)."""
    return throughput * 3600 / (watts / 1000 * usd_per_kwh)
