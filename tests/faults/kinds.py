"""Kinds of inputs, each with right bytes, and with those parsers that meet such inputs first."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # for written.py
import gguf_files
import predictor_files
from arch_models import Variant, make_checkpoint
from damage import rehash
from profiles import profile_of, reader
from tiny_models import make_tiny_opt

from flashllm.api.requests import CHAT_ALONE
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.plan import plan_conversion
from flashllm.convert.run import convert
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.predictors import check_predictors_header
from flashllm.format.safetensors import read_header
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.jobs.requests import parse_request
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import MACHINES
from flashllm.offload.policy import Policy
from flashllm.profile.store import device_of, load_profile, save_profile
from flashllm.serve.bodies import parse


@dataclass(frozen=True)
class Kind:
    """Inputs of one kind. `use` has it parsed; what it raises is judged."""

    base: bytes
    use: Callable[[bytes], object]
    names: str  # what a refusal must say: a part of a file's name; empty for requests
    is_json: bool = True
    source: Path | None = None  # the model directory, or what is converted, that holds the last bytes used


def at_file(path: Path, use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A `Kind.use` that writes the bytes to `path` and has that read."""

    def call(raw: bytes) -> object:
        path.write_bytes(raw)
        return use(path)

    return call


def at_listed_file(path: Path, use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """As `at_file`, of a file of a model directory whose hash is made right; `use` takes the directory."""

    def rehashed(path: Path) -> object:
        rehash(path.parent, path.name)
        return use(path.parent)

    return at_file(path, rehashed)


def make_kinds(root: Path) -> dict[str, Kind]:
    """Every kind, of tiny files under `root`."""
    hf, model = make_tiny_opt(root / "hf"), root / "model"
    convert(hf, model)
    predictor_files.install("exact", hf, model, root)
    manifest = Manifest.load(model)
    kinds: dict[str, Kind] = {}

    def open_all(directory: Path) -> None:
        opened = ModelDir.open(directory)
        Tokenizer.load(directory).encode("The little dog")
        header = read_header(directory / "predictors.safetensors")
        check_predictors_header(header, opened.manifest.layouts, header_sha)

    header_sha = manifest.files["ffn.safetensors"].sha256
    # 1. The manifest, without its own hash: else that is all that would be looked at.
    copy = Path(shutil.copytree(model, root / "of manifest"))
    raw = json.loads((model / "flashllm.json").read_text())
    raw.pop("sha256")
    base = json.dumps(raw).encode()
    use = at_file(copy / "flashllm.json", lambda path: open_all(path.parent))
    kinds["manifest"] = Kind(base, use, str(copy), source=copy)
    # 2. Every other file of a model directory, its hash right.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "resident.safetensors", "ffn.safetensors", "predictors.safetensors"):  # fmt: skip
        copy = Path(shutil.copytree(model, root / f"of {name}"))
        use = at_listed_file(copy / name, open_all)
        kinds[f"model directory: {name}"] = Kind(
            (model / name).read_bytes(), use, "config.json|" + str(copy), name.endswith(".json"), copy
        )

    # 3. A Hugging Face folder.
    def plan(path: Path) -> None:
        with open_checkpoint(path) as checkpoint:
            plan_conversion(checkpoint)

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = Path(shutil.copytree(hf, root / f"hf {name}"))
        kinds[f"checkpoint: {name}"] = Kind(
            (hf / name).read_bytes(),
            at_file(folder / name, lambda path: plan(path.parent)),
            "config.json|" + str(folder),
            name.endswith(".json"),
            folder,
        )
    # 4. A GGUF file.
    llama = make_checkpoint(root / "llama", Variant("llama", {"hidden_act": "silu"}))
    source = gguf_files.write_gguf(llama, root / "tiny.gguf")
    mutant = root / "mutant.gguf"

    kinds["GGUF"] = Kind(source.read_bytes(), at_file(mutant, plan), str(mutant), False, mutant)
    # 5. Profiles, policies.
    store, key = root / "profiles.json", device_of(root)
    save_profile(store, key, profile_of(reader()))
    kinds["profile"] = Kind(
        store.read_bytes(), at_file(root / "d.json", lambda path: load_profile(path, key)), "d.json"
    )
    hardware = json.dumps(next(iter(MACHINES.values())).to_json()).encode()
    kinds["hardware file"] = Kind(hardware, at_file(root / "m.json", Hardware.load), "m.json")
    policy = Policy(gpu_batch=4, num_batches=2, wg=0.2, wc=0.3, wd=0.5, cg=0.0, cc=1.0, cd=0.0, hg=0.0, hc=1.0, hd=0.0)
    kinds["policy"] = Kind(json.dumps(policy.to_json()).encode(), at_file(root / "p.json", Policy.load), "p.json")
    # 6. Lines of batch files, bodies of requests.
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {
        "model": "tiny", "messages": said, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["a"],
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "n": 1,
        "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}},
        "thinking_token_budget": 3,
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {name: value for name, value in body.items() if not name.startswith("stream")}}  # fmt: skip
    kinds["batch line"] = Kind(
        json.dumps(line).encode(), lambda raw: parse_request(raw, 7, text=False, max_new_tokens=8), ""
    )
    options = SamplingOptions()
    kinds["chat request"] = Kind(
        json.dumps(body).encode(), lambda raw: parse(raw, "chat", custom_id="a", defaults=options), ""
    )
    completion = {**body, "prompt": ["hello", "there"], "logprobs": 2, "echo": False}
    for name in (*CHAT_ALONE, "messages", "top_logprobs"):
        completion.pop(name)
    kinds["completion request"] = Kind(
        json.dumps(completion).encode(), lambda raw: parse(raw, "completion", custom_id="a", defaults=options), ""
    )
    return kinds
