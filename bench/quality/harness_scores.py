"""What lm-eval's own harness says of a model: through transformers, and through a FlashModel, prompts dense or sparse.

    python bench/quality/harness_scores.py HF_FOLDER [MODEL ...] [--sparse MODEL ...] --tasks DIR [--items 50]

HF_FOLDER is run by transformers; each MODEL, a model directory, by `FlashModel`, after `--sparse` with prompts computed
as new tokens are (`prompts="sparse"`). All are asked by `lm_eval.simple_evaluate`, whose tasks are written here as its
own are, over local files (DIR has those that predictors/tasks.py names). The first row is transformers';
`largest_difference` is that of a log-likelihood to it, `same_choices` the share of items answered as it does. Needs
lm-eval (`pip install lm_eval`, best in an environment of its own). The last line is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2] / "predictors"))

from tasks import TASKS

REFERENCE = "transformers"
FORMS: dict[str, dict[str, Any]] = {  # as lm-eval's own, but for the names of a file's fields
    "lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' '+target}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "arc_easy": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        ],
    },
}
FORMS["arc_challenge"] = FORMS["arc_easy"]


def task_of(name: str, folder: Path) -> Any:
    """The task over its local file, as lm-eval's own code builds it."""
    from lm_eval.api.task import ConfigurableTask

    files = {"test": str((folder / TASKS[name].file).resolve())}
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    return ConfigurableTask(config={"task": name, **where, **FORMS[name]})


@contextmanager
def opened(folder: Path, tokenizer: Path, prompts: Literal["dense", "sparse"] | None) -> Iterator[Any]:
    """lm-eval's `hf` model around a FlashModel, or without `prompts` around what transformers loads."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flashllm import FlashModel

    # In the model's own dtype, its default, the softmax alone is off by hundredths.
    options = {"backend": "causal", "batch_size": 1, "device": "cpu", "softmax_dtype": "float32"}
    spoken = AutoTokenizer.from_pretrained(tokenizer)
    if prompts is None:
        yield HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), tokenizer=spoken, **options)
        return
    model = FlashModel.from_pretrained(folder, prompts=prompts)
    try:
        yield HFLM(pretrained=model, tokenizer=spoken, **options)
    finally:
        model.close()


Said = list[tuple[float, bool]]  # of an item's continuations: log-likelihood, whether greedy


def likelihoods(samples: Sequence[dict[str, Any]]) -> list[Said]:
    """Of each item, from what lm-eval logs."""
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    return [[(float(pair[0]), bool(pair[1])) for pair in sample["filtered_resps"]] for sample in ordered]


def choice(said: Said) -> int:
    """The likeliest continuation; of a single one, whether it is greedy."""
    return int(said[0][1]) if len(said) == 1 else said.index(max(said))


def compared(mine: list[Said], theirs: list[Said]) -> dict[str, float]:
    """How far apart the log-likelihoods of the same items are, and how many have the same choice."""
    pairs = list(zip(mine, theirs, strict=True))
    apart = max(abs(a - b) for one, other in pairs for (a, _), (b, _) in zip(one, other, strict=True))
    return {
        "largest_difference": apart,
        "same_choices": sum(choice(one) == choice(other) for one, other in pairs) / len(pairs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", metavar="HF_FOLDER", type=Path)
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="*")
    parser.add_argument("--sparse", metavar="MODEL", type=Path, nargs="+", default=[])
    parser.add_argument("--tasks", metavar="DIR", type=Path, required=True)
    parser.add_argument("--names", nargs="+", choices=list(FORMS), default=["lambada", "arc_easy"])
    parser.add_argument("--items", metavar="N", type=int, default=50)
    parser.add_argument("--out", metavar="FILE", type=Path)
    args = parser.parse_args(argv)
    import lm_eval

    wanted: list[tuple[str, Path, Literal["dense", "sparse"] | None]] = [(REFERENCE, args.reference, None)]
    wanted += [(path.name, path, "dense") for path in args.models]
    wanted += [(f"{path.name}, prompts sparse", path, "sparse") for path in args.sparse]
    rows: dict[str, dict[str, Any]] = {}
    first: dict[str, list[Said]] = {}
    for title, path, prompts in wanted:
        with opened(path, args.reference, prompts) as model:
            tasks = [task_of(name, args.tasks) for name in args.names]
            limits: dict[str, Any] = {"limit": args.items, "bootstrap_iters": 0, "log_samples": True}
            found = lm_eval.simple_evaluate(model=model, tasks=tasks, **limits)
        rows[title] = {}
        for name in args.names:
            said = likelihoods(found["samples"][name])
            scores = {key.removesuffix(",none"): value for key, value in found["results"][name].items()}
            row = {key: scores[key] for key in ("acc", "acc_norm") if key in scores}
            rows[title][name] = row | {"items": len(said)} | compared(said, first.setdefault(name, said))
            print(f"{title}, {name}: {rows[title][name]}", file=sys.stderr, flush=True)
    document = {"benchmark": "harness_scores", "lm_eval": lm_eval.__version__, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
