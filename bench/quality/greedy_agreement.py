"""Do converted models choose the tokens that transformers chooses? Greedy decoding, then logits on the same text.

Usage: python bench/quality/greedy_agreement.py REFERENCE MODEL...

REFERENCE is a Hugging Face folder, run by transformers in fp32; each MODEL is a model directory of the same weights, in
any dtype. Ten questions in the chat template, `--tokens` new tokens each, past every end token. The last line of
standard output is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write two lines about a lighthouse.",
    "List three uses of a paper clip.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Explain what a database index is.",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a string.",
)
Ids = list[list[int]]


def prompts(directory: Path, count: int) -> Ids:
    """Token ids of the questions, in the model's own chat template where it has one."""
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.of(tokenizer)
    texts = [
        question if template is None else template.render([{"role": "user", "content": question}])
        for question in QUESTIONS[:count]
    ]
    return [tokenizer.encode(text, add_special=template is None) for text in texts]


def reference_answers(folder: Path, questions: Ids, tokens: int) -> tuple[Ids, list[NDArray[np.float32]]]:
    """transformers' greedy ids, and its logits before each of them, [tokens, vocab] a question."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, logits = [], []
    with torch.inference_mode():
        for number, question in enumerate(questions):
            ids, cache, rows = torch.tensor([question]), None, []
            for _ in range(tokens):
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                rows.append(out.logits[0, -1].numpy())
                ids = out.logits[:, -1:].argmax(-1)
            answers.append([int(row.argmax()) for row in rows])
            logits.append(np.stack(rows))
            print(f"transformers: {number + 1} of {len(questions)}", file=sys.stderr)
    return answers, logits


def greedy(model: Model, questions: Ids, tokens: int) -> Ids:
    """The model's greedy ids, all questions in one batch."""
    sequences = [model.new_sequence() for _ in questions]
    answers: Ids = [[] for _ in questions]
    logits = model.step(list(zip(sequences, questions, strict=True)))
    for done in range(tokens):
        for answer, row in zip(answers, logits, strict=True):
            answer.append(int(row.argmax()))
        if done + 1 < tokens:
            logits = model.step([(sequence, answer[-1:]) for sequence, answer in zip(sequences, answers, strict=True)])
    return answers


def same_text(model: Model, questions: Ids, answers: Ids, expected: list[NDArray[np.float32]]) -> dict[str, float]:
    """Share of equal choices, mean KL divergence and largest difference of logits where the text is the reference's."""
    same, divergence, largest = [], [], 0.0
    for question, answer, rows in zip(questions, answers, expected, strict=True):
        ours = model.step([(model.new_sequence(), question + answer[:-1])], all_logits=True)
        ours = ours[-len(answer) :]
        same.append(ours.argmax(-1) == rows.argmax(-1))
        p, q = _log_softmax(rows), _log_softmax(ours)
        divergence.append((np.exp(p) * (p - q)).sum(-1))
        largest = max(largest, float(np.abs(ours - rows).max()))
    return {
        "same_choice": float(np.concatenate(same).mean()),
        "mean_kl": float(np.concatenate(divergence).mean()),
        "largest_logit_difference": largest,
    }


def _log_softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    values = rows.astype(np.float64) - rows.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def main(argv: list[str] | None = None) -> int:
    """Compare; exit status 0 whatever the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    args = parser.parse_args(argv)
    questions = prompts(args.models[0], args.questions)
    expected, logits = reference_answers(args.reference, questions, args.tokens)
    results: dict[str, Any] = {}
    for path in args.models:
        with Model.open(path, RunConfig(mode="dense", context=max(map(len, questions)) + args.tokens)) as model:
            answers = greedy(model, questions, args.tokens)
            lengths = [_equal(mine, theirs) for mine, theirs in zip(answers, expected, strict=True)]
            results[str(path)] = {
                "dtype": model.manifest.dtype,
                "whole_answers_equal": sum(length == args.tokens for length in lengths),
                "equal_tokens": lengths,
                **same_text(model, questions, expected, logits),
            }
        print(f"{path}: {results[str(path)]}", file=sys.stderr)
    print(json.dumps({"tokens": args.tokens, "questions": len(questions), "models": results}))
    return 0


def _equal(mine: list[int], theirs: list[int]) -> int:
    """How many tokens are equal from the start."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))


if __name__ == "__main__":
    sys.exit(main())
