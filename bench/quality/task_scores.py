"""Perplexity and zero-shot tasks of a model: dense, with thresholds on its gates, in fewer bits, beside its peers.

    python bench/quality/task_scores.py HF_FOLDER --tasks DIR --text wiki.test.raw --calibration books.txt \\
        [--rows transformers dense 30% "30% sparse" 50% 70%] [--items 200 hellaswag=50] [--windows 20] --out scores.json
    python bench/quality/task_scores.py HF_FOLDER --names --text wiki.test.raw --rows dense int4_32:down --out bits.json

A model directory in HF_FOLDER's place is written back as one first. Rows: `transformers` runs HF_FOLDER in its own
dtype, `llama.cpp FILE` a GGUF file of the same tokenizer. All others run a conversion of HF_FOLDER as the engine
computes prompts: `dense` as it is; `N%` with thresholds on the gates that make that share of them zero (`convert
--sparsify`, chosen on CALIBRATION) and the gates resident; with `sparse` behind it neuron by neuron, as it computes new
tokens, with `4bit` so too and the gates in 4 bits, whose misses count; with `cache 8` or `cache 4` with packed keys and
values; a variant of variants.py (`int4_32+int4_32+int8_32*`, whose codes are chosen on CALIBRATION). DIR has the files
that predictors/tasks.py names; the first ITEMS of each are asked (NAME=N: of that task). Prompts and scores are
lm-eval's: `acc` is the choice of the highest log-likelihood, `acc_norm` that of the highest per character; LAMBADA's
word counts where greedy decoding says it. Choices of an item share the computation of its prompt; the engine computes
several items at once. The text's perplexity is that of its first windows, every token but a window's first; `agreement`
is the share of them after which the likeliest token is the first row's (kept beside OUT in a .npz file); `firing` is
the share of each layer's neurons that are not zero, of models with a ReLU or thresholds. What OUT has under the same
settings, text or task of a row, is not run again. `standard_error` of a task is the binomial one; `change` is a
perplexity over the first row's, less one, `change_error` its standard error over windows or words, of the differences
in log perplexity; `same_choices` are items answered as in the first row. The last line of stdout is one JSON document.
No timings.
"""

import argparse
import gzip
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "predictors"))

from folders import written_back
from scorers import Firing, Flash, Floats, LlamaCpp, Scorer, Transformers
from tasks import TASKS, Item, answer_of
from variants import Variant

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.manifest import MANIFEST
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.sparsified import convert_sparsified

NAMES = ("lambada", "arc_easy", "piqa", "hellaswag", "arc_challenge")
ROWS = ("transformers", "dense", "30%", "30% sparse", "50%", "70%")
LLAMA = "llama.cpp "  # before a file's name
CONTEXT = 1024  # tokens of the longest question, for llama.cpp
AT_ONCE = 8  # items that the engine computes together
SORTED = ("mmlu",)  # whose files go from subject to subject
PIECE = 128  # tokens whose logits are in memory at once


class Said(NamedTuple):
    """How likely a continuation is."""

    log_likelihood: float
    greedy: bool  # every token of it is the likeliest


def said(logits: Floats, targets: Sequence[int]) -> Said:
    """logits [targets, vocab]"""
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1)
    chosen = wide[np.arange(len(targets)), list(targets)]
    total = float((chosen - highest - np.log(np.exp(wide - highest[:, None]).sum(axis=1))).sum())
    return Said(total, bool((wide.argmax(axis=1) == np.asarray(targets)).all()))


def continuations(scorer: Scorer, prefix: Sequence[int], endings: Sequence[Sequence[int]]) -> list[Said]:
    """Each ending of a prefix, which is computed once."""
    scorer.start()
    last = scorer.feed(prefix, last=True)
    found = []
    for ending in endings:
        logits = [last]
        if len(ending) > 1:
            logits.append(scorer.feed(ending[:-1]))
            scorer.back_to(len(prefix))
        found.append(said(np.concatenate(logits), ending))
    return found


def score_text(scorer: Scorer, windows: Sequence[Sequence[int]]) -> tuple[list[float], NDArray[np.int32]]:
    """(each window's mean loss in nats, the likeliest token after each token but a window's last)"""
    losses, likeliest = [], []
    for ids in windows:
        scorer.start()
        total = 0.0
        for first in range(0, len(ids) - 1, PIECE):
            piece = ids[first : min(first + PIECE, len(ids) - 1)]
            logits = scorer.feed(piece)
            total -= said(logits, ids[first + 1 : first + 1 + len(piece)]).log_likelihood
            likeliest.append(logits.argmax(axis=1).astype(np.int32))
        losses.append(total / (len(ids) - 1))
    return losses, np.concatenate(likeliest)


def asked_of(tokenizer: Tokenizer, item: Item) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """The item's prefixes, cut as lm-eval does, and the endings of each by their choice's number."""
    found: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for number, choice in enumerate(item.choices):
        prompt = item.prompts[number if len(item.prompts) > 1 else 0]
        whole = list(tokenizer.encode(prompt + choice, add_special=False))
        cut = min(len(tokenizer.encode(prompt, add_special=False)), len(whole) - 1)
        found.setdefault(tuple(whole[:cut]), {})[number] = whole[cut:]
    return found


def answers(scorer: Scorer, tokenizer: Tokenizer, items: Sequence[Item]) -> list[list[Said]]:
    """How likely each choice of each item is. The engine takes all of the items at once."""
    asked = [asked_of(tokenizer, item) for item in items]
    pairs = [(prefix, list(endings.values())) for one in asked for prefix, endings in one.items()]
    if isinstance(scorer, Flash):
        logits = scorer.endings(pairs)
        each = [list(map(said, rows, endings)) for rows, (_, endings) in zip(logits, pairs, strict=True)]
    else:
        each = [continuations(scorer, prefix, endings) for prefix, endings in pairs]
    likely = iter(each)
    found = [
        dict(pair for endings in one.values() for pair in zip(endings, next(likely), strict=True)) for one in asked
    ]
    return [[one[number] for number in sorted(one)] for one in found]


def score_task(scorer: Scorer, tokenizer: Tokenizer, items: Sequence[Item]) -> dict[str, Any]:
    """Accuracy, as lm-eval's, and the choices; of texts to be said the loss of each in nats, too."""
    right, right_normalised, chosen, words = 0, 0, [], []
    groups = [answers(scorer, tokenizer, items[first : first + AT_ONCE]) for first in range(0, len(items), AT_ONCE)]
    for item, found in zip(items, (one for group in groups for one in group), strict=True):
        answer = answer_of(item, [one.log_likelihood for one in found], greedy=found[0].greedy)
        chosen.append(answer.plain)
        right += answer.right
        right_normalised += answer.right_normalised
        if len(found) == 1:
            words.append(-found[0].log_likelihood)
    share = right / len(items)
    error = math.sqrt(share * (1 - share) / len(items))
    row: dict[str, Any] = {"items": len(items), "acc": share, "standard_error": error}
    row["chosen"] = "".join(map(str, chosen))  # a digit an item
    if words:
        return row | {"perplexity": math.exp(statistics.fmean(words)), "losses": words}
    return row | {"acc_norm": right_normalised / len(items)}


@contextmanager
def opened(row: str, args: argparse.Namespace, folder: Path) -> Iterator[Scorer]:
    """The row's model; conversions are made in `folder`. ValueError for what is no row."""
    if row == "transformers":
        yield Transformers(args.model, args.threads)
        return
    if row.startswith(LLAMA):
        yield LlamaCpp(Path(row.removeprefix(LLAMA)), max(args.length, CONTEXT), args.threads)
        return
    name, _, way = row.partition(" ")
    directory = folder / name.strip("%*")
    if name.endswith("%"):
        share = float(name.removesuffix("%")) / 100
        convert_sparsified(args.model, directory, share, args.calibration, gate="4bit" if way == "4bit" else "resident")
    else:
        variant = Variant.of("wide" if name == "dense" else name)
        variant.convert(args.model, directory, text=args.calibration, threads=args.threads)
    ways: dict[str, Any] = {"mode": "sparse", "prompts": "sparse"} if way in ("sparse", "4bit") else {"mode": "dense"}
    if way.startswith("cache "):
        ways["cache_bits"] = int(way.removeprefix("cache "))
    with Model.open(directory, RunConfig(**ways, threads=args.threads)) as model:
        yield Flash(model)
    shutil.rmtree(directory)


def text_part(scorer: Scorer, windows: Sequence[Sequence[int]], kept: Path, *, first: bool) -> dict[str, Any]:
    """A row's figures of the text. `kept` holds the first row's likeliest tokens, or gets them."""
    firing = None
    if isinstance(scorer, Flash) and scorer.has_zeros:
        firing = scorer.observer = Firing(scorer.num_layers)
    losses, likeliest = score_text(scorer, windows)
    if isinstance(scorer, Flash):
        scorer.observer = None
    if first:
        np.savez_compressed(kept, likeliest=likeliest)
    same = float((np.load(kept)["likeliest"] == likeliest).mean()) if kept.exists() else None
    found: dict[str, Any] = {"perplexity": math.exp(statistics.fmean(losses)), "losses": losses, "agreement": same}
    return found if firing is None else found | {"firing": firing.shares()}


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Give the parts of each row their `change` of perplexity and their `same_choices`, against the first row's."""
    first = next(iter(rows.values()), {})
    for row in rows.values():
        for name in row.keys() & first.keys():
            mine, theirs = row[name], first[name]
            if "losses" in mine:
                differences = [one - other for one, other in zip(mine["losses"], theirs["losses"], strict=True)]
                spread = statistics.stdev(differences) if len(differences) > 1 else None
                mine["change"] = math.expm1(statistics.fmean(differences))
                mine["change_error"] = None if spread is None else spread / math.sqrt(len(differences))
            if "chosen" in mine:
                pairs = zip(mine["chosen"], theirs["chosen"], strict=True)
                mine["same_choices"] = statistics.fmean(one == other for one, other in pairs)


def items_by_task(asked: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """How many of each task, from words N (of all) and NAME=N (of one)."""
    pairs = [word.rpartition("=") for word in asked]
    general = [int(number) for name, _, number in pairs if not name]
    found = dict.fromkeys(names, general[-1] if general else 200) | {name: int(n) for name, _, n in pairs if name}
    if unknown := found.keys() - set(names):
        raise SystemExit(f"--items: {', '.join(sorted(unknown))} is not among --names")
    return found


def items_of(folder: Path, task: str, count: int) -> list[Item]:
    """The first `count` items of a task's file; of a sorted one as many that are evenly spread over it."""
    with gzip.open(folder / TASKS[task].file, "rt", encoding="utf-8") as file:
        lines = list(file)
    step = max(1, len(lines) // count) if task in SORTED else 1
    return [TASKS[task].item(json.loads(line)) for line in lines[::step][:count]]


def text_windows(tokenizer: Tokenizer, path: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` windows of a text."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        ids = tokenizer.encode(file.read(count * length * 12), add_special=False)
    if len(ids) < count * length:
        raise SystemExit(f"{path}: {len(ids)} tokens are fewer than {count} windows of {length}")
    return [ids[first : first + length] for first in range(0, count * length, length)]


def run_rows(document: dict[str, Any], counts: dict[str, int], args: argparse.Namespace) -> None:
    """Fill in the document's missing parts of the rows asked for; its file is written after each."""
    rows = document["rows"]
    tokenizer = Tokenizer.load(args.model)
    windows = text_windows(tokenizer, args.text, args.windows, args.length)
    for name in args.rows:
        title = f"{LLAMA}{Path(name).name}" if name.startswith(LLAMA) else name
        row = rows.setdefault(title, {})
        wanted = [part for part in ("text", *args.names) if part not in row]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder, opened(name, args, Path(folder)) as scorer:
            for part in wanted:
                if part == "text":
                    kept = args.out.with_suffix(".npz")
                    row[part] = text_part(scorer, windows, kept, first=title == next(iter(rows)))
                else:
                    row[part] = score_task(scorer, tokenizer, items_of(args.tasks, part, counts[part]))
                compare(rows)
                args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                figure = row[part].get("acc", row[part].get("perplexity"))
                print(f"{title}, {part}: {figure:.4f}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, or a model directory")
    parser.add_argument("--tasks", type=Path, help="folder of the tasks' .jsonl.gz files")
    parser.add_argument("--names", nargs="*", choices=list(TASKS), default=list(NAMES))
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="text that thresholds are chosen on")
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--items", nargs="+", default=["200"], help="N, or NAME=N for one task")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.names and args.tasks is None:
        parser.error("--tasks is missing; `--names` alone asks no tasks")
    counts = items_by_task(args.items, args.names)
    settings = {"windows": args.windows, "length": args.length, "model": args.model.name, "text": args.text.name}
    document: dict[str, Any] = {"benchmark": "task_scores", **settings, "items": {}, "rows": {}}
    if args.out.exists():
        document = json.loads(args.out.read_text(encoding="utf-8"))
        same = all(document.get(name) == value for name, value in settings.items())
        if not same or counts != counts | {name: document["items"].get(name, counts[name]) for name in counts}:
            raise SystemExit(f"{args.out} is of other settings; name another file, or remove it")
    document["items"] |= counts
    with tempfile.TemporaryDirectory() as folder:
        if (args.model / MANIFEST).exists():
            args.model = written_back(args.model, Path(folder) / "hf")
        run_rows(document, counts, args)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
