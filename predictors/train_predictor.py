"""Train the activity predictors of a converted model, layer by layer, on the machine that will run it.

The hidden states of all samples lie in scratch files and pass one layer at a time: its neurons stream from flash once a
batch, its FFN inputs and active sets are recorded, its predictor is fitted and calibrated, and the states go on to the
next layer. Finished layers are kept in the scratch directory, so a killed run resumes at the layer it was in.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fit import FitOptions, LayerPredictor, LayerQuality, Unpack, calibrate_threshold, fit, judge, low_rank_start
from numpy.typing import NDArray
from samples import DataError, SampleReport, read_hub, read_shards, token_rows
from transformers import AutoTokenizer

from flashllm import FlashModel
from flashllm.budget import DEFAULT_WINDOW
from flashllm.demo import resolve_model
from flashllm.errors import FlashError
from flashllm.manifest import Calibration, install_predictors
from flashllm.model_files import FFN
from flashllm.units import format_size

VALIDATION_SHARE = 0.1
BATCH_TOKENS = 4096  # of the passes through a layer


class _Captured(Exception):
    """Raised once the first layer's inputs are known."""


class HiddenStates:
    """Hidden states of all samples, [samples, tokens, d_model] in the model's dtype, in a scratch file a layer."""

    def __init__(self, scratch: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self._scratch, self._shape, self._dtype = scratch, shape, dtype
        self._bits = np.uint32 if dtype == torch.float32 else np.uint16

    def open(self, layer: int, mode: str) -> torch.Tensor:
        """The states that enter `layer`, as a tensor over the file."""
        raw = np.memmap(self._path(layer), dtype=self._bits, mode=mode, shape=self._shape)  # type: ignore[call-overload]
        return torch.from_numpy(raw).view(self._dtype)

    def forget(self, layer: int) -> None:
        self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self._scratch / f"states.{layer}.bin"


class LayerPass:
    """Sends hidden states through single decoder layers of a loaded model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = model.get_decoder().layers
        self._arguments: dict[int, dict[str, Any]] = {}  # by batch size

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The states that enter layer 0; remembers the other arguments a layer is called with."""
        found: list[torch.Tensor] = []

        def capture(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0])
            self._arguments[len(args[0])] = {**kwargs, "past_key_values": None, "use_cache": False}
            raise _Captured

        handle = self._layers[0].register_forward_pre_hook(capture, with_kwargs=True)
        try:
            self._model(ids, use_cache=False)
        except _Captured:
            pass
        finally:
            handle.remove()
        return found[0]

    @torch.inference_mode()
    def run(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]]:
        """(states after the layer, FFN inputs [tokens, d_model], bit-packed active sets [tokens, d_ff / 8])."""
        ffn = self._model.engine.ffns[layer]
        d_ff = self._model.engine.manifest.architecture.d_ff
        active = np.zeros((states.shape[0] * states.shape[1], d_ff), dtype=bool)
        inputs: list[torch.Tensor] = []

        def observe(first_token: int, first_neuron: int, h: torch.Tensor) -> None:
            active[first_token : first_token + len(h), first_neuron : first_neuron + h.shape[1]] = (h > 0).numpy()

        ffn.observer = observe
        ffn.few_tokens = False
        handle = ffn.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
        try:
            output = self._layers[layer](states, **self._arguments[len(states)])
        finally:
            handle.remove()
            ffn.observer = None
        after = output[0] if isinstance(output, tuple) else output
        return after, inputs[0], np.packbits(active, axis=1)


def choose_rank(ranks: str, layer: int, num_layers: int, d_model: int, activity: float) -> int:
    """A number for all layers, "128:1024x4" (the last four larger), or AUTO: larger where the layer is less sparse."""
    if ranks.upper() == "AUTO":
        share = min(max(2.0 * activity, 0.08), 0.25)  # of d_model
        return max(8, round(share * d_model / 8) * 8)
    common, _, special = ranks.partition(":")
    if special:
        rank, _, last = special.partition("x")
        if layer >= num_layers - int(last):
            return int(rank)
    return int(common)


def needed_rows(predicted: NDArray[np.bool_], window: int) -> int:
    """The most neurons of any `window` consecutive tokens: predicted [samples, tokens, d_ff] (paper A, Req_i)."""
    most = 0
    for sample in predicted:
        counts = np.zeros(sample.shape[1], dtype=np.int32)
        for token in range(len(sample)):
            counts += sample[token]
            if token >= window:
                counts -= sample[token - window]
            most = max(most, int((counts > 0).sum()))
    return most


def train_layer(
    lp: LayerPass,
    states: HiddenStates,
    layer: int,
    *,
    shape: tuple[int, int, int],
    args: argparse.Namespace,
    model: Any,
) -> tuple[LayerPredictor, LayerQuality, float, int]:
    """One layer: pass, fit, calibrate, judge. Returns the predictor, its quality, mean predicted and rows needed."""
    samples, tokens, d_model = shape
    d_ff = model.engine.manifest.architecture.d_ff
    before, after = states.open(layer, "r+"), states.open(layer + 1, "w+")
    inputs = torch.empty((samples * tokens, d_model), dtype=torch.float16 if args.half_inputs else torch.float32)
    masks = np.empty((samples * tokens, (d_ff + 7) // 8), dtype=np.uint8)
    batch = max(1, BATCH_TOKENS // tokens)
    for start in range(0, samples, batch):
        end = min(start + batch, samples)
        after[start:end], x, packed = lp.run(layer, before[start:end].clone())
        inputs[start * tokens : end * tokens] = x.to(inputs.dtype)
        masks[start * tokens : end * tokens] = packed

    train_rows = int(samples * (1 - VALIDATION_SHARE)) * tokens
    packed_masks, unpack = torch.from_numpy(masks), Unpack(d_ff)
    x_train, x_validation = inputs[:train_rows].float(), inputs[train_rows:].float()
    activity = float(unpack(packed_masks[train_rows:]).float().mean())
    rank = min(
        choose_rank(args.ranks, layer, model.engine.manifest.architecture.num_layers, d_model, activity), d_model
    )
    ffn = model.engine.ffns[layer]
    start_point = low_rank_start(ffn.driver_matrix(), ffn.up_bias, x_train, rank)
    options = FitOptions(
        rank=rank, epochs=args.epochs, recall=args.recall, seed=args.seed + layer, positive_weight=args.positive_weight
    )
    predictor = fit(start_point, x_train, packed_masks[:train_rows], options, unpack)
    # The threshold is fitted on the last training samples' positions, judged on samples never seen.
    fitted_on = slice(max(0, train_rows - len(x_validation)), train_rows)
    calibrate_threshold(predictor, inputs[fitted_on].float(), packed_masks[fitted_on], args.recall, unpack)
    quality = judge(predictor, x_validation, packed_masks[train_rows:], unpack)
    with torch.no_grad():
        guesses = predictor.logits(x_validation) > predictor.threshold
    predicted = guesses.reshape(-1, tokens, d_ff).numpy()
    return predictor, quality, float(predicted.sum(-1).mean()), needed_rows(predicted, args.window)


def save_predictors(path: Path, predictors: list[LayerPredictor], model_sha256: str, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for layer, predictor in enumerate(predictors):
        tensors[f"layers.{layer}.a"] = predictor.a.half().contiguous()
        tensors[f"layers.{layer}.b"] = predictor.b.half().contiguous()
        tensors[f"layers.{layer}.bias"] = predictor.bias.float().contiguous()
        tensors[f"layers.{layer}.threshold"] = torch.tensor([predictor.threshold], dtype=torch.float32)
    kind = {"format": "flashllm-predictors", "version": "1", "model_sha256": model_sha256}
    save_file(tensors, path, metadata=kind | metadata)


def load_samples(args: argparse.Namespace, tokenizer: Any) -> tuple[NDArray[np.int64], SampleReport]:
    report = SampleReport()
    if args.data_files:
        texts = read_shards(args.data_files, report, strict=args.strict)
    else:
        texts = iter(
            text for text, _ in zip(read_hub(args.dataset, args.config), range(2 * args.samples), strict=False)
        )
    rows = token_rows(
        texts,
        tokenizer,
        samples=args.samples,
        tokens_per_sample=args.tokens_per_sample,
        report=report,
        seed=args.seed,
    )
    return rows, report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="model directory; the bundled demo by default")
    parser.add_argument("--dataset", default="allenai/c4", help="hub data set, streamed")
    parser.add_argument("--config", default="en")
    parser.add_argument("--data-files", type=Path, nargs="+", help="C4-schema .json(l)(.gz) shards instead")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens-per-sample", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--memory", help="limit for the model while it passes the samples, e.g. 7GB")
    parser.add_argument("--scratch", type=Path, help="default: MODEL.predictors beside the model")
    parser.add_argument("--ranks", default="AUTO", help='AUTO, a number, or "128:1024x4" (the last 4 layers larger)')
    parser.add_argument("--recall", type=float, default=0.97, help="share of truly active neurons to find, per layer")
    parser.add_argument("--positive-weight", type=float, default=4.0)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens, for the calibrated cache need")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="compute threads; the result depends on their number")
    parser.add_argument("--resume", action="store_true", help="go on with the scratch directory of a killed run")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad document")
    parser.add_argument("--half-inputs", action="store_true", help="keep FFN inputs in 16 bit: half the memory")
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    directory = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    scratch = args.scratch or directory.with_name(directory.name + ".predictors")
    if scratch.exists() and not args.resume:
        raise FlashError(f"{scratch} exists: --resume goes on with it, or remove it")
    scratch.mkdir(parents=True, exist_ok=True)
    rows, report = load_samples(args, tokenizer)
    print(report, file=sys.stderr)

    model = FlashModel.from_pretrained(directory, memory=args.memory, mode="dense", threads=args.threads)
    with model.engine:
        architecture = model.engine.manifest.architecture
        shape = (len(rows), rows.shape[1], architecture.d_model)
        states = HiddenStates(scratch, shape, model.dtype)
        scratch_nbytes = 2 * rows.size * architecture.d_model * model.dtype.itemsize
        work_nbytes = rows.size * (architecture.d_model * (2 if args.half_inputs else 4) + architecture.d_ff // 8)
        print(
            f"{len(rows)} samples of {rows.shape[1]} tokens, {architecture.num_layers} layers; scratch "
            f"{format_size(scratch_nbytes)} in {scratch}, one layer's inputs and masks {format_size(work_nbytes)} in memory",
            file=sys.stderr,
        )
        lp = LayerPass(model)
        batch = max(1, BATCH_TOKENS // rows.shape[1])
        results: list[dict[str, Any]] = []
        predictors: list[LayerPredictor] = []
        # 1. The states that enter layer 0, unless a killed run left later ones.
        done = sorted(scratch.glob("layer.*.pt")) if args.resume else []
        for layer in range(len(done)):
            saved = torch.load(scratch / f"layer.{layer:03d}.pt", weights_only=True)
            predictors.append(LayerPredictor(saved["a"], saved["b"], saved["bias"], saved["threshold"]))
            results.append(saved["result"])
        first = states.open(0, "w+") if not done else None
        for start in range(0, len(rows), batch):
            embedded = lp.embed(torch.from_numpy(rows[start : start + batch]))
            if first is not None:
                first[start : start + batch] = embedded
        # 2. Layer by layer.
        for layer in range(len(done), architecture.num_layers):
            began = time.monotonic()
            predictor, quality, mean_active, need = train_layer(lp, states, layer, shape=shape, args=args, model=model)
            result = {**dataclasses.asdict(quality), "mean_active": mean_active, "req": need}
            partial = scratch / "layer.partial"
            torch.save({**dataclasses.asdict(predictor), "result": result}, partial)
            partial.rename(scratch / f"layer.{layer:03d}.pt")
            states.forget(layer)
            predictors.append(predictor)
            results.append(result)
            left = (time.monotonic() - began) * (architecture.num_layers - layer - 1)
            print(
                f"layer {layer}: rank {quality.rank}, active {quality.true_share:.2%}, predicted "
                f"{quality.predicted_share:.2%}, false negatives {quality.false_negative:.2%}, false positives "
                f"{quality.false_positive:.2%}; about {left / 60:.1f} min left",
                file=sys.stderr,
            )
        sha256 = model.engine.manifest.files[FFN].sha256
    # 3. Into the model directory.
    path = scratch / "predictors.safetensors"
    save_predictors(path, predictors, sha256, {"samples": str(len(rows)), "recall": str(args.recall)})
    validation_tokens = (len(rows) - int(len(rows) * (1 - VALIDATION_SHARE))) * rows.shape[1]
    calibration = Calibration(
        window=args.window,
        mean_active=tuple(r["mean_active"] for r in results),
        req=tuple(r["req"] for r in results),
        tokens=validation_tokens,
        text="validation share of the predictors' training samples",
    )
    install_predictors(directory, path, calibration)
    for leftover in scratch.iterdir():
        leftover.unlink()
    scratch.rmdir()
    summary = {"layers": results, "samples": len(rows), "seconds": time.monotonic() - started, "data": str(report)}
    text = json.dumps(summary)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (FlashError, DataError) as error:
        print(f"train_predictor: error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 1)


if __name__ == "__main__":
    sys.exit(main())
