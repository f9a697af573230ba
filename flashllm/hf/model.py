"""`FlashModel.from_pretrained`: an ordinary Hugging Face causal LM whose FFN neurons stay on flash.

Built on the meta device, so no dense weight ever exists; resident tensors are assigned from anonymous memory, FFNs and
linears replaced by ours. `generate`, sampling, streamers and evaluation harnesses see the Hugging Face class they know.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from flashllm import _core
from flashllm.arch.registry import attention_shape, spec_of
from flashllm.base.machine import available_nbytes, num_cores, process_nbytes
from flashllm.base.units import parse_size
from flashllm.config import Ablation
from flashllm.convert.locate import resolve_model
from flashllm.device.choice import choose_reader, find_costs
from flashllm.device.costs import Backend
from flashllm.device.store import device_store_path
from flashllm.engine.attention import ATTENTION_NAME, PlannedAttention, register_attention
from flashllm.engine.build import Engine
from flashllm.engine.decoder import FlashLayerMixin, NativeDecoder
from flashllm.engine.dense import TORCH_DTYPES
from flashllm.engine.ffn import Mode
from flashllm.engine.linear import FlashLinear
from flashllm.engine.norm import FlashNorm
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import Manifest, open_model_dir, reads_ahead
from flashllm.format.model_files import CONFIG
from flashllm.format.popularity import read_popularity
from flashllm.plan.memory import CACHE_POLICIES, MemoryPlan, plan_memory


class FlashMixin:
    """What the Hugging Face class gains: the engine, and passes that know how many tokens are new."""

    engine: Engine
    flash_attend: Any

    def forward(
        self, input_ids: torch.Tensor | None = None, *, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As the Hugging Face class. At most K0 new tokens a sequence use the predictor (design contract 2)."""
        self._check_open()
        given = input_ids if input_ids is not None else inputs_embeds
        cache = kwargs.get("past_key_values")
        self.engine.begin_pass(0 if cache is None else cache.get_seq_length(), 0 if given is None else given.shape[1])
        try:
            with torch.inference_mode():
                return super().forward(input_ids, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.engine.interrupt()
            raise

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Hugging Face class, over the KV cache of the memory plan unless `past_key_values` is given.

        That cache is closed at the end, also where the output refers to it: to go on from it, pass `new_cache()`.
        """
        self._check_open()
        if kwargs.get("past_key_values") is not None or not kwargs.get("use_cache", True):
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        cache = self.new_cache()
        try:
            return super().generate(*args, **{**kwargs, "past_key_values": cache})  # type: ignore[misc]
        finally:
            self.release_cache(cache)

    def new_cache(self) -> Cache:
        """An empty KV cache over the planned memory; one is open at a time."""
        self._check_open()
        return self.engine.kv_memory.new_cache()

    def release_cache(self, cache: Cache) -> None:
        """Close a cache of `new_cache`, so that another can be made. Once more is harmless."""
        self.engine.kv_memory.release(cache)

    def _check_open(self) -> None:
        if self.engine.closed:
            raise UsageError("the model is closed; load it again with FlashModel.from_pretrained")


class _Weights:
    """The resident parameters, to be let go of."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def release(self) -> None:
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


class FlashModel:
    """Entry point; see `from_pretrained`."""

    @staticmethod
    def from_pretrained(
        path: str | Path | None = None,
        *,
        memory: int | str | None = None,
        window: int | None = None,
        cache_policy: str = CACHE_POLICIES[0],
        threads: int | None = None,
        io_threads: int | None = None,
        io_backend: Backend | None = None,
        store: str | Path | None = None,
        mode: str = "sparse",
        context: int | None = None,
        direct: bool = True,
        verify_checksums: bool = True,
        batch: int = 1,
        ablation: Ablation | None = None,
    ) -> Any:
        """Load a model directory: a Hugging Face causal LM with `.engine`; close it with `model.engine.close()`.

        Args:
            path: model directory, Hugging Face folder or hub id (converted on first use); None: the bundled demo.
            memory: limit for everything the process holds, in bytes or as "7GB"; None: four fifths of what is free.
            cache_policy: which neurons stay cached: "frequency" (those active most often), or "window" (those of the
                last tokens: paper A, section 3.1).
            window: its tokens; under another policy, the prompt's last tokens from which the cache is filled.
            threads: compute threads.
            io_threads: reads at a time; io_backend: "threads" or "io_uring" makes them; None: as calibrated, else 32
                threads.
            store: calibrations of drives (`flashllm calibrate`); None: the user's.
            mode: "sparse", "oracle" (exact ReLU mask) or "dense".
            context: tokens of KV cache; None: the model's limit.
            direct: read past the page cache; False: through it.
            batch: sequences computed together at most.
            ablation: parts to switch off in a measurement.

        Raises:
            UsageError, BudgetError, FormatError, FlashIOError, UnsupportedModelError: each says what to do.
        """
        directory = resolve_model(None if path is None else str(path))
        manifest, config = open_model_dir(directory), read_config(directory)
        try:
            chosen = Mode(mode)
        except ValueError:
            raise UsageError(f"--mode must be one of {', '.join(Mode)}, not {mode!r}") from None
        threads = threads if threads is not None else num_cores()
        if threads < 1:
            raise UsageError(f"--threads must be at least 1, not {threads}")
        costs, problem = find_costs(directory, device_store_path() if store is None else Path(store))
        reader = choose_reader(costs, manifest.rows.stride, io_threads=io_threads, direct=direct, io_backend=io_backend)
        plan = plan_memory(
            manifest,
            config,
            limit=parse_size(memory) if isinstance(memory, str) else memory,
            available=available_nbytes(),
            process=process_nbytes(),
            context=context,
            window=window,
            cache_policy=cache_policy,
            popularity=read_popularity(directory, manifest),
            io_threads=reader.depth,
            max_gap=reader.max_gap,
            batch=batch,
            early=chosen is Mode.SPARSE and reads_ahead(directory, manifest),
        )
        engine = Engine(
            directory,
            manifest,
            plan,
            attention_shape(config),
            mode=chosen,
            threads=threads,
            reader=reader,
            direct=direct,
            verify_checksums=verify_checksums,
            batch=batch,
            ablation=ablation,
        )
        if problem is not None:
            engine.notices.append(problem)
        try:
            return _build_model(directory, manifest, config, plan, engine)
        except BaseException:
            engine.close()
            raise


def read_config(directory: Path) -> dict[str, Any]:
    """The model's config.json as a plain dictionary."""
    config: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return config


def _build_model(
    directory: Path, manifest: Manifest, config: dict[str, Any], plan: MemoryPlan, engine: Engine
) -> PreTrainedModel:
    register_attention()
    hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    hf_config._attn_implementation = ATTENTION_NAME
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    flash_class = type(f"Flash{base.__name__}", (FlashMixin, base), {})
    dtype = TORCH_DTYPES[manifest.dtype]

    # 1. The Hugging Face skeleton, without memory. Nothing is to be initialised: trying loads half a compiler.
    with torch.device("meta"), no_init_weights():
        model = flash_class(hf_config).to(dtype)
    # 2. FFNs, linears and norms become ours; layers too, where one new token runs through them in one call.
    spec = spec_of(manifest.architecture.model_type)
    for layer, ffn in zip(model.get_submodule(spec.layers_module), engine.ffns, strict=True):
        layer.set_submodule(spec.ffn_module, ffn)
        for name in spec.silenced_modules:
            layer.set_submodule(name, nn.Identity())
    replaced = _replace_modules(model, dtype)
    layers = list(model.get_submodule(spec.layers_module).children())
    block = spec.decoder_block if engine.mode is Mode.SPARSE else None
    if block is not None:
        layer_class = type(f"Flash{type(layers[0]).__name__}", (FlashLayerMixin, type(layers[0])), {})
        for layer in layers:
            layer.__class__ = layer_class
    # 3. Resident tensors are assigned, never copied.
    missing, unexpected = model.load_state_dict(engine.tensors, strict=False, assign=True)
    model.tie_weights()
    left = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if left or unexpected:
        raise FormatError(
            f"{directory}: resident weights do not fit the architecture (missing {left[:3]}, unknown "
            f"{unexpected[:3]}); convert the model again"
        )
    del missing  # the tied head is listed there although it is in place
    engine.tensors.clear()
    model.requires_grad_(False)
    model.eval()
    # 4. The native kernels over what is now in place.
    for module in replaced:
        if isinstance(module, FlashLinear):
            module.attach(engine.pool, engine.meter, manifest.sparse_prefill_tokens)
        else:
            module.attach(dtype, engine.pool, engine.meter)
    shape = attention_shape(config)
    attention: dict[str, Any] = {
        "heads": int(hf_config.num_attention_heads),
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "dtype": manifest.dtype,
        "pool": engine.pool,
        "counters": engine.meter.native,
    }
    attend = PlannedAttention(engine.meter, _core.Attention(max_length=plan.context, **attention), plan.context)
    engine.adopt(*replaced, attend, _Weights(model))
    if block is not None:
        native = _core.Decoder(
            d_model=manifest.rows.d_model,
            context=plan.context,
            batch=engine.kv_memory.batch,
            query_scale=shape.head_dim**-0.5,
            **attention,
        )
        decoder = NativeDecoder(native, engine.kv_memory, few_tokens=manifest.sparse_prefill_tokens)
        engine.adopt(decoder)
        for layer, ffn in zip(layers, engine.ffns, strict=True):
            decoder.add(layer, block, ffn)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.flash_attend = attend
    model.engine = engine
    if (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return cast(PreTrainedModel, model)


def _replace_modules(model: nn.Module, dtype: torch.dtype) -> list[FlashLinear | FlashNorm]:
    replaced: list[FlashLinear | FlashNorm] = []
    for name, module in list(model.named_modules()):
        ours: FlashLinear | FlashNorm
        if type(module) is nn.Linear:
            ours = FlashLinear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        elif type(module) is nn.LayerNorm:
            affine, bias = module.elementwise_affine, module.bias is not None
            ours = FlashNorm(module.normalized_shape, module.eps, affine, bias, device="meta")
        else:
            continue
        model.set_submodule(name, ours.to(dtype))
        replaced.append(ours)
    return replaced
