"""llama.cpp's logits and flashllm's of the same GGUF file: whether both mean the same model by it.

    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf
    python bench/peer/peer_logits.py
    python bench/peer/peer_logits.py --only deepseek2 qwen35
    python bench/peer/peer_logits.py some.gguf other.gguf

Without files: tiny random models of the architectures below, in fp32, that the tests' writer makes (gguf_files.py, by
llama.cpp's converter); a misreading that writer and reader share shows here. Both get the same random ids as one
prompt; activations and cache are in fp32. Of those in Q4_K and TQ2_0 llama.cpp gets the same weights in fp32, as it
multiplies codes by inputs of 8 bits. Prints at how many positions both have the same likeliest token, and the mean of
KL(llama.cpp || flashllm) in nats. The last line is one JSON document; exit status 1 where a model is refused, or
where less than 99 % agree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import numpy as np
from numpy.typing import NDArray

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model

_HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # llama.cpp knows one size
_TWICE = {"mamba_expand": 2, "mamba_n_heads": 4}  # the width: llama.cpp knows no other of Granite's
_DEPTH = {"scale_depth": 1.4, "dim_model_base": 256}  # MiniCPM 3's, which no file says
_MINICPM3 = {
    **_DEPTH,
    "v_head_dim": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.25, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 512,
    },
    "max_position_embeddings": 512,
}
_FULL, _SLIDES = "full_attention", "sliding_attention"
_SHARED = {"layer_types": [_SLIDES, _SLIDES, _FULL, _SLIDES, _FULL]}  # llama.cpp takes the last two that have any
_GEMMA3N = {  # llama.cpp knows the published models' numbers alone, whose layers share from the 21st on
    "num_hidden_layers": 22,
    "num_kv_shared_layers": 2,
    "layer_types": [*[*[_SLIDES] * 4, _FULL] * 4, _SLIDES, _SLIDES],
    "final_logit_softcapping": 30.0,
    "intermediate_size": 2048,  # it divides the gates' squares by one less
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 300,
}
_MELLUM = [_SLIDES, _SLIDES, _FULL]
_ROPE = {"rope_type": "default", "rope_theta": 500.0}  # of both: llama.cpp knows one base
_MELLUM_ROPE = {
    "full_attention": _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "sliding_attention": _ROPE,
}
_WINDOWS = {"num_hidden_layers": 5, "layer_types": None, "sliding_window": 50}
_THREE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_COMMAND = {**_WINDOWS, "num_hidden_layers": 6, "expert_selection_fn": "sigmoid", "mlp_layer_types": None}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> variant, its config, how written
    "llama": ("llama", {}, {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    "qwen2vl": ("qwen2", {}, {"architecture": "qwen2vl"}),
    "qwen3vl": ("qwen3", {}, {"architecture": "qwen3vl"}),
    "qwen3vlmoe": ("qwen3_moe", {"norm_topk_prob": True}, {"architecture": "qwen3vlmoe"}),
    "mellum": ("mellum", {"layer_types": _MELLUM, "rope_parameters": _MELLUM_ROPE, "mlp_layer_types": None}, {}),
    "hy_v3": ("hy_v3", {}, {}),
    "hy_v3, scaled, two shared": ("hy_v3", {"router_scaling_factor": 2.5, "num_shared_experts": 2}, {}),
    "deepseek2 v2": ("deepseek_v2", {}, {}),
    "deepseek2 v2, whole kv_b": ("deepseek_v2", {}, {"whole_latent": True}),
    "deepseek2 v2, yarn": ("deepseek_v2 yarn rope", {}, {}),
    "deepseek2 v3": ("deepseek_v3", {}, {}),
    "deepseek2 GLM-4.7-Flash": ("glm4_moe_lite", {}, {}),
    "deepseek2 youtu": ("youtu", {}, {}),
    "minicpm3": ("minicpm3", {"v_head_dim": 16, **_DEPTH}, {}),
    "minicpm3, longrope": ("minicpm3", _MINICPM3, {}),
    "qwen3next": ("qwen3_next", _HEADS, {}),
    "qwen35": ("qwen3_5", _HEADS, {}),
    "qwen35 one value head a key": ("qwen3_5", _HEADS | {"linear_num_value_heads": 2}, {}),
    "qwen35moe": ("qwen3_5_moe", _HEADS, {}),
    "glm4moe": ("glm4_moe", {}, {}),
    "glm4moe, norms of heads": ("glm4_moe norms of heads, biases", {}, {}),
    "glm4moe, groups": ("glm4_moe groups", {}, {}),
    "ernie4_5-moe": ("ernie4_5_moe", {}, {}),
    "minimax-m2": ("minimax_m2 half turned", {}, {}),
    "mimo2": ("mimo_v2_flash", {}, {}),
    "mimo2, values not scaled": ("mimo_v2_flash", {"attention_value_scale": None}, {}),
    "dots1": ("dots1", {"num_key_value_heads": 4}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "granitemoe, shared": ("granitemoeshared", {}, {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}, {}),
    "exaone-moe": ("exaone_moe", {"num_hidden_layers": 5, "sliding_window_pattern": 4, "layer_types": None}, {}),
    "afmoe": ("afmoe", _WINDOWS, {}),
    "bailingmoe2": ("bailing_moe", {}, {}),
    "kimi-linear": ("kimi_linear", {"rms_norm_eps": 1e-6}, {}),
    "laguna": ("laguna", {}, {}),
    "laguna, gate of every number": (
        "laguna gate of every number",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 0},
        {},
    ),
    "exaone4": ("exaone4 without windows", {}, {}),
    "cohere2": ("cohere2", _WINDOWS, {}),
    "cohere2moe": ("cohere2_moe", _COMMAND, {}),
    "cohere2moe, root mean squares, dense layers": (
        "cohere2_moe",
        _COMMAND | {"first_k_dense_replace": 2, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "intermediate_size": 80},
        {},
    ),
    "glm4": ("glm4", {}, {}),
    "glm4, positions in three dimensions": ("glm4", {"rope_parameters": _THREE}, {}),
    "seed_oss": ("seed_oss", {"attention_out_bias": False, "mlp_bias": False}, {}),
    "ernie4_5": ("ernie4_5", {"use_bias": False}, {}),
    "gemma3n": ("gemma3n", _GEMMA3N, {}),
    "gemma4": ("gemma4", {}, {}),
    "gemma4, shared keys, rows of ids": ("gemma4 shared keys, rows of ids", _SHARED, {}),
    "gemma4, experts": ("gemma4 experts", {}, {}),
    "nemotron_h": ("nemotron_h dense, biases", {"use_bias": False}, {}),
    "nemotron_h_moe": ("nemotron_h", {"hybrid_override_pattern": "ME*EMM"}, {}),
    "nemotron_h_moe, one group": ("nemotron_h", {"hybrid_override_pattern": "ME*EMM", "n_groups": 1}, {}),
    "granitehybrid": ("granitemoehybrid", _TWICE, {}),
    "granitehybrid, dense": ("granitemoehybrid", _TWICE | {"num_local_experts": 0, "intermediate_size": 80}, {}),
    "granitehybrid, Bamba turned whole": (  # of half a head llama.cpp turns other pairs than the model's own code
        "bamba",
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 1.0}, **_TWICE},
        {},
    ),
    "falcon-h1": ("falcon_h1", {}, {}),
    "falcon-h1, norm": ("falcon_h1 gate first", {"projectors_bias": False}, {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"attention_bias": False}, {}),
    "mistral3": ("ministral3", {}, {}),
    "mistral3, before it": ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "mistral4": ("mistral4", {}, {}),
    "mistral4, groups": ("mistral4 groups", {"q_lora_rank": 24}, {}),
    "lfm2": ("lfm2", {}, {}),
    "lfm2moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}, {}),
}
_SIZES = dict.fromkeys(
    ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256
) | {"shared_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256, "num_attention_heads": 8}
ARCHITECTURES |= {
    f"{name} Q4_K": (ARCHITECTURES[name][0], ARCHITECTURES[name][1] | _SIZES | config, {})
    for name, config in (
        ("qwen3next", {"head_dim": 32, "linear_num_value_heads": 16}),
        ("qwen35", {"head_dim": 32, "linear_num_value_heads": 16}),
        ("qwen35moe", {"head_dim": 32, "linear_num_value_heads": 16}),
        ("nemotron_h_moe", {"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 64}),
        ("granitehybrid", {"mamba_n_heads": 8, "mamba_d_head": 64}),
        ("falcon-h1", {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512}),
    )
}
_TERNARY = {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 512}
ARCHITECTURES["llama TQ2_0"] = ("llama", {"hidden_act": "silu"} | _SIZES | _TERNARY, {})
CODED = {"Q4_K": "MOSTLY_Q4_K_M", "TQ2_0": "MOSTLY_TQ2_0"}  # by the end of a name
LEAST = 0.99  # of the positions have the same likeliest token


def llama_logits(path: Path, ids: list[int], out: Path) -> None:
    """llama.cpp's logits at each position, written to `out`, [positions, vocab]."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(
        lambda level, text, data: sys.stderr.write(text.decode(errors="replace")) and None if level == 4 else None
    )
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if model is None:
        raise OSError(f"{path}: llama.cpp cannot load it")
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = len(ids)
    context_params.type_k = context_params.type_v = llama_cpp.GGML_TYPE_F32
    context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, context_params)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
        batch.seq_id[at][0] = 0
    if status := llama_cpp.llama_decode(context, batch):
        raise OSError(f"llama_decode returned {status}")
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), (vocab,)) for at in range(len(ids))]
    np.save(out, np.stack(rows))


def requantised(path: Path, kind: str) -> Path:
    """The file in Q4_K_M, or ALL_F32, by llama.cpp."""
    import llama_cpp

    to, params = path.with_stem(kind), llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}"), 1, True
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    if status := llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(to), params):
        raise OSError(f"{path}: llama.cpp cannot quantise it: {status}")
    return to


def own_logits(directory: Path, ids: list[int]) -> NDArray[np.float32]:
    """flashllm's, of a converted directory."""
    with Model.open(directory, RunConfig(threads=1, mode="dense")) as model:
        logits: NDArray[np.float32] = model.step([(model.new_sequence(), ids)], all_logits=True)
        return logits


def compare(name: str, path: Path, count: int) -> dict[str, Any]:
    """Both engines' logits of the file `path` at `count` positions; "refused" where one does not run it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        directory, out = Path(folder) / "model", Path(folder) / "logits.npy"
        convert(path, directory, dtype="float32")
        vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        ids = np.random.default_rng(1).integers(4, vocab, count).tolist()
        theirs_of = requantised(path, "ALL_F32") if name.endswith(tuple(CODED)) else path
        command = [sys.executable, __file__, str(theirs_of), "--ids", json.dumps(ids), "--out", str(out)]
        run = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)  # it may abort
        if run.returncode:
            return {"refused": " ".join(run.stderr.split())[:300]}
        theirs, ours = np.load(out).astype(np.float64), own_logits(directory, ids).astype(np.float64)
    p, q = (each - np.log(np.exp(each - (top := each.max(1, keepdims=True))).sum(1, keepdims=True)) - top
            for each in (theirs, ours))  # fmt: skip
    return {
        "top_1": float((theirs.argmax(1) == ours.argmax(1)).mean()),
        "kl": float((np.exp(p) * (p - q)).sum(1).mean()),
        "largest_difference": float(np.abs(theirs - ours).max()),
        "positions": count,
    }


def calm_streams(source: Path) -> None:
    """Weaken what steers Gemma 3n's streams: of the tests' tiny model it makes, over 22 layers, another token of
    llama.cpp's GELU out of a table in fp16 and of its deviations over one gate less."""
    from safetensors.numpy import load_file, save_file

    path = source / "model.safetensors"
    state = {name: 0.1 * each if "modality_router" in name else each for name, each in load_file(path).items()}
    save_file(state, path, {"format": "pt"})


def tiny_files(root: Path, only: list[str]) -> Iterator[tuple[str, Path]]:
    """(name, file) of each tiny model whose name begins with one of `only`."""
    from arch_models import VARIANTS, Variant, make_checkpoint
    from gguf_files import write_gguf

    for name, (variant, config, how) in ARCHITECTURES.items():
        if only and not name.startswith(tuple(only)):
            continue
        folder = root / name.replace(" ", "-")
        tiny = VARIANTS.get(variant, Variant(variant))
        source = make_checkpoint(folder / "hf", Variant(tiny.model_type, {**tiny.config, **config}))
        if name == "gemma3n":
            calm_streams(source)
        path = write_gguf(source, folder / "model.gguf", **how)
        kind = CODED.get(name.rpartition(" ")[2])
        yield name, path if kind is None else requantised(path, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--only", nargs="*", default=[], help="tiny models whose names begin so")
    parser.add_argument("--positions", type=int, default=150)
    parser.add_argument("--ids", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ids is not None:
        try:
            llama_logits(args.files[0], args.ids, args.out)
        except OSError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as root:
        files = [(path.name, path) for path in args.files] or tiny_files(Path(root), args.only)
        for name, path in files:
            result = results[name] = compare(name, path, args.positions)
            figures = result.get("refused") or f"top-1 {100 * result['top_1']:5.1f} %, mean KL {result['kl']:.1e}"
            print(f"{name:28s} {figures}", flush=True)
    print(json.dumps(results))
    return 0 if all(result.get("top_1", 0) >= LEAST for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
