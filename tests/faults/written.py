"""Kinds of what flashllm writes and reads back, and of checkpoints of other forms. `every_kind` has all kinds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import torch
from activity_trace import Trace
from arch_models import Variant, make_checkpoint
from install_popularity import install_popularity
from kinds import Kind, at_file, at_listed_file, make_kinds
from safetensors.torch import load_file
from traces import write_trace

from flashllm.config import RunConfig
from flashllm.convert.checkpoint import pickled
from flashllm.convert.checkpoint.child import ChildFailed
from flashllm.convert.checkpoint.folder import INDEX, PICKLED_INDEX, PICKLED_SINGLE, SINGLE
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.plan import plan_conversion
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FlashError
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_dir import ModelDir, read_plane
from flashllm.format.model_files import POPULARITY, RESIDENT
from flashllm.format.partial import open_partial
from flashllm.format.popularity import read_popularity
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.jobs.answers import failure
from flashllm.offload.jobs.lines import Line
from flashllm.offload.jobs.results import Results
from flashllm.offload.shape import load_shape
from flashllm.parked.file import identity, read_parked, write_parked
from flashllm.serve.dialects import ollama

CODED = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "hidden_act": "silu"}  # fmt: skip


def every_kind(root: Path) -> dict[str, Kind]:
    """Every kind of input, of tiny files under `root`."""
    return {**make_kinds(root), **_of_checkpoints(root), **_of_coded_models(root), **_of_data(root)}


def _as_a_child(function: Callable[..., Any], *arguments: str) -> Any:
    """As `ask_child`, in this process: what torch makes of a torn file is no FlashError there either."""
    try:
        return function(*arguments)
    except FlashError:
        raise
    except Exception as error:
        raise ChildFailed(str(error)) from error


def _plan(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        plan_conversion(checkpoint)


def _of_checkpoints(root: Path) -> dict[str, Kind]:
    """Indices of shards, and weights that torch pickled: both read here and not in a child."""
    pickled.ask_child = _as_a_child
    hf, kinds = root / "hf", {}
    state = load_file(hf / SINGLE)
    for index, shard in ((INDEX, "model-00001-of-00001.safetensors"), (PICKLED_INDEX, "pytorch_model-00001.bin")):
        folder = Path(shutil.copytree(hf, root / f"hf {index}"))
        (folder / SINGLE).rename(folder / shard)
        if index == PICKLED_INDEX:
            torch.save(state, folder / shard)
        base = json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, shard)}).encode()
        kinds[f"checkpoint: {index}"] = Kind(
            base, at_file(folder / index, lambda path: _plan(path.parent)), str(folder), source=folder
        )
    folder = Path(shutil.copytree(hf, root / "hf pickled", ignore=shutil.ignore_patterns(SINGLE)))
    torch.save(dict(list(state.items())[:3]), folder / PICKLED_SINGLE)  # of a whole one the pickle is long

    def open_only(path: Path) -> None:
        with open_checkpoint(path.parent):
            pass

    kinds[f"checkpoint: {PICKLED_SINGLE}"] = Kind(
        (folder / PICKLED_SINGLE).read_bytes(), at_file(folder / PICKLED_SINGLE, open_only), str(folder), False, folder
    )
    kinds["shape of a model"] = Kind(
        (hf / "config.json").read_bytes(), at_file(root / "shape.json", lambda path: load_shape(str(path))), "shape"
    )
    return kinds


def _of_coded_models(root: Path) -> dict[str, Kind]:
    """A quantised GGUF file, and the model directory that keeps its codes, with scales in planes."""
    source = make_checkpoint(root / "wide", Variant("llama", CODED))
    gguf = gguf_files.write_gguf(source, root / "coded.gguf", "Q4_K")
    model = root / "coded"
    convert(gguf, model, keep=True)
    assert Manifest.load(model).rows.has_plane
    mutant = root / "mutant of codes.gguf"
    kinds = {"GGUF of codes": Kind(gguf.read_bytes(), at_file(mutant, _plan), "mutant", False, mutant)}

    def open_all(directory: Path) -> None:
        opened = ModelDir.open(directory)
        for layer in range(opened.manifest.architecture.num_layers):
            read_plane(directory, opened.manifest, layer)

    copy = Path(shutil.copytree(model, root / "of planes"))
    use = at_listed_file(copy / RESIDENT, open_all)
    kinds["model directory with planes: resident.safetensors"] = Kind(
        (model / RESIDENT).read_bytes(), use, str(copy), False, copy
    )
    other = Path(shutil.copytree(model, root / "of planes' manifest"))
    manifest = json.loads((model / MANIFEST).read_text())
    manifest.pop("sha256")
    kinds["manifest with planes"] = Kind(
        json.dumps(manifest).encode(),
        at_file(other / MANIFEST, lambda path: open_all(path.parent)),
        str(other),
        source=other,
    )
    return kinds


def _of_data(root: Path) -> dict[str, Kind]:
    """Shares of neurons, saved conversations, a conversion's journal, a batch job's answers; Ollama's requests."""
    kinds = {}
    # 1. How often neurons fire, the file's hash right.
    copy = Path(shutil.copytree(root / "model", root / "of popularity"))
    with Trace(write_trace(root / "of shares", np.random.default_rng(1).random((4, 2, 256)) < 0.2)) as trace:
        install_popularity(copy, trace)
    shares = at_listed_file(copy / POPULARITY, lambda copy: read_popularity(copy, Manifest.load(copy)))
    kinds["popularity"] = Kind((copy / POPULARITY).read_bytes(), shares, str(copy), False, copy)
    # 2. A saved conversation, taken up by a model that stays open.
    model = Model.open(root / "model", RunConfig(io_threads=1, threads=1))
    tokenizer, options = Tokenizer.load(root / "model"), SamplingOptions(max_new_tokens=2, ignore_eos=True)
    session, name = Session(model, tokenizer, options), identity(root / "model", "sparse")
    list(session.stream("The little dog ran"))
    write_parked(root / "saved.kv", session, name, {"text": "The little dog"})
    taken_up = Session(model, tokenizer, options)
    kinds["saved conversation"] = Kind(
        (root / "saved.kv").read_bytes(),
        at_file(root / "mutant.kv", lambda path: read_parked(path, taken_up, name)), "mutant.kv", False,
    )  # fmt: skip
    # 3. The journal of a conversion that was broken off.
    partial, made_of = root / "broken.partial", {"source": "hf", "version": 1}
    with open_partial(partial, root / "broken", made_of) as begun:
        begun.record({"file": "ffn.safetensors", "layer": 0, "nbytes": 4096, "state": "00ff"})
    (journal,) = partial.iterdir()

    def resume(path: Path) -> None:
        with open_partial(path.parent, root / "broken", made_of):
            pass

    kinds["journal of a conversion"] = Kind(journal.read_bytes(), at_file(journal, resume), str(partial))
    # 4. Answers of a batch job, to go on with.
    lines = [
        Line(number=n, offset=0, nbytes=9, custom_id=f"r{n}", identity=f"{n:024}", prompt_tokens=3, max_new_tokens=3,
             is_batch=True)
        for n in range(3)
    ]  # fmt: skip
    out, source = root / "answers.jsonl", root / "asked.jsonl"
    source.write_text("{}")
    with Results.open(out, lines, source=source, resume=False) as results:
        results.append([failure(line, 500, "it failed") for line in lines[:2]])

    def go_on(path: Path) -> None:
        with Results.open(path, lines, source=source, resume=True):
            pass

    kinds["answers of a batch job"] = Kind(out.read_bytes(), at_file(root / "mutant.jsonl", go_on), "mutant.jsonl")
    # 5. A body of Ollama's interface.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": False,
            "options": {"temperature": 0.5, "top_p": 0.9, "num_predict": 5, "seed": 1, "stop": ["a"]}}  # fmt: skip
    kinds["Ollama request"] = Kind(
        json.dumps(body).encode(), lambda raw: ollama._understand(raw, SamplingOptions()), ""
    )
    return kinds
