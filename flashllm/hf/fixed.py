"""`FixedModel`: a Hugging Face model without torch parameters. What it says of itself, and what it cannot do.

Its weights are the engine's, partly on flash: they cannot be moved, cast, resized, trained or saved from here, and
every call that asks for it is an error that says what to do instead.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PreTrainedModel

from flashllm.arch.registry import resident_shapes
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UsageError
from flashllm.format.model_files import CONFIG, GENERATION_CONFIG

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CPU = torch.device("cpu")


def _refusal(message: str) -> Callable[..., Any]:
    """A method that is a UsageError; {path} in the message is the model's directory."""

    def refuse(self: "FixedModel", *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(message.format(path=self.engine.directory.path))

    return refuse


class FixedModel(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Configuration, device and dtype of an engine's model, and refusals."""

    def __init__(self, engine: Model) -> None:
        """Around `engine`, with its directory's configurations. FormatError where transformers has no use for them."""
        path = engine.directory.path
        config = _read_config(AutoConfig, path, CONFIG)
        config._attn_implementation = "eager"  # ours; this name asks nothing of transformers
        super().__init__(config)
        self.engine = engine
        self.loss_type = "ForCausalLM"
        if (path / GENERATION_CONFIG).exists():
            self.generation_config = _read_config(GenerationConfig, path, GENERATION_CONFIG)
        super().train(False)

    @property
    def device(self) -> torch.device:
        return _CPU

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights kept in memory, the KV cache and the logits."""
        return TORCH_DTYPES[self.engine.manifest.dtype]

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Weights of the model, those on flash included; a tied head counts once. None is trainable."""
        if only_trainable:
            return 0
        manifest = self.engine.manifest
        counts = {name: math.prod(shape) for name, shape in resident_shapes(self.engine.directory.config).items()}
        if exclude_embeddings:
            counts = {
                name: count for name, count in counts.items() if name.split(".")[0] not in ("embedding", "positions")
            }
        rows = manifest.rows
        return sum(counts.values()) + manifest.architecture.neurons * len(rows.matrices) * rows.d_model

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes the process holds at most, by the memory plan."""
        return self.engine.plan.memory.total_nbytes

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the engine ties them."""

    # What cannot be done

    def to(self, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Itself, for its own device and dtype; UsageError for others."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        self._check_place(device, dtype)
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        self._check_place(torch.device("cuda"), None)
        raise AssertionError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """`half`, `float`, `bfloat16` and the like come here."""
        moved = fn(torch.empty(0, dtype=self.dtype))
        self._check_place(moved.device, moved.dtype)
        return self

    def _check_place(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        if device is not None and device.type != "cpu":
            raise UsageError(
                f"the model runs on the processor and cannot go to {device}; give device='cpu' to what moves it "
                "(a pipeline, an evaluation harness)"
            )
        if dtype is not None and dtype != self.dtype:
            raise UsageError(
                f"the model's weights are {_short(self.dtype)} on flash and cannot become {_short(dtype)}; convert a "
                "checkpoint of that dtype (`flashllm convert`)"
            )

    def train(self, mode: bool = True) -> Self:
        """UsageError for `mode` True: its weights cannot learn."""
        if mode:
            raise UsageError("the model cannot be trained; train the original, and convert it (`flashllm convert`)")
        return super().train(False)  # type: ignore[no-any-return]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """UsageError for True: its weights have no gradients."""
        if requires_grad:
            raise UsageError("the model has no gradients; train the original, and convert it (`flashllm convert`)")
        return self

    resize_token_embeddings = _refusal(
        "the vocabulary is fixed; resize the original's embeddings, and convert it (`flashllm convert`)"
    )
    get_input_embeddings = set_input_embeddings = _refusal(
        "the model has no torch modules: its embedding is the engine's; take the original's"
    )
    get_output_embeddings = set_output_embeddings = _refusal(
        "the model has no torch modules: its head is the engine's; take the original's"
    )
    save_pretrained = push_to_hub = state_dict = _refusal(  # type: ignore[assignment]
        "the model has no torch weights to save: the directory {path} is the model, copy that; converting it back to a "
        "Hugging Face folder is not offered"
    )
    load_state_dict = _refusal("weights cannot be loaded into this model; convert a checkpoint (`flashllm convert`)")
    generate_batch = init_continuous_batching = _refusal(
        "continuous batching is not supported: call generate with a padded batch"
    )
    __reduce_ex__ = _refusal("the model cannot be copied or pickled: load it where it is needed")


def _read_config(kind: Any, path: Path, name: str) -> Any:
    """A configuration of transformers', of a file that our own checks have passed."""
    try:
        return kind.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise FormatError(f"{path / name}: transformers cannot use it: {error}") from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
