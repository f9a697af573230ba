"""Zero-shot tasks as items: prompts, choices, the right one, in the forms and scoring rules of lm-eval.

Reads local `.jsonl.gz` files, or the hub's data sets of the same names. Knows no model.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question. A single choice is a text to be said; several prompts (one a choice) share one continuation."""

    prompts: tuple[str, ...]
    choices: tuple[str, ...]  # each with its leading space
    label: int
    normalised: bool  # answers are compared per character


class Answer(NamedTuple):
    """A model's answer to an item. Of a single choice: 1 where greedy decoding says it, else 0."""

    plain: int  # the number of the likeliest choice
    normalised: int  # that of the likeliest per character
    right: bool
    right_normalised: bool


def answer_of(item: Item, likelihoods: Sequence[float], *, greedy: bool) -> Answer:
    """The answer that log-likelihoods of an item's choices make. As in lm-eval, a choice's characters are those
    without the space before it.

    `greedy`: every token of the first choice is the likeliest.
    """
    if len(item.choices) == 1:
        return Answer(int(greedy), int(greedy), greedy, greedy)
    numbers = range(len(item.choices))
    each = [value / max(1, len(choice.strip())) for value, choice in zip(likelihoods, item.choices, strict=True)]
    plain, normalised = (max(numbers, key=values.__getitem__) for values in (likelihoods, each))
    return Answer(plain, normalised, plain == item.label, normalised == item.label)


Row = dict[str, Any]


def _multiple_choice(prompt: str, row: Row, *, normalised: bool) -> Item:
    choices = tuple(" " + choice for choice in row["choices"])
    return Item(prompts=(prompt,), choices=choices, label=row["label"], normalised=normalised)


def _mmlu(row: Row) -> Item:
    letters = "ABCD"
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, row["choices"], strict=True))
    subject = row["subject"].replace("_", " ")
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    prompt = f"{head}{row['question'].strip()}\n{options}\nAnswer:"
    return _multiple_choice(prompt, {"choices": list(letters), "label": row["label"]}, normalised=False)


def _copa(row: Row) -> Item:
    choices = [choice[0].lower() + choice[1:] for choice in row["choices"]]
    return _multiple_choice(
        row["premise"].replace(", therefore", " therefore").replace(", because", " because"),
        {**row, "choices": choices},
        normalised=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task's rows, and how a row (in the local files' form) becomes an item."""

    file: str
    item: Callable[[Row], Item]
    hub: tuple[str, str | None, str]  # data set, configuration, split
    from_hub: Callable[[Row], Row]


def _lettered(row: Row) -> Row:
    choices = row["choices"]
    return {
        "question": row.get("question", row.get("question_stem")),
        "choices": list(choices["text"]),
        "label": list(choices["label"]).index(row["answerKey"]),
    }


def _winogrande_row(row: Row) -> Row:
    before, after = row["sentence"].split("_", 1)
    options = [before + row["option1"], before + row["option2"]]
    return {"context_options": options, "continuation": after.strip(), "label": int(row["answer"]) - 1}


def _lambada_row(row: Row) -> Row:
    context, _, target = row["text"].rpartition(" ")
    return {"context": context, "target": target}


def _question(row: Row) -> Item:
    return _multiple_choice(f"Question: {row['question']}\nAnswer:", row, normalised=True)


TASKS = {
    "hellaswag": Task(
        file="hellaswag_val.jsonl.gz",
        item=lambda row: _multiple_choice(
            f"{row['activity_label']}: {row['ctx']}", {**row, "choices": row["endings"]}, normalised=True
        ),
        hub=("Rowan/hellaswag", None, "validation"),
        from_hub=lambda row: {**row, "label": int(row["label"])},
    ),
    "arc_easy": Task(
        file="arc_easy_test.jsonl.gz", item=_question, hub=("allenai/ai2_arc", "ARC-Easy", "test"), from_hub=_lettered
    ),
    "arc_challenge": Task(
        file="arc_challenge_test.jsonl.gz",
        item=_question,
        hub=("allenai/ai2_arc", "ARC-Challenge", "test"),
        from_hub=_lettered,
    ),
    "piqa": Task(
        file="piqa_val.jsonl.gz",
        item=lambda row: _multiple_choice(f"Question: {row['goal']}\nAnswer:", row, normalised=True),
        hub=("ybisk/piqa", None, "validation"),
        from_hub=lambda row: {"goal": row["goal"], "choices": [row["sol1"], row["sol2"]], "label": row["label"]},
    ),
    "openbookqa": Task(
        file="openbookqa_test.jsonl.gz",
        item=lambda row: _multiple_choice(row["question"], row, normalised=True),
        hub=("allenai/openbookqa", "main", "test"),
        from_hub=_lettered,
    ),
    "winogrande": Task(
        file="winogrande_val.jsonl.gz",
        item=lambda row: Item(
            prompts=tuple(row["context_options"]),
            choices=(" " + row["continuation"],) * 2,
            label=row["label"],
            normalised=False,
        ),
        hub=("allenai/winogrande", "winogrande_xl", "validation"),
        from_hub=_winogrande_row,
    ),
    "copa": Task(
        file="copa_val.jsonl.gz",
        item=_copa,
        hub=("aps/super_glue", "copa", "validation"),
        from_hub=lambda row: {
            "premise": row["premise"].rstrip(".") + {"cause": " because", "effect": ", therefore"}[row["question"]],
            "choices": [row["choice1"], row["choice2"]],
            "label": row["label"],
        },
    ),
    "lambada": Task(
        file="lambada_openai_test.jsonl.gz",
        item=lambda row: Item(prompts=(row["context"],), choices=(" " + row["target"],), label=0, normalised=False),
        hub=("EleutherAI/lambada_openai", "default", "test"),
        from_hub=_lambada_row,
    ),
    "mmlu": Task(
        file="mmlu_test.jsonl.gz",
        item=_mmlu,
        hub=("cais/mmlu", "all", "test"),
        from_hub=lambda row: {**row, "label": int(row["answer"])},
    ),
}


def load_items(name: str, directory: Path | None, *, limit: int, seed: int) -> list[Item]:
    """At most `limit` random items of a task; from the hub where no `directory` is given.

    KeyError for a task not in TASKS, OSError where the file or the hub cannot be read.
    """
    task = TASKS[name]
    rows = _local_rows(directory / task.file) if directory is not None else _hub_rows(task)
    chosen = list(rows)
    order = np.random.default_rng(seed).permutation(len(chosen))[:limit]
    return [task.item(chosen[index]) for index in sorted(order)]


def _local_rows(path: Path) -> Iterable[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _hub_rows(task: Task) -> Iterable[Row]:
    import datasets

    name, config, split = task.hub
    try:
        # Text, as it is today; datasets runs none of its code.
        rows = datasets.load_dataset(name, config, split=split)  # nosec B615
    except Exception as error:  # a dozen types: offline, renamed, moved behind a licence
        raise OSError(f"cannot read {name} from the hub ({error}); give local files with --tasks-dir") from error
    for row in rows:
        yield task.from_hub(row)
