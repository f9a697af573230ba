"""lm-eval against the server and against the model in Python: are the log-likelihoods the same?

    python bench/serve/lm_eval_likelihoods.py ITEMS [--model DIR] [--items N]

ITEMS: LAMBADA's test set, a line of JSON with `context` and `target` each (a `.jsonl` or `.jsonl.gz`). Each target is
scored by lm-eval's own `local-completions`, over HTTP, and by its `hf` model around a `FlashModel`. Needs lm-eval
(`pip install 'lm_eval[api]'`, best in an environment of its own). The last line is one JSON document.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
from serve_load import server

DEMO = Path(__file__).parents[2] / "flashllm/demo"


def pairs(path: Path, count: int) -> list[tuple[str, str]]:
    """(context, what follows it) of the first items."""
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
    items = [json.loads(line) for line in lines[:count]]
    return [(item["context"], f" {item['target']}") for item in items]


def instances(texts: list[tuple[str, str]]) -> list[Any]:
    """What lm-eval hands to a model."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="loglikelihood", doc={}, arguments=text, idx=index) for index, text in enumerate(texts)
    ]


def by_server(model: Path, texts: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy) of each, by `local-completions`."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with server([str(model)]) as (address, _):
        name = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        client = LocalCompletionsAPI(base_url=f"{address}/v1/completions", model=name, tokenizer=str(model))
        return [(float(score), bool(greedy)) for score, greedy in client.loglikelihood(instances(texts))]


def by_model(model: Path, texts: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """The same by `hf` around a `FlashModel`."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    from flashllm import FlashModel

    flash = FlashModel.from_pretrained(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        options = {"batch_size": 1, "device": "cpu", "add_bos_token": False}  # as local-completions, which adds none
        # In the model's own dtype, its default, the softmax alone is off by hundredths.
        lm = HFLM(pretrained=flash, tokenizer=tokenizer, backend="causal", softmax_dtype="float32", **options)
        return [(float(score), bool(greedy)) for score, greedy in lm.loglikelihood(instances(texts))]
    finally:
        flash.close()


def main(argv: list[str] | None = None) -> int:
    """Score, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", metavar="ITEMS", type=Path)
    parser.add_argument("--model", metavar="DIR", type=Path, default=DEMO)
    parser.add_argument("--items", metavar="N", type=int, default=50)
    args = parser.parse_args(argv)
    texts = pairs(args.tasks, args.items)
    served, direct = by_server(args.model, texts), by_model(args.model, texts)
    apart = max(abs(one[0] - other[0]) for one, other in zip(served, direct, strict=True))
    equal = sum(one[1] == other[1] for one, other in zip(served, direct, strict=True))
    report = {
        "model": args.model.resolve().name,
        "items": len(texts),
        "largest_difference": apart,
        "same_greedy": equal,
        "mean_log_likelihood": {
            "server": sum(score for score, _ in served) / len(served),
            "model": sum(score for score, _ in direct) / len(direct),
        },
        "accuracy": sum(greedy for _, greedy in served) / len(served),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
