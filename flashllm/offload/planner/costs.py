"""The cost model of paper B, appendix A.3: stage times of a block as affine forms in the nine fractions.

Everything that is not a fraction (model, machine, workload, batches, methods) is fixed when a `CostModel` is made, so
rates may depend on sizes and the forms stay linear. Memory is counted in `peaks`; nothing is searched here.

Added to the letter of A.3, each because a figure of the paper needs it (bench/offload/offload_plan.py compares):
1. rates depend on the size of a transfer or a GEMM, and a GEMM never outruns the device reading its weights;
2. `serial-load`: weights arriving from the CPU do not overlap the rest of a decoding step;
3. embeddings and the output head are stored, loaded and computed;
4. attention of the prompt runs on the device wherever the cache lives, so its score matrix counts whole;
5. without CPU attention the cache travels to the device, which A.3 leaves out; grouped-query and gated models; 4 bit.
"""

from dataclasses import dataclass
from functools import cached_property

from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.planner.linear import CC, CD, CG, HC, HD, WC, WD, Linear, constant
from flashllm.offload.policy import Method, Policy, Workload
from flashllm.offload.shape import ModelShape

# 4 bits a value, and a minimum and a scale of 16 bits for each group of 64 (section 5): 4.5 of 16 bits.
COMPRESSED = (4 + 2 * 16 / 64) / 16
# Bytes moved for each uncompressed byte when 4 bits are expanded by plain tensor operations, counted for a value of
# 2 bytes: splitting a packed byte, two reads and writes of half a byte (2), interleaving (2), scaling to 16 bits (3),
# adding the minimum (4), a copy into the layout the GEMM wants (4): 15 bytes. No figure of the paper isolates it.
DEQUANT_TRAFFIC = 7.5

_SOFTMAX_PASSES = 6  # scores written, masked (read, write), normalised (read, write), read by the second product

STAGES = ("ctog", "gtoc", "dtoc", "ctod", "comp")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Stage times of one method, or of a whole policy, on one machine: seconds, one layer, one block."""

    shape: ModelShape
    hardware: Hardware
    workload: Workload
    method: Method
    blocks_in_flight: int = 1  # blocks whose cache is held at once: as many as a pipeline has stages
    weight_bits: int = 4  # of compressed ones; the paper's forms have 4 alone
    cache_bits: int = 4

    @property
    def policy(self) -> Policy | None:
        """The policy that is priced, where it is known."""
        return self.method if isinstance(self.method, Policy) else None

    @property
    def sequences(self) -> int:
        """Those whose cache is held at once."""
        return self.method.block_size * self.blocks_in_flight

    # Sizes, in bytes -------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        return self.shape.layer_bytes * (COMPRESSED if self.method.compress_weights else 1)

    @property
    def head_bytes(self) -> float:
        return self.shape.head_bytes * (COMPRESSED if self.method.compress_weights else 1)

    @property
    def embedding_bytes(self) -> float:
        return self.shape.embedding_bytes * (COMPRESSED if self.method.compress_weights else 1)

    @property
    def cache_token_bytes(self) -> float:
        return self.shape.kv_token_bytes * (COMPRESSED if self.method.compress_cache else 1)

    @property
    def _read_share(self) -> float:
        """Share of key and value bytes that attention reads: all keys, and the top values (section 5)."""
        return (1 + self.method.attention_sparsity) / 2

    # Links: seconds for a byte, at the size one transfer has ---------------------------------------------------

    @property
    def _weight_unit(self) -> float:
        return self.weight_bytes / len(self.shape.matrix_params)

    def _cache_unit(self, tokens: float) -> float:
        return self.method.gpu_batch * tokens * self.cache_token_bytes / 2  # keys and values travel apart

    def _activation_unit(self, tokens: float) -> float:
        return self.method.gpu_batch * tokens * self.shape.activation_token_bytes

    # Compute ---------------------------------------------------------------------------------------------------

    def _gemm_seconds(self, params: int, rows: int) -> float:
        """One multiplication of `rows` by `params` weights: bound by arithmetic or by reading the weights."""
        hardware, nbytes = self.hardware, params * self.shape.dtype_bytes
        return max(2 * params * rows / hardware.gemm.at(rows), nbytes / hardware.device_bandwidth.at(nbytes))

    def _dequant_seconds(self, nbytes: float) -> float:
        return DEQUANT_TRAFFIC * nbytes / self.hardware.device_bandwidth.at(nbytes)

    def _elementwise_seconds(self, rows: int, context: int) -> float:
        """Norms, residuals, activation, layout copies and softmax: values read or written, all bound by memory."""
        shape = self.shape
        values = rows * (12 * shape.hidden + 2 * shape.ffn + 4 * shape.kv_dim + _SOFTMAX_PASSES * shape.heads * context)
        nbytes = values * shape.dtype_bytes
        return nbytes / self.hardware.device_bandwidth.at(nbytes)

    def _layer_seconds(self, rows: int) -> float:
        """A block's linear layers in one transformer layer, `rows` token rows a GPU batch."""
        one = self._gemm_seconds(self.shape.layer_params, rows)
        if self.method.compress_weights:  # expanded again for each GPU batch: the device keeps them packed
            one += self._dequant_seconds(self.shape.layer_bytes)
        return one * self.method.num_batches

    @cached_property
    def head_step(self) -> dict[str, Linear]:
        """Stages of the output head, once for every generated token of a block."""
        rows, hw = self.method.gpu_batch, self.hardware
        compute = self._gemm_seconds(self.shape.vocab * self.shape.hidden, rows) * self.method.num_batches
        return {
            "ctog": (WC + WD) * (self.head_bytes / hw.ctog.at(max(1.0, self.head_bytes))),
            "gtoc": constant(0),
            "dtoc": WD * (self.head_bytes / hw.dtoc.at(max(1.0, self.head_bytes))),
            "ctod": constant(0),
            "comp": constant(compute),
        }

    @cached_property
    def prefill(self) -> dict[str, Linear]:
        """The five stages of one layer in prefill (A.3, superscript p)."""
        hw, s, block = self.hardware, self.workload.prompt_len, self.method.block_size
        weight, weight_unit = self.weight_bytes, self._weight_unit
        cache, cache_unit = block * (s + 1) * self.cache_token_bytes, self._cache_unit(s)
        hidden, hidden_unit = block * s * self.shape.activation_token_bytes, self._activation_unit(s)
        attention = 4 * block * s * s * self.shape.query_dim / hw.bmm.at(s)
        attention += self.method.num_batches * self._elementwise_seconds(self.method.gpu_batch * s, s)
        if self.method.compress_cache:
            attention += self._dequant_seconds(block * s * self.shape.kv_token_bytes)
        return {
            "ctog": (WC + WD) * (weight / hw.ctog.at(weight_unit)) + (HC + HD) * (hidden / hw.ctog.at(hidden_unit)),
            "gtoc": (CC + CD) * (cache / hw.gtoc.at(cache_unit)) + (HC + HD) * (hidden / hw.gtoc.at(hidden_unit)),
            "dtoc": WD * (weight / hw.dtoc.at(weight_unit)) + HD * (hidden / hw.dtoc.at(hidden_unit)),
            "ctod": CD * (cache / hw.ctod.at(cache_unit)) + HD * (hidden / hw.ctod.at(hidden_unit)),
            "comp": constant(self._layer_seconds(self.method.gpu_batch * s) + attention),
        }

    @cached_property
    def decode(self) -> dict[str, Linear]:
        """The five stages of one layer in an average decoding step (A.3, superscript g)."""
        hw, block, context = self.hardware, self.method.block_size, self.workload.mean_context
        weight, weight_unit = self.weight_bytes, self._weight_unit
        hidden, hidden_unit = block * self.shape.activation_token_bytes, self._activation_unit(1)
        read = block * context * self.cache_token_bytes * self._read_share
        read_unit, new, new_unit = self._cache_unit(context), block * self.cache_token_bytes, self._cache_unit(1)
        query = block * self.shape.query_dim * self.shape.dtype_bytes
        full = block * context * self.shape.kv_token_bytes * self._read_share  # what attention sees, uncompressed
        full_unit = self.method.gpu_batch * context * self.shape.kv_token_bytes

        flops = 4 * block * context * self.shape.query_dim
        on_device = max(full / hw.device_bandwidth.at(full_unit), flops / hw.bmm.at(1))
        on_cpu = full / hw.cpu_attention.at(full_unit)
        if self.method.compress_cache:
            on_device += self._dequant_seconds(full)
            on_cpu += DEQUANT_TRAFFIC * full / hw.cpu_bandwidth.at(full_unit)

        ctog = (WC + WD) * (weight / hw.ctog.at(weight_unit)) + (HC + HD) * (hidden / hw.ctog.at(hidden_unit))
        gtoc = (CC + CD) * (new / hw.gtoc.at(new_unit)) + (HC + HD) * (hidden / hw.gtoc.at(hidden_unit))
        comp = constant(self._layer_seconds(self.method.gpu_batch))
        if self.method.cpu_attention:  # queries go down, attention's output comes up
            ctog += (CC + CD) * (query / hw.ctog.at(hidden_unit))
            gtoc += (CC + CD) * (query / hw.gtoc.at(hidden_unit))
            comp += CG * on_device + (CC + CD) * on_cpu
        else:
            ctog += (CC + CD) * (read / hw.ctog.at(read_unit))
            comp += on_device
        return {
            "ctog": ctog,
            "gtoc": gtoc,
            "dtoc": CD * (read / hw.dtoc.at(read_unit))
            + WD * (weight / hw.dtoc.at(weight_unit))
            + HD * (hidden / hw.dtoc.at(hidden_unit)),
            "ctod": CD * (new / hw.ctod.at(new_unit)) + HD * (hidden / hw.ctod.at(hidden_unit)),
            "comp": comp,
        }

    # What overlaps ---------------------------------------------------------------------------------------------

    def prefill_bounds(self) -> list[Linear]:
        """Tpre is the largest of these."""
        t = self.prefill
        if not self.method.overlap:
            return [t["ctog"] + t["gtoc"] + t["dtoc"] + t["ctod"] + t["comp"]]
        if self.hardware.combine == "a3":
            return list(t.values())
        return [t["ctog"] + t["dtoc"], t["gtoc"] + t["ctod"], t["comp"]]

    def _step_bounds(self, t: dict[str, Linear]) -> list[Linear]:
        if not self.method.overlap:
            return [t["ctog"] + t["gtoc"] + t["dtoc"] + t["ctod"] + t["comp"]]
        if self.hardware.combine == "a3":
            return list(t.values())
        return [t["ctog"] + t[stage] for stage in ("gtoc", "dtoc", "ctod", "comp")]

    def decode_bounds(self) -> list[Linear]:
        """Tgen is the largest of these."""
        return self._step_bounds(self.decode)

    def head_bounds(self) -> list[Linear]:
        """Time of the output head, once a generated token, is the largest of these."""
        return self._step_bounds(self.head_step)
