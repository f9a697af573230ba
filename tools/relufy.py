"""Turn a SiLU or GELU model into a FATReLU one, of whose neurons most are exactly zero for a token.

    python tools/relufy.py MODEL OUT --work WORK --text books.jsonl.gz web.jsonl.gz --test wiki.txt --tokens 2000000
    flashllm convert OUT model.flash --gate resident

MODEL and OUT are Hugging Face folders of a model whose FFNs have up, gate (if any) and down projections in a matrix
each and whose output is added as it is: Llama's kind, not Phi-3's or Gemma 2's. Of a GGUF file these make a folder:
`flashllm convert FILE DIR --bits 16 --dtype float32`, then `python bench/quality/folders.py DIR MODEL`.

OUT's config names the activation as `hidden_act: fatrelu` and the thresholds, one a layer, as `hidden_act_param`. Three
steps (Song et al., 2024: ProSparse; Mirzadeh et al., 2024): thresholds for the wanted share of zeros, from the first
rows of the text; a closed-form refit of the down projections; and training of the FFNs alone to the unmodified model's
next-token distributions. Each leaves a row in a table of tokens seen, perplexity, agreement and zeros, which is printed
and written beside the weights (relufication.json, relufication.md).

Files of --text are .txt or .jsonl with a "text" a line, gzipped or not, and give rows in turn. The run may be stopped
and started again with the same arguments: it goes on from WORK/state.pt. With other --tokens it goes on to another end,
at the learning rate of a run to there. With --minutes it stops of itself and writes OUT as far as it is. A CUDA device
is used where there is one, or as --device says. With --precision bfloat16 the products of training are bf16 ones and
its weights stay fp32: worth it on a GPU, or where the processor has such products (AVX512-BF16), and slow elsewhere.
Memory: the model once in fp32, its FFNs five times (their gradients, two moments, and the unmodified ones).
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from relufication.distill import Judge, Recipe, Training
from relufication.refit import fit
from relufication.student import ffns, relufied_config, student_of
from relufication.text import Rows, stream
from transformers import AutoModelForCausalLM, PreTrainedModel

from flashllm.arch.registry import resolve
from flashllm.base.files import fsync_directory, read_json_object
from flashllm.base.machine import num_cores
from flashllm.convert.checkpoint.gguf.file import SUFFIX
from flashllm.errors import FlashError, UsageError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_files import CONFIG
from flashllm.generate.tokenizer import Tokenizer

WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")  # not copied
WRITTEN_BACK = "`python bench/quality/folders.py {} FOLDER` writes it as a Hugging Face folder"
COLUMNS = ("stage", "tokens", "perplexity", "agreement", "zeros", "least_zeros", "most_zeros")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "model", type=Path, help="Hugging Face folder, of FFNs with up, gate and down in a matrix each (Llama's kind)"
    )
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--work", type=Path, required=True, help="folder for the run's state")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="to calibrate and train on")
    parser.add_argument("--test", type=Path, required=True, help="to judge by; nothing is chosen on it")
    parser.add_argument("--share", type=float, default=0.7, help="of zeros (0.7)")
    parser.add_argument(
        "--tokens", type=int, default=0, help="to train on (0: thresholds and refit alone); may be changed later"
    )
    parser.add_argument("--minutes", type=float, help="stop after them; the state stays, to go on from")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (512)")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step (1)")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--calibration", type=int, default=32, help="rows for thresholds and refit (32)")
    parser.add_argument("--no-refit", dest="refit", action="store_false", help="leave the down projections")
    parser.add_argument("--test-windows", type=int, default=8, help="rows judged (8)")
    parser.add_argument("--every", type=int, default=25_000, help="tokens between two rows of the table (25000)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of OUT; by default MODEL's")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="of the products of training (float32)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default cuda where there is one")
    parser.add_argument("--threads", type=int, default=num_cores())
    args = parser.parse_args(argv)
    try:
        relufy(args)
    except KeyboardInterrupt:
        print("relufy: interrupted; run it again with the same arguments to go on", file=sys.stderr)
        return 130
    except (FlashError, OSError) as error:
        print(f"relufy: {error}", file=sys.stderr)
        return 1
    return 0


def relufy(args: argparse.Namespace) -> None:
    _check(args)
    config = read_json_object(args.model / CONFIG)
    relufied_config(config, [0.0] * resolve(config).num_layers)  # refuses before anything is loaded
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows, windows = _read_text(args)
    recipe = Recipe(
        model=_identity(args.model),
        text=hashlib.sha256(rows.first(args.calibration + 1).tobytes() + windows.tobytes()).hexdigest(),
        share=args.share,
        length=args.length,
        batch=args.batch,
        tokens=args.tokens,
        learning_rate=args.learning_rate,
        calibration=args.calibration,
        refit=args.refit,
        precision=args.precision,
    )
    # A folder, checked above.
    teacher = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()  # nosec B615
    student, layers = student_of(teacher, config)
    training = Training(teacher, student, layers, recipe)
    judge = Judge(teacher, torch.from_numpy(windows).long().to(device))

    def note(stage: str) -> None:
        row = {"stage": stage, "tokens": training.tokens, **judge.judge(student, layers)}
        training.table.append(row)
        print(_line(row), flush=True)

    args.work.mkdir(parents=True, exist_ok=True)
    state = args.work / "state.pt"
    if state.exists():
        training.load(state)
        for change in training.replanned:
            if change["step"] == training.step:
                _say(f"going on to {recipe.tokens} tokens in place of {change['tokens']}")
        print("\n".join(map(_line, training.table)), flush=True)
    else:
        nothing = {"zeros": 0.0, "least_zeros": 0.0, "most_zeros": 0.0}
        first = {"stage": "unmodified", "tokens": 0, "perplexity": judge.teacher_perplexity, "agreement": 1.0}
        training.table.append({**first, **nothing})
        print(_line(training.table[0]), flush=True)
        calibration = torch.from_numpy(rows.first(args.calibration)).long().to(device)
        originals = ffns(teacher, config)
        if args.refit:  # the bare cut is judged apart, on its own thresholds
            fit(teacher, originals, layers, calibration, args.share, refit=False)
            note("thresholds")
        fit(teacher, originals, layers, calibration, args.share, refit=args.refit, report=_say)
        note("refitted" if args.refit else "thresholds")
        training.save(state)
    _train(args, training, rows, note, state, deadline=deadline)
    thresholds = [layer.activation.threshold for layer in layers]
    _write(args, student, config, thresholds, training=training)


def _train(
    args: argparse.Namespace, training: Training, rows: Rows, note: Any, state: Path, *, deadline: float | None
) -> None:
    """Steps until the tokens are seen or the time is over."""
    every = max(1, args.every // (args.batch * args.length))
    losses = []
    while training.step < training.recipe.steps:
        if deadline is not None and time.monotonic() > deadline:
            break
        losses.append(training.train(rows))
        if training.step % every == 0 or training.step == training.recipe.steps:
            _say(f"step {training.step} of {training.recipe.steps}: KL {sum(losses) / len(losses):.4f}")
            losses.clear()
            note("distilled")
            training.save(state)
    if training.tokens > training.table[-1]["tokens"]:
        note("distilled")
        training.save(state)


def _check(args: argparse.Namespace) -> None:
    """UsageError for arguments that cannot be."""
    if args.out.exists():
        raise UsageError(f"{args.out} exists; choose another name or remove it")
    if args.model.is_file() and args.model.suffix.lower() == SUFFIX:
        made = f"`flashllm convert {args.model} DIR --bits 16 --dtype float32`, then {WRITTEN_BACK.format('DIR')}"
        raise UsageError(f"{args.model} is a GGUF file; take the model's Hugging Face folder, or make one: {made}")
    if not (args.model / CONFIG).is_file():
        raise UsageError(f"{args.model} is no Hugging Face folder: it has no {CONFIG}")
    if (args.model / MANIFEST).is_file():
        raise UsageError(f"{args.model} is a converted model; {WRITTEN_BACK.format(args.model)}")
    if not 0 < args.share < 1:
        raise UsageError(f"--share must be between 0 and 1, not {args.share}")
    for name in ("length", "batch", "calibration", "test_windows", "every", "threads"):
        least = 2 if name == "length" else 1
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if args.tokens < 0 or args.learning_rate <= 0 or (args.minutes is not None and args.minutes < 0):
        raise UsageError("--tokens and --minutes must not be below 0, and --learning-rate must be above 0")
    if args.device is not None and args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {args.device}: torch finds no CUDA device; leave it out to run on the processor")


def _read_text(args: argparse.Namespace) -> tuple[Rows, Any]:
    """The rows to train on, and the windows to judge by."""
    tokenizer = Tokenizer.load(args.model)
    wanted = args.calibration + args.tokens // args.length + 1
    each = -(-wanted // len(args.text))
    rows = Rows([stream(tokenizer, path, each, args.length) for path in args.text])
    windows = stream(tokenizer, args.test, args.test_windows, args.length)
    if len(windows) < args.test_windows:
        raise UsageError(f"{args.test} has {len(windows)} rows of {args.length} tokens; lower --test-windows")
    return rows, windows


def _identity(model: Path) -> str:
    """SHA-256 of the config and of the names and sizes of the weight files."""
    digest = hashlib.sha256((model / CONFIG).read_bytes())
    for path in sorted(path for pattern in WEIGHTS for path in model.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _line(row: dict[str, Any]) -> str:
    return " | ".join(f"{row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS)


def _write(
    args: argparse.Namespace,
    student: PreTrainedModel,
    config: dict[str, Any],
    thresholds: list[float],
    *,
    training: Training,
) -> None:
    """OUT, by one rename."""
    partial = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    dtype = args.dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    wide = {name: value.detach().to("cpu", getattr(torch, dtype)) for name, value in student.state_dict().items()}
    student.save_pretrained(partial, state_dict=wide)
    for path in args.model.iterdir():
        if path.is_file() and path.name != CONFIG and not any(path.match(pattern) for pattern in WEIGHTS):
            shutil.copyfile(path, partial / path.name)
    changed = {**relufied_config(config, thresholds), "dtype": dtype}
    changed.pop("torch_dtype", None)
    (partial / CONFIG).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    facts = {
        "recipe": asdict(training.recipe),
        "replanned": training.replanned,
        "thresholds": thresholds,
        "table": training.table,
    }
    (partial / "relufication.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    rows = [f"| {_line(row)} |" for row in training.table]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *rows]
    (partial / "relufication.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(args.out)
    fsync_directory(args.out.parent)
    print(json.dumps({"out": str(args.out), **training.table[-1]}))


if __name__ == "__main__":
    sys.exit(main())
