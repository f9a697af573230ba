"""Writes the tables of results into the documents, from the JSON files that they cite, the commands of their rows
(overnight.py), and the README's picture.

    python bench/tables.py            rewrites what has changed
    python bench/tables.py --check    writes nothing; exit status 1 where a document differs

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`; NAME is a key of TABLES. The text around a
table is a person's. The last line of standard output is one JSON document: the files that were, or would be, changed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from overnight import block

BENCH = Path(__file__).resolve().parent
REPOSITORY = BENCH.parent
PICTURE = BENCH / "beside_llama.svg"
DOCUMENTS = (REPOSITORY / "README.md", BENCH / "README.md")
_OPT, _LLAMA = "peer/results/report_opt-6.7b.json", "peer/results/report_llama-2-7b.json"
_BREAKDOWN = "engine/results/breakdown_opt-6.7b.json"
_REGION = re.compile(r"<!-- table ([\w-]+) -->\n((?!<!--).*\n)*<!-- end of table -->")
_WHOLE_OF_8_LAYERS = 3.5  # llama.cpp's time for 32 layers over its time for 8, by their bytes (ledger, "Zen 4")


def load(path: str) -> Any:
    """The document `path`, below bench/."""
    return json.loads((BENCH / path).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *rows))


def link(path: str, text: str = "JSON") -> str:
    """A link to the result `path`, from bench/README.md."""
    return f"[{text}]({path})"


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 5 else f"{value:.1f} s"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


# Tokens one after the other


class Pair(NamedTuple):
    """Seconds a token of flashllm and of llama.cpp, under one memory limit."""

    model: str
    nbytes: int
    limit: int
    ours: float
    theirs: float
    path: str
    peer: str = ""  # the file of llama.cpp's run, where it is another


def _reported(model: str, path: str, memory: int | None = None, peer: str = "") -> Pair:
    """Warm tokens behind the first prompt: of a report, with llama.cpp's of `peer` where that has another model, or of
    several limits' runs those under `memory`."""
    document, other = load(path), load(peer) if peer else {"runs": []}
    nbytes = document["file_bytes"] if memory else document["model"]["peer_file_bytes"]
    limit = memory or document["memory"]
    ran: dict[str, float] = {}
    for run in (*document["runs"], *other["runs"]):
        if run.get("memory", limit) == limit:
            ran.setdefault(run["engine"], run["runs"][1]["token_ms"] / 1e3)
    return Pair(model, nbytes, limit, ran["flashllm"], ran["llama.cpp"], path, peer)


def beside() -> list[Pair]:
    rows = [_reported("OPT-6.7B", _OPT, peer=_LLAMA)._replace(nbytes=load(_BREAKDOWN)["conditions"]["model_bytes"])]
    rows.append(_reported("OLMoE, Q4_K_M", "peer/results/report_olmoe_q4_k_m.json"))
    rows.append(_reported("gpt-oss-20b, MXFP4", "peer/results/report_gpt-oss-20b.json"))
    rows.append(_reported("Qwen3.6-35B-A3B, Q4_K_M", "peer/results/whole_qwen3.6-35b-a3b.json", 8_000_000_000))
    path = "engine/results/breakdown_qwen3_30b_a3b_8layers.json"
    qwen, ran = load(path), load(path)["conditions"]
    ours, theirs = qwen["engines"]["flashllm"]["total_ms"] / 1e3, qwen["llama_cpp_token_median_s"]
    rows.append(Pair("Qwen3-30B-A3B, 8 of 48 layers", ran["model_bytes"], ran["memory"], ours, theirs, path))
    path = "peer/results/peer_olmoe.json"
    ours, theirs = load("engine/results/breakdown_olmoe.json")["engines"]["flashllm"]["total_ms"] / 1e3, load(path)
    olmoe = Pair("OLMoE", theirs["model_bytes"], theirs["memory"], ours, theirs["token_median_s"], path)
    return [*rows, olmoe]


def first_page() -> str:
    rows = [
        [f"{one.model} ({gigabytes(one.nbytes)})", gigabytes(one.limit), *(f"{seconds(s)} a token" for s in one[3:5])]
        for one in beside()[:4]
    ]
    run = load("offload/results/offload_peers_2.json")["runs"][0]
    ours, theirs = run["rows"]
    layers = f"{run['model'].split('-')[1]} of {run['layers_of_shape']} layers"
    model = f"many prompts: OPT-6.7B, {layers} ({gigabytes(ours['bytes_read'] / run['new'])})"
    rates = [f"{one['throughput']:.1f} tokens a second" for one in (ours, theirs)]
    limit = gigabytes(ours["group_bytes"])
    rows.append([model, limit, *rates])
    read = [
        count * run["prompt"] / one["prefill_s"] for count, one in ((run["batch"], ours), (theirs["batch"], theirs))
    ]
    rows.append(["of that run, reading the prompts alone", limit, *(f"{rate:.0f} tokens a second" for rate in read)])
    return table(["model", "memory limit", "flashllm", "llama.cpp"], rows)


def tokens() -> str:
    rows = []
    for one in beside():
        times = [f"{1e3 * one.ours:.0f}", f"{1e3 * one.theirs:,.0f} under the same limit"]
        links = " and ".join(link(path) for path in (one.path, one.peer) if path)
        rows.append([one.model, gigabytes(one.nbytes), gigabytes(one.limit), *times, links])
    in_memory = next(run["runs"] for run in load(_LLAMA)["runs"] if run["memory"] is None)[1]["token_ms"]
    rows.append([*rows[0][:4], f"{in_memory:.0f} with all in memory", rows[0][5]])
    for name, file, key in (
        ("OPT-6.7B, 4 bits, placed", "opt-6.7b_4bit_zen4", "llama_token_median_s_of_8_layers"),
        ("Llama-2-7B with ReLU, 4 bits, predictors", "llama7b_4bit", "llama_q4_0_token_median_s_of_8_layers"),
        ("Llama-2-7B with ReLU, gates resident", "llama7b_relu_resident", ""),
        ("Llama-2-7B with ReLU, predictors", "llama7b_relu_half", ""),
    ):
        path = f"engine/results/breakdown_{file}.json"
        one = load(path)
        runs = one.get("ours", [one])
        ran = runs[0]["conditions"]
        times = " and ".join(f"{run['engines']['flashllm']['total_ms']:.0f}" for run in runs)
        peer = " and ".join(f"{1e3 * _WHOLE_OF_8_LAYERS * s:.0f}" for s in one[key]) if key else ""
        peer = f"{peer} with all in memory, projected from 8 layers" if peer else "not run"
        rows.append([name, gigabytes(ran["model_bytes"]), gigabytes(ran["memory"]), times, peer, link(path)])
    return table(["model", "bytes", "limit", "ms a token", "llama.cpp, ms a token", "file"], rows)


def agreement() -> str:
    """Two reports of `protocol.py` on one machine, of each model: milliseconds a token, cold and warm."""
    rows = []
    for model in ("smollm2", "olmoe", "opt-6.7b"):
        pair = [load(path) for path in (f"engine/results/report_{model}_{number}.json" for number in (1, 2))]
        for first, second in zip(*(one["runs"] for one in pair), strict=True):
            for one, other in zip(first["runs"], second["runs"], strict=True):
                both = (one, other)
                rows.append(
                    [
                        f"{model}, {gigabytes(pair[0]['memory'])}",
                        f"{first['prompt']}, {one['name']}",
                        *(f"{each['token_ms']:.1f}" for each in both),
                        f"{100 * (other['token_ms'] / one['token_ms'] - 1):+.0f} %",
                        " and ".join(f"{each['prompt']['total_ms'] / 1e3:.2f} s" for each in both),
                        " and ".join(f"{each['bytes_read'] / 1e6:.0f} MB" for each in both),
                        " and ".join(link(f"engine/results/report_{model}_{number}.json") for number in (1, 2)),
                    ]
                )
    head = ["model, limit", "prompt", "ms a token", "again", "differs", "prompt's pass", "read a token", "file"]
    return table(head, rows)


def own_engines() -> str:
    names = {
        "naive": "reads every weight for every token",
        "hybrid": "keeps half of the weights, reads the rest",
        "paper": "as the paper describes it: window, bundled rows, predictors",
        "flashllm": "flashllm",
    }
    engines = load(_BREAKDOWN)["engines"]
    best = engines["flashllm"]["total_ms"]
    rows = [
        [text, f"{engines[name]['total_ms']:,.0f}", f"{engines[name]['total_ms'] / best:.2f}"]
        for name, text in names.items()
    ]
    return table(["engine", "ms a token", "times flashllm's"], rows)


def widths() -> str:
    names = {"int4_32": "4 bits", "int8_32": "8 bits", "bf12": "12 bits (bf16 without loss)", "bfloat16": "16 bits"}
    rows = [
        [
            names.get(one["encoding"], one["encoding"]),
            gigabytes(one["memory"]),
            f"{one['total_ms']:.0f}",
            f"{one['planned_ms']:.0f}",
            f"{one['bytes_read'] / 1e6:.0f} MB",
            percent(one["hit_rate"], 0),
        ]
        for one in load("engine/results/memory_opt-6.7b_widths_zen4.json")["rows"]
    ]
    return table(["weights in", "limit", "ms a token", "plan expected", "read a token", "hits"], rows)


def compared(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A prompt's seconds and a token's milliseconds, flashllm's for llama.cpp's: medians of whole_model.py's runs over
    their warm halves, of llama.cpp's settings the best, which is named where there were several."""
    ran: dict[tuple[str, str], list[Any]] = {}
    for run in runs:
        warm = [one for one in run["runs"] if one["name"] == "warm"]
        ran.setdefault((run["engine"], run.get("setting", "")), []).extend(warm)
    several = len({setting for _, setting in ran} - {""}) > 1

    def cell(figure: Callable[[Any], float], digits: int) -> str:
        cells = []
        for engine in ("flashllm", "llama.cpp"):
            found = [(median(map(figure, each)), name) for (of, name), each in ran.items() if of == engine and each]
            if found:
                best, name = min(found)
                cells.append(f"{best:,.{digits}f}" + (f" ({name})" if name and several else ""))
        return " for ".join(cells)

    return cell(lambda one: one["prompt"]["total_ms"] / 1e3, 1), cell(lambda one: one["token_ms"], 0)


def whole_models() -> str:
    """Medians over the rounds of every document of whole_model.py, by limit."""
    rows = []
    for path in sorted((BENCH / "peer/results").glob("whole_*.json")):
        document = load(f"peer/results/{path.name}")
        for limit in dict.fromkeys(run["memory"] for run in document["runs"]):
            figures = compared([run for run in document["runs"] if run["memory"] == limit])
            machine = document["machine"]
            used = machine.get("used", "auto")
            shape = path.stem.removeprefix("whole_").split("_")[0] + f", {document['rows'].upper()}"
            asked = [f"{document['layers']}", f"{document['prompt']:,}", f"{limit / 1e9:g} GB"]
            named = link(f"peer/results/{path.name}")
            rows.append([shape, *asked, *figures, machine["simd"] if used == "auto" else used, named])
    head = ["file", "layers", "prompt", "limit", "the prompt, s", "a token, ms", "instructions", "JSON"]
    return table(head, rows)


# Many prompts at once


def batches() -> str:
    rows = []
    for path in (
        "offload_run",
        "offload_run_zen5",
        "offload_peers_2",
        "offload_run_4bit",
        "offload_run_whole",
        "offload_run_olmoe",
        "offload_run_olmoe_zen4",
    ):
        document = load(f"offload/results/{path}.json")
        for run in document.get("runs", [document]):
            is_file = run["model"].endswith(".gguf")  # which both run
            bits = "the same file" if is_file else "Q4_0" if "-q4.gguf" in run.get("command", "") else "16 bits"
            layers = f"{run['layers_of_shape']} of {run['model']}" if is_file else run["model"].split("-")[1]
            for one in run["rows"]:
                if "failed" in one:  # a batch that was too large
                    continue
                peer = one.get("peer") == "llama"
                rows.append(
                    [
                        f"llama.cpp, {bits}" if peer else f"flashllm, {one['run']}",
                        f"{layers}; {run['prompt']} and {run['new']}",
                        str(one.get("batch", run["batch"])),
                        gigabytes(one["group_bytes"]),
                        f"{one['throughput']:.1f}",
                        f"{one['decode_throughput']:.1f}",
                        percent(one["of_roof"], 0) if one.get("of_roof") else "",
                        link(f"offload/results/{path}.json"),
                    ]
                )
    head = ["engine", "layers; prompt and new tokens", "batch", "limit", "tokens a second", "decoding alone", "of roof"]
    return table([*head, "file"], rows)


def planner() -> str:
    rows = []
    for one in load("offload/results/run_accuracy.json")["rows"]:
        parts = ("prefill_s", "decode_s")
        measured = median(sum(run[part] for part in parts) for run in one["measured"])
        predicted = sum(one["predicted"][part] for part in parts)
        errors = [f"{100 * one[key]['whole_s']:+.1f} %" for key in ("error", "error_after")]
        rows.append([one["run"], f"{predicted:.1f}", f"{measured:.1f}", *errors])
    head = ["policy", "predicted, s", "measured, s", "error", "with a profile taken afterwards"]
    return table(head, rows)


def offload_quality() -> str:
    rows = []
    for path in ("offload_quality", "offload_quality_paper", "offload_quality_encodings"):
        for one in load(f"offload/results/{path}.json")["rows"]:
            words = one["lambada_accuracy"]
            rows.append(
                [
                    one["row"],
                    f"{one['perplexity']:.2f}",
                    f"{100 * one['change']:+.2f} ± {100 * one['standard_error'] * (1 + one['change']):.2f} %"
                    if one["change"]
                    else "",
                    "" if words is None else percent(words, 0),
                    link(f"offload/results/{path}.json"),
                ]
            )
    return table(["row", "perplexity", "change", "LAMBADA", "file"], rows)


# Quality on real models

_TASKS = ("lambada", "arc_easy", "piqa", "hellaswag", "arc_challenge", "mmlu")


def _change(text: Mapping[str, Any]) -> str:
    """A perplexity's change with its standard error, which is the loss's in the file."""
    if text["change"] == 0:
        return ""
    if text["change"] > 9:
        return f"×{1 + text['change']:.1f}"
    error = text["change_error"] * (1 + text["change"])
    return "0.00 %" if error < 5e-5 else f"{100 * text['change']:+.2f} ± {100 * error:.2f} %"


def _digits(perplexity: float) -> str:
    return f"{perplexity:.1f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def _scores(path: str, names: Mapping[str, str], tasks: Sequence[str], *, firing: bool = False) -> str:
    """A row for every variant that bench/quality/task_scores.py measured, in its order."""
    rows = []
    for key, one in load(path)["rows"].items():
        text = one["text"]
        cells = [names[key], f"{text['perplexity']:.2f}", _change(text), percent(text["agreement"])]
        if firing:
            cells.append(percent(fmean(text["firing"]), 2))
        for task in tasks:
            got = one.get(task)
            word = f" ({_digits(got['perplexity'])})" if got and "perplexity" in got else ""
            cells.append(f"{100 * got['acc']:.0f}{word}" if got else "")
        rows.append(cells)
    titles = {"lambada": "LAMBADA", "arc_easy": "ARC-easy", "piqa": "PIQA", "hellaswag": "HellaSwag"}
    titles |= {"arc_challenge": "ARC-challenge", "mmlu": "MMLU"}
    head = ["row", "perplexity", "change", "same likeliest token", *(["neurons that fire"] if firing else [])]
    return table([*head, *(titles[task] for task in tasks)], rows)


def quality() -> str:
    names = {
        "transformers": "transformers, fp32",
        "dense": "flashllm, fp32",
        "bfloat16": "bf16",
        "bf12+bf12": "12 bits: the same bits as bf16",
        "int8_32+int8_32": "8 bits, everything, rounded",
        "int4_32_min+int4_32_min+int8_32*": "4 bits with minimums, `--calibrate`, embedding in 8 (its own grid)",
        "int4_32+int4_32+int8_32": "4 bits, rounded, embedding in 8",
        "int4_32": "4 bits, neurons alone, rounded",
        "+int4_32": "4 bits, all but the neurons, rounded",
        "int4_32:down": "4 bits, down projections alone, rounded",
        "30%": "`--sparsify 0.3`, fp32",
        "30% sparse": "the same, neurons computed one by one",
        "50%": "`--sparsify 0.5`, fp32",
        "60%": "`--sparsify 0.6`, fp32",
        "70%": "`--sparsify 0.7`, fp32",
        "80%": "`--sparsify 0.8`, fp32",
    }
    return _scores("quality/results/task_scores_smollm2.json", names, _TASKS)


def quality_peer() -> str:
    names = {
        "dense": "flashllm, fp32",
        "llama.cpp smollm2-q4_0.gguf": "llama.cpp, Q4_0 (4.5 bits), embedding in Q8_0",
        "int4_32+int4_32+int8_32": "flashllm, 4 bits (4.5 with scales), rounded, embedding in 8",
    }
    return _scores("quality/results/task_scores_smollm2_q4_0.json", names, ())


def quality_cache() -> str:
    names = {
        "dense": "keys and values in fp32",
        "dense cache 8": "`--cache-bits 8`",
        "dense cache 4": "`--cache-bits 4`",
    }
    return _scores("quality/results/cache_bits_smollm2.json", names, ())


def quality_demo() -> str:
    names = {
        "dense": "fp16",
        "int8_32+int8_32": "8 bits, everything, rounded",
        "int4_32+int4_32": "4 bits, everything, rounded",
        "int4_32": "4 bits, neurons alone, rounded",
    }
    return _scores("quality/results/task_scores_demo.json", names, (), firing=True)


def predictors_demo() -> str:
    rows = []
    for text, one in load("cache/results/predictors_demo.json")["texts"].items():
        dense, trained = (one["perplexity"][key] for key in ("dense", "trained"))
        name = "WikiText-2" if text.startswith("wiki") else "books that training did not see"
        agreement = percent(one["same_top"]["trained"])
        rows.append([name, f"{one['tokens']:,}", f"{dense:.2f}", f"{100 * (trained / dense - 1):+.2f} %", agreement])
    return table(["text", "tokens", "perplexity, dense", "with predictors", "same likeliest token"], rows)


def relufication() -> str:
    stages = {
        "unmodified": "unmodified",
        "thresholds": "thresholds alone (FATReLU)",
        "refitted": "down projections refitted",
    }
    rows, every, last = [], load("quality/results/relufication_smollm2.json")["table"], ""
    kept = [one for i, one in enumerate(every) if i < 4 or one["tokens"] % 98304 == 0 or one is every[-1]]
    for one in kept:
        stage = stages.get(one["stage"], "FFNs distilled")
        zeros = f"{100 * one['least_zeros']:.0f} to {percent(one['most_zeros'], 0)}" if one["zeros"] else ""
        rows.append(
            [
                "" if stage == last else stage,
                f"{one['tokens']:,}",
                f"{one['perplexity']:,.2f}",
                percent(one["agreement"]),
                percent(one["zeros"]),
                zeros,
            ]
        )
        last = stage
    return table(["", "tokens", "perplexity", "same likeliest token", "zeros", "of the layers"], rows)


def relufied_naming() -> str:
    rows = []
    for name, file, key, layers in (
        ("gate in 4 bits, margin of conversion", "_gates", "gates", "layers"),
        ("trained, mean rank 277, recall 97 %", "", "trained", "layers"),
        ("the same ranks untrained (SVD), recall 99 %", "", "svd", "layers_svd"),
        ("trained, rank 64 (the model at 147,456 tokens)", "_rank_64", "trained", "layers"),
    ):
        path = f"cache/results/predictors_smollm2_relufied{file}.json"
        one = load(path)
        mean = {field: fmean(layer[field] for layer in one[layers]) for field in one[layers][0]}
        texts = list(one["texts"].values())
        grown = [100 * (text["perplexity"][key] / text["perplexity"]["dense"] - 1) for text in texts]
        rows.append(
            [
                link(path, name),
                f"{one['predictor_bytes'] / 1e6:.1f} MB",
                percent(mean["predicted_share"]),
                f"{percent(mean['false_negative'])}; {percent(mean['missed_energy'], 2)}",
                "; ".join(f"{growth:+.2f} %" for growth in grown),
                "; ".join(percent(text["same_top"][key]) for text in texts),
                f"{texts[0]['kl'][key]:.3f}",
            ]
        )
    head = ["what names the neurons", "bytes", "named", "firing, but missed; by weight", "perplexity: wiki; books"]
    return table([*head, "same likeliest token", "KL, wiki"], rows)


def relufied_flash() -> str:
    rows = []
    for name, one in load("engine/results/breakdown_smollm2_relufied.json").items():
        (ran,) = one["engines"].values()
        rows.append(
            [
                name,
                f"{ran['total_ms']:.0f} ({ran['io_ms']:.0f}, {ran['compute_ms']:.0f})",
                f"{ran['bytes_read'] / 1e6:.0f} MB",
                f"{ran['requests']:,}",
                percent(ran["hit_rate"], 0) if ran["hit_rate"] else "",
            ]
        )
    return table(["", "ms a token (I/O, compute)", "read", "requests", "hits"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "every-row": block,
    "first-page": first_page,
    "tokens": tokens,
    "agreement": agreement,
    "own-engines": own_engines,
    "widths": widths,
    "whole-models": whole_models,
    "batches": batches,
    "planner": planner,
    "quality": quality,
    "quality-peer": quality_peer,
    "quality-cache": quality_cache,
    "quality-demo": quality_demo,
    "quality-offload": offload_quality,
    "predictors-demo": predictors_demo,
    "relufication": relufication,
    "relufied-naming": relufied_naming,
    "relufied-flash": relufied_flash,
}


def picture() -> str:
    """Bars of seconds a token, as SVG; ours above llama.cpp's."""
    rows = beside()[:4]
    scale = 560 / max(one.theirs for one in rows)
    shapes = []
    for i, one in enumerate(rows):
        top = 46 + 62 * i
        limit = f"{gigabytes(one.nbytes)} in {gigabytes(one.limit)} of memory"
        shapes.append(f'<text x="10" y="{top}">{one.model}: {limit}</text>')
        for k, (who, value, fill) in enumerate(
            (("flashllm", one.ours, "#1f6feb"), ("llama.cpp", one.theirs, "#9aa4b2"))
        ):
            y, width = top + 7 + 18 * k, max(scale * value, 2)
            shapes.append(f'<rect x="10" y="{y}" width="{width:.0f}" height="14" fill="{fill}"/>')
            shapes.append(f'<text x="{width + 16:.0f}" y="{y + 12}" class="small">{who} {seconds(value)}</text>')
    height = 46 + 62 * len(rows) - 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}">',
            "<style>text { font: 14px sans-serif } .small { font-size: 12px }</style>",
            f'<rect width="720" height="{height}" fill="#ffffff"/>',
            '<text x="10" y="20">Seconds a token under the same memory limit (less is better)</text>',
            *shapes,
            "</svg>\n",
        ]
    )


def rendered(text: str) -> str:
    """A document's text with every table made anew. KeyError for a name that TABLES has not."""
    return _REGION.sub(lambda at: f"<!-- table {at[1]} -->\n\n{TABLES[at[1]]()}\n<!-- end of table -->", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a document differs")
    args = parser.parse_args(argv)
    wanted = {path: rendered(path.read_text(encoding="utf-8")) for path in DOCUMENTS} | {PICTURE: picture()}
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if not args.check:
        for path in changed:
            path.write_text(wanted[path], encoding="utf-8")
    print(json.dumps({"changed": [str(path.relative_to(REPOSITORY)) for path in changed]}))
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
