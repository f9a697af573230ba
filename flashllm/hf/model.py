"""`FlashModel`: a Hugging Face causal LM whose tokens the engine computes.

`generate` with its strategies, sampling, streamers, pipelines and evaluation harnesses see the interface they know.
Translates between batches of padded columns (theirs) and sequences of tokens (the engine's); computes nothing itself.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.base.files import Closing
from flashllm.base.units import parse_size
from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.engine.model import Model
from flashllm.engine.passes import Logits
from flashllm.errors import UsageError
from flashllm.generate.grammar import Constraint, Grammars
from flashllm.generate.tokenizer import Tokenizer
from flashllm.hf.cache import Columns, FlashCache
from flashllm.hf.fixed import FixedModel
from flashllm.hf.grammar import GrammarLogits
from flashllm.hf.torch_threads import one_torch_thread

_IGNORED = -100  # a label that does not count


class FlashModel(FixedModel, Closing):  # type: ignore[no-untyped-call]
    """A causal LM over `engine`; a context manager, which closes it. Made by `from_pretrained`."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: str | Path | None = None, *, config: RunConfig | None = None, **options: Any
    ) -> Self:
        """Load a model. Its class is a FlashModel by the name of its architecture, which is what pipelines go by.

        Args:
            path: model directory, Hugging Face folder or hub id (converted on first use); None: the bundled demo.
            config: how to run it; None: as `RunConfig()` says.
            options: fields of `RunConfig`, in place of those of `config`; `memory` also as text like "7GB", `store`
                also as text.

        Raises:
            UsageError, BudgetError, FormatError, FlashIOError, UnsupportedModelError: each says what to do.
        """
        known = [field.name for field in dataclasses.fields(RunConfig)]
        for name in options:
            if name not in known:
                raise UsageError(f"FlashModel.from_pretrained knows no {name!r}; its options are {', '.join(known)}")
        if isinstance(options.get("memory"), str):
            options["memory"] = parse_size(options["memory"])
        if isinstance(options.get("store"), str):
            options["store"] = Path(options["store"])
        run = dataclasses.replace(config if config is not None else RunConfig(), **options)
        if run.speculate != "off":
            raise UsageError("a FlashModel drafts no tokens: leave speculate out, and give generate an assistant_model")
        engine = Model.open(resolve_model(None if path is None else str(path)), run)
        try:
            model_type = engine.manifest.architecture.model_type
            name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, cls.__name__)
            return cast(type[Self], type(name, (cls,), {"__doc__": cls.__doc__}))(engine)
        except BaseException:
            engine.close()
            raise

    def new_cache(self) -> FlashCache:
        """An empty KV cache, to be given as `past_key_values`; there may be many."""
        return FlashCache(self.engine)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache_position: torch.Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Logits of the model's dtype, [batch, columns kept, vocab]; zeros where a column is padding.

        Rows of at most K0 new tokens run in the model's mode, others as prompts, whatever else is in the batch (design
        contract 2). There are no gradients.

        Args:
            input_ids: [batch, columns] new tokens.
            attention_mask: [batch, columns so far + new], 0 for padding, which stands before or after a row's tokens.
            position_ids: as they follow from the mask; others are refused.
            past_key_values: a `FlashCache` of this model.
            labels: [batch, columns], -100 where none; the loss leaves padding out.
            logits_to_keep: so many last columns, or these; 0: all.
            cache_position: not used; older transformers pass it.

        Raises:
            UsageError, TypeError: arguments that cannot be.
            ContextFull, FlashIOError, ChecksumError, FormatError: as `Model.step`; the cache is as it was.
        """
        if output_attentions or output_hidden_states:
            raise UsageError("attentions and hidden states are not given out; take them from the original model")
        if inputs_embeds is not None:
            raise UsageError("inputs_embeds are not supported: give input_ids")
        ids = _checked_ids(input_ids)
        cache = self._checked_cache(past_key_values, rows=len(ids))
        new = _new_columns(attention_mask, cache, ids)
        _check_positions(position_ids, cache, new)
        kept = _kept_columns(logits_to_keep, ids.shape[1])
        if labels is not None:
            _check_labels(labels, ids, kept)

        last_only = kept == [ids.shape[1] - 1]
        if last_only and ids.shape[1] > 1 and not new[:, -1].all():
            raise UsageError("a row ends in padding, so nothing can follow it: pad on the left")
        tokens = [row[columns].tolist() for row, columns in zip(ids, new, strict=True)]
        computed = cache.run(tokens, new, all_logits=not last_only)
        logits = self._assembled(computed, new, kept)

        loss = None if labels is None else self._loss(logits, labels, new)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Hugging Face's, without the tokenizers that `generate` hands on and no model takes."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        return {name: value for name, value in inputs.items() if not name.endswith("tokenizer")}

    def generate(self, *args: Any, schema: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """As Hugging Face's, over a KV cache of its own unless `past_key_values` is given.

        With a JSON `schema` what follows the prompt is valid by it; UsageError where no answer can be held to it.
        Meanwhile torch computes with one thread (`flashllm.hf.torch_threads`), but for an assistant model.
        """
        given = [kwargs.get("generation_config", args[1] if len(args) > 1 else None), self.generation_config]

        def chosen(name: str) -> Any:
            values = (kwargs.get(name), *(getattr(config, name, None) for config in given))
            return next((value for value in values if value is not None), None)

        if chosen("cache_implementation") is not None:
            raise UsageError("cache_implementation is not supported: the KV cache is the engine's; leave it out")
        if chosen("assistant_early_exit") is not None:
            raise UsageError("assistant_early_exit is not supported: a pass goes through all layers; use a small model")
        if schema is not None:
            inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            processor = self._held_to(schema, _checked_ids(inputs).shape[1])
            kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or ()), processor]
        if kwargs.get("past_key_values") is None and chosen("use_cache") is not False:
            kwargs["past_key_values"] = self.new_cache()
        if kwargs.get("assistant_model") is not None:  # it may need torch's threads
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        with one_torch_thread:
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _held_to(self, schema: Mapping[str, Any], prompt_columns: int) -> GrammarLogits:
        tokenizer = Tokenizer.load(self.engine.directory.path)
        grammars = Grammars(tokenizer.backend, tokenizer.end_ids, self.engine.vocab_size)
        matcher = grammars.start(Constraint.of_schema(dict(schema)))
        return GrammarLogits(matcher, prompt_columns, tokenizer.end_ids)

    def close(self) -> None:
        """Release threads, files and memory. The model cannot be used afterwards; once more is harmless."""
        self.engine.close()

    def _checked_cache(self, given: Cache | None, *, rows: int) -> FlashCache:
        if given is None:
            return self.new_cache()
        if not isinstance(given, FlashCache) or given.engine is not self.engine:
            raise UsageError(
                f"past_key_values is a {type(given).__name__}, not of this model: take one from model.new_cache(), or "
                "the one that a pass returned"
            )
        if given.batch_size not in (-1, rows):
            raise UsageError(
                f"past_key_values has {given.batch_size} rows and input_ids {rows}: they must be the same "
                "(past_key_values.batch_repeat_interleave repeats rows)"
            )
        return given

    def _assembled(self, computed: list[Logits], new: Columns, kept: list[int]) -> torch.Tensor:
        """[rows, columns kept, vocab] from each row's logits, which are of its tokens or of the last one alone.

        In numpy: torch would leave threads behind that spin while the engine's work.
        """
        dtype = self.engine.directory.dtype
        values = np.zeros((len(new), len(kept), self.engine.vocab_size), dtype.storage)
        for row, logits in enumerate(computed):
            after = np.cumsum(new[row]) - new[row].sum() + len(logits) - 1  # a column's token, among those with logits
            places = [place for place, column in enumerate(kept) if new[row, column]]
            if places:
                values[row, places] = cast_dtype(
                    logits[after[[kept[i] for i in places]]], WEIGHT_DTYPES["float32"], dtype
                )
        return torch.from_numpy(values).view(self.dtype)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, new: Columns) -> torch.Tensor:
        """Mean cross entropy of the tokens whose predecessor is a token too."""
        counts = torch.from_numpy(new.copy())
        counts[:, 1:] &= torch.from_numpy(new[:, :-1])
        labels = labels.masked_fill(~counts, _IGNORED)
        loss: torch.Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=self.engine.vocab_size)
        return loss


def _checked_ids(input_ids: torch.Tensor | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    if input_ids is None:
        raise UsageError("input_ids are missing")
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be a tensor, not a {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids must be int64 or int32, not {input_ids.dtype}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise UsageError(f"input_ids must be [batch, columns], at least one of each, not {list(input_ids.shape)}")
    return input_ids.cpu().numpy().astype(np.int64)


def _new_columns(mask: torch.Tensor | None, cache: FlashCache, ids: np.ndarray[Any, Any]) -> Columns:
    """Which of the new columns are tokens."""
    rows, new = ids.shape
    past = cache.get_seq_length()
    held = cache.columns if past else np.zeros((rows, 0), np.bool_)
    if mask is None:
        columns = np.concatenate([held, np.ones((rows, new), np.bool_)], axis=1)
    elif tuple(mask.shape) != (rows, past + new):
        raise UsageError(
            f"attention_mask must be {[rows, past + new]}, for {past} columns in past_key_values and {new} new ones, "
            f"not {list(mask.shape)}"
        )
    else:
        columns = mask.cpu().numpy() != 0
    if not np.array_equal(columns[:, :past], held):
        raise UsageError("attention_mask differs from the one that past_key_values was computed with")
    starts = np.diff(columns.astype(np.int8), axis=1, prepend=0) == 1
    if (starts.sum(axis=1) > 1).any():
        raise UsageError("there is padding between a row's tokens: pad on the left")
    return columns[:, past:]


def _check_positions(position_ids: torch.Tensor | None, cache: FlashCache, new: Columns) -> None:
    if position_ids is None:
        return
    held = np.array(cache.lengths or [0] * len(new))
    expected = held[:, None] + np.cumsum(new, axis=1) - 1
    rows, columns = new.shape
    fits = tuple(position_ids.shape) in ((rows, columns), (1, columns))
    if not fits or not np.array_equal(
        position_ids.cpu().numpy().repeat(rows // len(position_ids), 0)[new], expected[new]
    ):
        raise UsageError("position_ids must count each row's tokens from where it stands: leave them out")


def _check_labels(labels: torch.Tensor, ids: np.ndarray[Any, Any], kept: list[int]) -> None:
    if labels.shape != ids.shape:
        raise UsageError(f"labels must be {list(ids.shape)}, as input_ids are, not {list(labels.shape)}")
    if len(kept) != ids.shape[1]:
        raise UsageError("labels need the logits of every column: leave logits_to_keep out")


def _kept_columns(logits_to_keep: int | torch.Tensor, count: int) -> list[int]:
    if isinstance(logits_to_keep, int):
        return list(range(count))[-logits_to_keep:]
    columns: list[int] = torch.arange(count)[logits_to_keep].tolist()
    return columns
