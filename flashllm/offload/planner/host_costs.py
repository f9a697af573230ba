"""Costs of the runtime on a machine whose device is its CPU: one memory, one disk, and cores that serve everything.

The affine forms of appendix A.3 (paper B) for two tiers, priced with what this engine measured of itself. What differs:
1. nothing travels between device and CPU; a cache or a layer homed on the CPU tier is in the same memory;
2. reads and writes share the disk, so their times add; while it works the products lose a share, and it loses one too;
3. a step is bound as a whole, the head included: loads of the next layer begin while the head is computed;
4. the last page of a sequence's cache stays plain in memory: only full pages are packed, written and read;
5. packed weights and cache are multiplied as they are, so packing has rates of its own instead of an expansion.
"""

from dataclasses import dataclass
from functools import cached_property

from flashllm._core import PAGE_TOKENS
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.planner.costs import CostModel
from flashllm.offload.planner.linear import CD, HC, HD, WC, WD, Linear, constant
from flashllm.offload.planner.packing import GROUP, codes_nbytes, in_units, late_layers
from flashllm.offload.policy import Method, Workload
from flashllm.offload.runtime.ops import ROWS_TOGETHER
from flashllm.offload.runtime.tiers.scratch import round_up
from flashllm.offload.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class HostCostModel(CostModel):
    """As `CostModel`. Of a policy, what depends on it in leaps is exact; of a method, it is what most policies do."""

    # Sizes, in bytes -------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        """Bytes of a layer, on the average of all."""
        layers = self.shape.layers
        return self._layer_bytes(self.shape, late=False) + late_layers(layers) / layers * self.late_bytes

    @property
    def largest_layer_bytes(self) -> float:
        return self._layer_bytes(self.shape.largest, late=True)

    @property
    def late_bytes(self) -> float:
        """Bytes that a late layer has more than another."""
        return self._layer_bytes(self.shape, late=True) - self._layer_bytes(self.shape, late=False)

    def _layer_bytes(self, shape: ModelShape, *, late: bool) -> float:
        bits = self.weight_bits if self.method.compress_weights else None
        return shape.packed_bytes(bits, shape.layers - 1 if late else -1)[0]  # before the first, none is late

    @property
    def head_bytes(self) -> float:
        """The head and the embedding stay as they are."""
        return self.shape.head_bytes

    @property
    def page_bytes(self) -> int:
        """A plain page of the cache: 64 positions of a sequence in a layer."""
        return round_up(PAGE_TOKENS * self.shape.kv_token_bytes)

    @property
    def sealed_bytes(self) -> int:
        """A full page, packed as csrc/attention/page_format.h says: keys by channel, values by position."""
        if not self.method.compress_cache:
            return self.page_bytes
        shape = self.shape
        codes = PAGE_TOKENS * codes_nbytes(shape.head_dim, self.cache_bits)
        keys, values = codes + 4 * in_units(shape.head_dim), codes + 4 * PAGE_TOKENS * -(-shape.head_dim // GROUP)
        return round_up(shape.kv_heads * (keys + (0 if shape.latent else values)))

    @property
    def head_tier(self) -> str:
        return "g" if self.policy is None else self.policy.head_tier

    # Compute ---------------------------------------------------------------------------------------------------

    def _products_s(self, params: float, rows: float, *, packed: bool, decoding: bool = False) -> float:
        """`rows` token rows through `params` weights, in parts."""
        rate = self.hardware.gemm
        if packed and self.hardware.packed_gemm is not None:
            rate = self.hardware.packed_gemm
        if packed and decoding and self.hardware.decoded_gemm is not None:
            rate = self.hardware.decoded_gemm
        full, rest = divmod(rows, ROWS_TOGETHER)
        seconds = full * 2 * params * ROWS_TOGETHER / rate.at(ROWS_TOGETHER)
        return seconds + (2 * params * rest / rate.at(rest) if rest else 0.0)

    def _touched_s(self, values: float) -> float:
        """Seconds to read and write so many values of the model's dtype."""
        nbytes = values * self.shape.dtype_bytes
        rate = self.hardware.elementwise or self.hardware.device_bandwidth
        return nbytes / rate.at(max(nbytes, 1.0))

    def _layer_s(self, rows: int, *, decoding: bool = False) -> float:
        """Seconds that a batch's rows take in a layer, but for attention."""
        shape = self.shape
        values = 10 * shape.hidden + 6 * shape.query_dim + 10 * shape.kv_dim + (2 + shape.gated) * shape.ffn_active
        packed = self.method.compress_weights or bool(shape.stored)
        # An expert is multiplied by the tokens that go to it; those that no token goes to are not.
        used = shape.ffn_active / shape.ffn
        touched = 1 - (1 - used) ** rows
        dense, ffn = shape.layer_params - shape.ffn_params, shape.ffn_params * touched
        seconds = self._products_s(dense, rows, packed=packed, decoding=decoding)
        seconds += self._products_s(ffn, rows * used / touched, packed=packed, decoding=decoding)
        # A token reads its sequence's state and writes it.
        states = 2 * shape.state_bytes / shape.layers / shape.dtype_bytes
        return seconds + self._touched_s(rows * (values + states)) + self.hardware.square_s

    def _seal_s(self, tokens: float) -> Linear:
        """Packing so many tokens' keys and values, or copying those that go to disk."""
        nbytes = tokens * self.shape.kv_token_bytes
        if self.method.compress_cache and self.hardware.seal is not None:
            return constant(nbytes / self.hardware.seal.at(self.page_bytes))
        return CD * self._touched_s(2 * nbytes / self.shape.dtype_bytes)

    def _copied_s(self, nbytes: float) -> float:
        return self._touched_s(2 * nbytes / self.shape.dtype_bytes)

    # Stages of a layer, over a whole block ---------------------------------------------------------------------

    @cached_property
    def head_step(self) -> dict[str, Linear]:
        rows, shape = self.method.gpu_batch, self.shape
        seconds = self._products_s(shape.vocab * shape.hidden, rows, packed=False) + self._touched_s(
            3 * rows * shape.vocab
        )
        read = self.head_bytes / self.hardware.dtoc.at(self.head_bytes) if self.head_tier == "d" else 0.0
        return self._stages(read=constant(read), written=constant(0), comp=constant(seconds * self.method.num_batches))

    @property
    def _keeping(self) -> float:
        """A block's sequences that keep keys and values in a layer, on the average of all layers."""
        return self.method.block_size * self.shape.kept_layers / self.shape.layers

    @cached_property
    def prefill(self) -> dict[str, Linear]:
        hw, s, block = self.hardware, self.workload.prompt_len, self.method.block_size
        keeping = self._keeping
        sealed = keeping * (s // PAGE_TOKENS) * self.sealed_bytes
        hidden = block * s * self.shape.activation_token_bytes
        attention = 4 * keeping * s * s * self.shape.query_dim / hw.bmm.at(s)
        comp = constant(self.method.num_batches * self._layer_s(self.method.gpu_batch * s) + attention)
        comp += self._seal_s(keeping * (s // PAGE_TOKENS) * PAGE_TOKENS) + WC * self._copied_s(self.weight_bytes)
        comp += (HC + HD) * (2 * self._copied_s(hidden))
        return self._stages(
            read=WD * self._read_s(self.weight_bytes) + HD * self._read_s(hidden, self.method.num_batches),
            written=CD * self._write_s(sealed, block) + HD * self._write_s(hidden, self.method.num_batches),
            comp=comp,
        )

    @cached_property
    def decode(self) -> dict[str, Linear]:
        block, context = self.method.block_size, self.workload.mean_context
        hidden = block * self.shape.activation_token_bytes
        # On the average half of the last page is filled; it is in memory.
        pages = max(0.0, context / PAGE_TOKENS - 0.5)
        keeping = self._keeping
        read = keeping * pages * self.sealed_bytes
        comp = constant(
            self.method.num_batches * self._layer_s(self.method.gpu_batch, decoding=True) + self._attention_s(context)
        )
        comp += self._seal_s(keeping) + WC * self._copied_s(self.weight_bytes)
        comp += (HC + HD) * (2 * self._copied_s(hidden))
        return self._stages(
            read=WD * self._read_s(self.weight_bytes)
            + CD * self._read_s(read, self.method.num_batches)
            + HD * self._read_s(hidden, self.method.num_batches),
            written=CD * self._write_s(keeping * self.sealed_bytes / PAGE_TOKENS, keeping / PAGE_TOKENS)
            + HD * self._write_s(hidden, self.method.num_batches),
            comp=comp,
        )

    def _attention_s(self, context: float) -> float:
        """Every sequence's new token attending to its cache, in one layer."""
        hw, shape = self.hardware, self.shape
        nbytes = self._keeping * context * shape.kv_token_bytes * self._read_share
        rate = hw.cpu_attention
        if self.method.compress_cache and hw.packed_attention is not None:
            rate = hw.packed_attention
        flops = 4 * self._keeping * context * shape.query_dim * self._read_share
        return max(nbytes / rate.at(nbytes / self.method.num_batches), flops / hw.bmm.at(PAGE_TOKENS))

    def _read_s(self, nbytes: float, transfers: float = 1) -> float:
        """Reading `nbytes` in `transfers` equal parts."""
        return nbytes / self.hardware.dtoc.at(max(1.0, nbytes / max(1, transfers)))

    def _write_s(self, nbytes: float, transfers: float = 1) -> float:
        return nbytes / self.hardware.ctod.at(max(1.0, nbytes / max(1.0, transfers)))

    @staticmethod
    def _stages(*, read: Linear, written: Linear, comp: Linear) -> dict[str, Linear]:
        return {"ctog": constant(0), "gtoc": constant(0), "dtoc": read, "ctod": written, "comp": comp}

    # What overlaps ---------------------------------------------------------------------------------------------

    def _bounds(self, layer: dict[str, Linear]) -> list[Linear]:
        """A layer's share of a step, which is the largest of these. The head is spread over the layers."""
        head = self.head_step
        comp = layer["comp"] + head["comp"] / self.shape.layers
        disk = layer["dtoc"] + layer["ctod"] + (head["dtoc"] + head["ctod"]) / self.shape.layers
        if not self.method.overlap:
            return [comp + disk]
        # Beside each other products run at 1 - takes of their rate and the disk at 1 - loses of its own; what is left
        # of the longer one then runs alone.
        takes, loses = self.hardware.read_takes, self.hardware.read_loses
        return [comp + disk * (takes / (1 - loses)), disk + comp * (loses / (1 - takes))]

    def prefill_bounds(self) -> list[Linear]:
        return self._bounds(self.prefill)

    def decode_bounds(self) -> list[Linear]:
        return self._bounds(self.decode)

    def head_bounds(self) -> list[Linear]:
        """Nothing: the head is in the others."""
        return [constant(0)]


def cost_model(shape: ModelShape, hardware: Hardware, workload: Workload, method: Method, **settings: int) -> CostModel:
    """The cost model of the machine's kind. `settings`: weight_bits, cache_bits, blocks_in_flight."""
    if hardware.device == "cpu":
        return HostCostModel(shape=shape, hardware=hardware, workload=workload, method=method, **settings)
    return CostModel(shape=shape.widened, hardware=hardware, workload=workload, method=method, **settings)
