"""Malformed files and requests made by hand, and what the refusal of each must say.

The kinds, their right bytes and who parses them are those of kinds.py; `mutations.py --handmade` tries all, and so does
a test. Each is refused by one typed error that names the file, within a second, without the
memory that its numbers ask for.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Case:
    """One input: the right bytes of `kind` under `change`. `says`: a part of the error."""

    kind: str
    change: Change
    says: str


def put(path: str, value: Any) -> Change:
    """The JSON value at `path` ("a/b/0"; ~ is a / in a name) becomes `value`, or is added."""

    def change(raw: bytes) -> bytes:
        document = json.loads(raw)
        *parents, last = (name.replace("~", "/") for name in path.split("/"))
        place = document
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = value
        return json.dumps(document).encode()

    return change


def without(name: str) -> Change:
    """The JSON object lacks `name`."""

    def change(raw: bytes) -> bytes:
        document = json.loads(raw)
        document.pop(name)
        return json.dumps(document).encode()

    return change


def whole(raw: bytes) -> Change:
    """These bytes instead."""
    return lambda before: raw


def cut(nbytes: int) -> Change:
    """Only the first so many bytes; below 0: all but so many."""
    return lambda before: before[:nbytes]


def first(old: bytes, new: bytes) -> Change:
    """The first `old` is `new`."""

    def change(raw: bytes) -> bytes:
        assert old in raw, old
        return raw.replace(old, new, 1)

    return change


def at(offset: int, form: str, value: int | bytes) -> Change:
    """A binary number, as `struct` writes it, in the place of those bytes."""

    def change(raw: bytes) -> bytes:
        new = value if isinstance(value, bytes) else struct.pack("<" + form, value)
        return raw[:offset] + new + raw[offset + len(new) :]

    return change


def after(name: bytes, skip: int, form: str, value: int) -> Change:
    """As `at`, `skip` bytes behind the first `name`."""

    def change(raw: bytes) -> bytes:
        return at(raw.index(name) + len(name) + skip, form, value)(raw)

    return change


def header(change: Change) -> Change:
    """`change` of a safetensors file's JSON; its length and the data stay right."""

    def whole_file(raw: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", raw[:8])[0]
        new = change(raw[8:end].rstrip(b" "))
        new += b" " * (-(8 + len(new)) % 8)
        return struct.pack("<Q", len(new)) + new + raw[end:]

    return whole_file


HUGE = 2**62
MANIFEST, CHECKPOINT, GGUF = "manifest", "checkpoint: config.json", "GGUF"
SHARD, TRACE, DEVICES = "checkpoint: model.safetensors", "trace", "profile"
MACHINE, POLICY, LINE = "hardware file", "policy", "batch line"
CHAT, COMPLETION = "chat request", "completion request"
DEEP = b"[" * 100_000 + b"]" * 100_000

CASES = {
    # A model directory's manifest.
    "manifest of another version": Case(
        MANIFEST, put("format_version", 99), "format version 99 is newer than this flashllm; upgrade flashllm"
    ),
    "manifest with an unknown key": Case(MANIFEST, put("extra", 1), "the manifest: the key 'extra' is unknown"),
    "manifest without rows": Case(MANIFEST, without("rows"), "the manifest: the key 'rows' is missing"),
    "manifest that says a key twice": Case(
        MANIFEST, first(b"{", b'{"dtype": "float32", '), "the key 'dtype' occurs twice"
    ),
    "manifest nested 100,000 deep": Case(MANIFEST, whole(DEEP), "is nested too deeply"),
    "manifest with 2^62 layers": Case(
        MANIFEST,
        put("architecture/num_layers", HUGE),
        "architecture: num_layers must be an integer from 1 to 4096, not",
    ),
    "manifest with a width of 0": Case(
        MANIFEST, put("architecture/d_model", 0), "architecture: d_model must be an integer from 1 to 1048576, not"
    ),
    "manifest whose neurons are true": Case(
        MANIFEST, put("architecture/d_ff", True), "architecture: d_ff must be an integer from 1 to 1048576, not"
    ),
    "manifest of an unknown model_type": Case(
        MANIFEST, put("architecture/model_type", "../../x"), "describes Architecture(model_type='opt', num_layers=2"
    ),
    "manifest of an unknown dtype": Case(
        MANIFEST, put("dtype", "float128"), "dtype must be one of float32, float16, bfloat16, not 'float128'"
    ),
    "manifest whose rows lie apart by 1": Case(MANIFEST, put("rows/stride", 1), "rows.stride must be 512, not 1"),
    "manifest whose rows are of other matrices": Case(
        MANIFEST, put("rows/matrices", ["up", "up"]), "matrices must be up, down or up, gate, down, not ('up', 'up')"
    ),
    "manifest that names a file outside": Case(
        MANIFEST,
        put("files/..~x", {"nbytes": 1, "sha256": "0" * 64}),
        "'../x' is not the name of a file directly in the directory",
    ),
    "manifest with a hash of letters": Case(
        MANIFEST,
        put("files/config.json/sha256", "z" * 64),
        "files 'config.json': sha256 must be 64 hexadecimal digits, not",
    ),
    "manifest with another size of a file": Case(
        MANIFEST,
        put("files/ffn.safetensors/nbytes", 5),
        "has 266240 bytes, flashllm.json says 5; convert the model again",
    ),
    "manifest with a prompt block of 2^62": Case(
        MANIFEST, put("prefill_block_tokens", HUGE), "prefill_block_tokens must be an integer from 1 to 1048576, not"
    ),
    "manifest that holds a NaN": Case(
        MANIFEST, first(b'"format_version": 2', b'"format_version": NaN'), "NaN is not JSON"
    ),
    # A checkpoint's config and weights.
    "config with 10^6 layers": Case(
        CHECKPOINT, put("num_hidden_layers", 10**6), "num_hidden_layers must be an integer from 1 to 4096, not"
    ),
    "config with half heads": Case(
        CHECKPOINT, put("num_attention_heads", 1.5), "num_attention_heads must be an integer from 1 to 1048576, not"
    ),
    "config with heads that do not divide": Case(
        CHECKPOINT, put("num_attention_heads", 7), "7 heads do not divide hidden_size 64"
    ),
    "config without a vocabulary": Case(
        CHECKPOINT, without("vocab_size"), "tensor model.decoder.embed_tokens.weight: has shape [300, 64]"
    ),
    "config that is a number": Case(CHECKPOINT, whole(b"12"), "must hold a JSON object, not int"),
    "weights with a header of 2^62 bytes": Case(
        SHARD, at(0, "Q", HUGE), "a header of 4611686018427387904 bytes; at most 100000000 are"
    ),
    "weights that end in the header": Case(SHARD, cut(30), "truncated: the header"),
    "weights that end in the data": Case(SHARD, cut(-9), "truncated: the file"),
    "weights with a tensor of 2^62 elements": Case(
        SHARD,
        header(first(b'"shape":[64', b'"shape":[4611686018427387904')),
        "tensor 'model.decoder.final_layer_norm.bias': the shape's",
    ),
    "weights with a hole": Case(
        SHARD,
        header(first(b'"data_offsets":[0,', b'"data_offsets":[8,')),
        "tensor 'model.decoder.embed_positions.weight': data_offsets",
    ),
    "weights of an unknown dtype": Case(
        SHARD, header(first(b'"F32"', b'"F33"')), "tensor 'model.decoder.embed_positions.weight': unknown dtype"
    ),
    "weights that are a git-LFS pointer": Case(
        SHARD,
        whole(b"version https://git-lfs.github.com/spec/v1\noid x\n"),
        "is a git-LFS pointer, not the weights; fetch them with `git lfs",
    ),
    # GGUF: the classes of defects that other readers had (CVEs and pull requests of llama.cpp).
    "GGUF of another magic": Case(
        GGUF, at(0, "4s", b"GGML"), "is not a GGUF file: it begins with b'GGML\\x03\\x00\\x00\\x00'"
    ),
    "GGUF of version 1": Case(GGUF, at(4, "I", 1), "truncated or damaged"),
    "GGUF with 2^62 tensors": Case(GGUF, at(8, "Q", HUGE), "truncated or damaged"),
    "GGUF with 2^62 keys": Case(GGUF, at(16, "Q", HUGE), "truncated or damaged"),
    "GGUF with a key of 2^62 bytes": Case(GGUF, at(24, "Q", HUGE), "truncated or damaged"),
    "GGUF with a text of 2^62 bytes": Case(GGUF, after(b"general.architecture", 4, "Q", HUGE), "truncated or damaged"),
    "GGUF with a list of 2^62 tokens": Case(
        GGUF, after(b"tokenizer.ggml.tokens", 8, "Q", HUGE), "truncated or damaged"
    ),
    "GGUF with a list of an unknown type": Case(
        GGUF, after(b"tokenizer.ggml.tokens", 4, "I", 77), "truncated or damaged"
    ),
    "GGUF whose tokens are numbers": Case(GGUF, after(b"tokenizer.ggml.tokens", 4, "I", 4), "truncated or damaged"),
    "GGUF with 2^31 blocks": Case(
        GGUF,
        after(b"llama.block_count", 4, "I", 2**31),
        "llama.block_count must be an integer from 1 to",
    ),
    "GGUF with no heads": Case(
        GGUF,
        after(b"llama.attention.head_count", 4, "I", 0),
        "llama.attention.head_count must be an integer from 1 to",
    ),
    "GGUF with a tensor of 2^31 dimensions": Case(
        GGUF, after(b"token_embd.weight", 0, "I", 2**31), "truncated or damaged"
    ),
    "GGUF with a tensor of no columns": Case(
        GGUF, after(b"token_embd.weight", 4, "Q", 0), "tensor token_embd.weight holds nothing: its shape is [300, 0]"
    ),
    "GGUF with a tensor whose size wraps": Case(
        GGUF, after(b"token_embd.weight", 4, "Q", 2**63), "tensor token_embd.weight is truncated: it ends"
    ),
    "GGUF with a tensor of an unknown kind": Case(
        GGUF, after(b"token_embd.weight", 20, "I", 250), "tensor token_embd.weight is of kind 250, which"
    ),
    "GGUF with a tensor behind the file": Case(
        GGUF, after(b"token_embd.weight", 24, "Q", 1 << 40), "tensor token_embd.weight is truncated: it ends"
    ),
    "GGUF that ends in the data": Case(GGUF, cut(-64), "tensor token_embd.weight is truncated: it ends"),
    # Traces, profiles, policies.
    "trace of no tokens": Case(
        TRACE,
        header(first(b"[4,2,3,32]", b"[0,2,3,32]")),
        "tensor 'activity': data_offsets hold 768 bytes, dtype and shape",
    ),
    "trace of too many neurons": Case(
        TRACE,
        header(first(b'"neurons":"256"', b'"neurons":"9999999999"')),
        "[4, 2, 3, 32] is no trace of 9999999999 neurons a layer",
    ),
    "trace that is another file": Case(
        TRACE, header(first(b"flashllm-trace", b"flashllm-tracf")), "is not an activity trace of version 1"
    ),
    "profile of another version": Case(
        DEVICES, put("format_version", 1), "format_version must be 4, not '1'; run `flashllm calibrate`"
    ),
    "profile with a rate of -1": Case(
        DEVICES,
        put("devices/0/costs/sequential_bps", -1),
        "sequential_bps must be a number from 0, not '-1'; run `flashllm",
    ),
    "profile without readers": Case(
        DEVICES, put("devices/0/costs/readers", []), "readers must not be empty; run `flashllm calibrate` again"
    ),
    "hardware file with a negative memory": Case(
        MACHINE, put("cpu_memory", -1), "cpu_memory must be a number of bytes, not -1"
    ),
    "hardware file with a rate of 0": Case(
        MACHINE, put("gemm", 0), "gemm: knot (1.0, 0.0): size and rate must be positive and finite"
    ),
    "hardware file with sizes that fall": Case(
        MACHINE, put("dtoc", [[10, 1e9], [5, 1e9]]), "dtoc: knot sizes must rise strictly: [10.0, 5.0]"
    ),
    "hardware file that says a key twice": Case(
        MACHINE, first(b"{", b'{"cpu_memory": 1, '), "the key 'cpu_memory' occurs twice"
    ),
    "policy whose shares are 1.5": Case(POLICY, put("wg", 0.7), "wg + wc + wd must be 1 (weights), not 1.5"),
    "policy of half a batch": Case(POLICY, put("gpu_batch", 0.5), "gpu_batch must be a positive integer, not 0.5"),
    "policy with an unknown field": Case(POLICY, put("wx", 1), "unknown policy field 'wx'"),
    "policy that is no JSON": Case(POLICY, whole(b"\xff\xfe{"), "is not UTF-8 at byte 0"),
    # Lines of batch files, bodies of requests.
    "line that is no object": Case(LINE, whole(b"[]"), "must be a JSON object, not list"),
    "line of another endpoint": Case(
        LINE, put("url", "/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions, not"
    ),
    "line without an id": Case(LINE, without("custom_id"), "custom_id is missing"),
    "line with a lone surrogate": Case(
        LINE, put("body/messages/0/content", "\ud800"), "messages[0]: content holds half a character (a lone surrogate)"
    ),
    "chat without messages": Case(CHAT, put("messages", []), "messages must be a list of at least one message"),
    "chat of an unknown role": Case(
        CHAT, put("messages/0/role", "root"), "messages[0]: role must be one of system, developer, user"
    ),
    "chat with a temperature of 10^400": Case(
        CHAT, first(b'"temperature": 0.5', b'"temperature": 1e400'), "temperature must be a number, not inf"
    ),
    "chat with two answers": Case(CHAT, put("n", 2), "n: 2 is not supported"),
    "chat nested 100,000 deep": Case(CHAT, whole(DEEP), "the body: is nested too deeply"),
    "completion of -1 tokens": Case(
        COMPLETION, put("max_tokens", -1), "max_tokens must be an integer of at least 1, not -1"
    ),
    "completion of true tokens": Case(
        COMPLETION, put("max_tokens", True), "max_tokens must be an integer of at least 1, not True"
    ),
    "completion of a token id of -1": Case(
        COMPLETION, put("prompt", [-1]), "prompt must be a text or a list of token ids"
    ),
    "completion with 10^5 stops": Case(
        COMPLETION, put("stop", ["a"] * 10**5), "stop must be a text or a list of at most 16 texts"
    ),
}
