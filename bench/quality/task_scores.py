"""Perplexity and zero-shot tasks of a model, dense and with thresholds on its gates, beside transformers' own figures.

    python bench/quality/task_scores.py HF_FOLDER --tasks DIR --text wiki.test.raw --calibration books.txt \\
        [--rows transformers dense 30% "30% sparse" 50% 70%] [--items 200] [--windows 20] --out scores.json

Rows: `transformers` runs HF_FOLDER in its own dtype; all others run its conversion, `N%` with thresholds on the gates
that make that share of them zero (`convert --sparsify`, chosen on CALIBRATION) and the gates resident, as the engine
computes prompts; with `sparse` behind it neuron by neuron, as it computes new tokens. DIR has the files that
predictors/tasks.py names; the first ITEMS of each are asked. Prompts and scores are lm-eval's: `acc` is the choice of
the highest log-likelihood, `acc_norm` that of the highest per character; LAMBADA's word counts where greedy decoding
says it. Choices of an item share the computation of its prompt. The text's perplexity is that of its first windows,
every token but a window's first. A row that OUT has under the same settings is not run again. `standard_error` is the
binomial one. The last line of stdout is one JSON document. No timings.
"""

import argparse
import gzip
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "predictors"))

from tasks import TASKS, Item

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.generate.tokenizer import Tokenizer
from flashllm.sparsify.run import convert_sparsified

NAMES = ("lambada", "arc_easy", "piqa", "hellaswag", "arc_challenge")
ROWS = ("transformers", "dense", "30%", "30% sparse", "50%", "70%")
PIECE = 128  # tokens whose logits are in memory at once

Floats = NDArray[np.float32]


class Said(NamedTuple):
    """How likely a continuation is."""

    log_likelihood: float
    greedy: bool  # every token of it is the likeliest


class Scorer(Protocol):
    """A model that knows what it was fed since `start`."""

    def start(self) -> None: ...

    def feed(self, ids: Sequence[int]) -> Floats:
        """Logits [ids, vocab] after each."""

    def back_to(self, length: int) -> None:
        """Forget what came after so many tokens."""


class Flash:
    """The engine. Its prompts are computed as the configuration says, in any number of pieces."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequence = model.new_sequence()

    def start(self) -> None:
        self._sequence.truncate(0)

    def feed(self, ids: Sequence[int]) -> Floats:
        (logits,) = self._model.step([(self._sequence, list(ids))], all_logits=True, as_prompt=True)
        return logits

    def back_to(self, length: int) -> None:
        self._sequence.truncate(length)


class Transformers:
    """The checkpoint as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self._past: Any = None

    def start(self) -> None:
        self._past = None

    def feed(self, ids: Sequence[int]) -> Floats:
        import torch

        with torch.inference_mode():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._past, use_cache=True)
        self._past = out.past_key_values
        logits: Floats = out.logits[0].float().numpy()
        return logits

    def back_to(self, length: int) -> None:
        self._past.crop(length - self._past.get_seq_length())


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
    last = scorer.feed(prefix)[-1:]
    found = []
    for ending in endings:
        logits = [last]
        if len(ending) > 1:
            logits.append(scorer.feed(ending[:-1]))
            scorer.back_to(len(prefix))
        found.append(said(np.concatenate(logits), ending))
    return found


def perplexity(scorer: Scorer, windows: Sequence[Sequence[int]]) -> float:
    total, count = 0.0, 0
    for ids in windows:
        scorer.start()
        for first in range(0, len(ids) - 1, PIECE):
            piece = ids[first : min(first + PIECE, len(ids) - 1)]
            total += said(scorer.feed(piece), ids[first + 1 : first + 1 + len(piece)]).log_likelihood
            count += len(piece)
    return math.exp(-total / count)


def answer(scorer: Scorer, tokenizer: Tokenizer, item: Item) -> list[Said]:
    """How likely each choice of an item is."""
    pairs = []  # (prefix, ending), as lm-eval cuts them
    for number, choice in enumerate(item.choices):
        prompt = item.prompts[number if len(item.prompts) > 1 else 0]
        whole = tokenizer.encode(prompt + choice, add_special=False)
        cut = min(len(tokenizer.encode(prompt, add_special=False)), len(whole) - 1)
        pairs.append((tuple(whole[:cut]), whole[cut:]))
    shared: dict[tuple[int, ...], list[Said]] = {
        prefix: continuations(scorer, prefix, [ending for one, ending in pairs if one == prefix])
        for prefix in dict.fromkeys(prefix for prefix, _ in pairs)
    }
    return [shared[prefix].pop(0) for prefix, _ in pairs]


def score_task(scorer: Scorer, tokenizer: Tokenizer, items: Sequence[Item]) -> dict[str, Any]:
    """Accuracy, as lm-eval's, and the choices."""
    right, right_normalised, chosen, words = 0, 0, [], []
    for item in items:
        found = answer(scorer, tokenizer, item)
        likely = [one.log_likelihood for one in found]
        if len(found) == 1:
            right += found[0].greedy
            words.append(likely[0])
            chosen.append(int(found[0].greedy))
            continue
        each = [value / len(choice.strip()) for value, choice in zip(likely, item.choices, strict=True)]
        chosen.append(likely.index(max(likely)))
        right += chosen[-1] == item.label
        right_normalised += each.index(max(each)) == item.label
    share = right / len(items)
    row: dict[str, Any] = {"acc": share, "standard_error": math.sqrt(share * (1 - share) / len(items))}
    if words:
        return row | {"perplexity": math.exp(-sum(words) / len(words)), "chosen": chosen}
    return row | {"acc_norm": right_normalised / len(items), "chosen": chosen}


@contextmanager
def opened(row: str, args: argparse.Namespace, folder: Path) -> Iterator[Scorer]:
    """The row's model; conversions are kept in `folder` while the script runs."""
    if row == "transformers":
        yield Transformers(args.model)
        return
    share, _, sparse = row.partition(" ")
    directory = folder / share.rstrip("%")
    if not directory.exists() and share == "dense":
        convert(args.model, directory)
    elif not directory.exists():
        convert_sparsified(args.model, directory, float(share.rstrip("%")) / 100, args.calibration, gate="resident")
    config = RunConfig(mode="sparse", prompts="sparse") if sparse else RunConfig(mode="dense")
    with Model.open(directory, config) as model:
        yield Flash(model)


def items_of(folder: Path, task: str, count: int) -> list[Item]:
    """The first `count` items of a task's file."""
    with gzip.open(folder / TASKS[task].file, "rt", encoding="utf-8") as file:
        return [TASKS[task].item(json.loads(line)) for _, line in zip(range(count), file, strict=False)]


def text_windows(tokenizer: Tokenizer, path: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` windows of a text."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        ids = tokenizer.encode(file.read(count * length * 12), add_special=False)
    if len(ids) < count * length:
        raise SystemExit(f"{path}: {len(ids)} tokens are fewer than {count} windows of {length}")
    return [ids[first : first + length] for first in range(0, count * length, length)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a gated model")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of the tasks' .jsonl.gz files")
    parser.add_argument("--names", nargs="+", choices=list(TASKS), default=list(NAMES))
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="text that thresholds are chosen on")
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    settings = {name: getattr(args, name) for name in ("names", "items", "windows", "length")}
    settings |= {"model": args.model.name, "text": args.text.name}
    settings |= {"calibration": None if args.calibration is None else args.calibration.name}
    document: dict[str, Any] = {"benchmark": "task_scores", **settings, "rows": {}}
    if args.out.exists():
        document = json.loads(args.out.read_text(encoding="utf-8"))
        if any(document.get(name) != value for name, value in settings.items()):
            raise SystemExit(f"{args.out} is of other settings; name another file, or remove it")
    tokenizer = Tokenizer.load(args.model)
    windows = text_windows(tokenizer, args.text, args.windows, args.length)
    with tempfile.TemporaryDirectory() as folder:
        for row in args.rows:
            if row in document["rows"]:
                continue
            with opened(row, args, Path(folder)) as scorer:
                found: dict[str, Any] = {"perplexity": perplexity(scorer, windows)}
                for name in args.names:
                    found[name] = score_task(scorer, tokenizer, items_of(args.tasks, name, args.items))
            document["rows"][row] = found
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            accuracies = ", ".join(f"{name} {found[name]['acc']:.3f}" for name in args.names)
            print(f"{row}: perplexity {found['perplexity']:.3f}, {accuracies}", file=sys.stderr, flush=True)
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
