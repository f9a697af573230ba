"""The table of faults: what was tried, what survived, and by which command; the defects at its head.

    python bench/faults/table.py                     runs everything, for hours, into results/faults.json and faults.md
    python bench/faults/table.py --only defects      one part; the others' rows stay as they were
    python bench/faults/table.py --from reads=F.json takes a part's document instead of running it

Parts: defects (their tests), calls (every system call fails in turn), sampled (500 calls of longer work), reads,
completions (of io_uring), deaths, mutations, commands, metadata (of GGUF files), limits, lowered, flat; and large, the
limits of models that must be made first (tools/make_synthetic_model.py), so its document is always given.
Limits want root.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
DEMO = "flashllm/demo"
RESULTS = Path(__file__).parent / "results" / "faults.json"
COMMANDS = {
    "calls": ["tests/faults/harness.py", "--only", "convert", "generate", "verify", "offload"],
    "sampled": ["tests/faults/harness.py", "--sample", "500", "--only", "offload run", "train", "serve"],
    "reads": ["tests/faults/reads.py", "--reads", "1000000"],
    "completions": ["tests/faults/completions.py", "--trials", "3000"],
    "deaths": ["tests/faults/kills.py"],
    "mutations": ["tests/faults/mutations.py", "--each", "3300"],
    "commands": ["tests/faults/mutations.py", "--command", "500"],
    "metadata": ["tests/faults/metadata.py"],
    "limits": ["bench/faults/limits.py", "need", DEMO],
    "large": ["bench/faults/limits.py", "need", "OPT-1.3B", "OPT-6.7B", "--load", "8"],
    "lowered": ["bench/faults/limits.py", "lower", DEMO],
    "flat": ["bench/faults/limits.py", "flat", DEMO],
}
PARTS = ("defects", *COMMANDS)
GIVEN = ("large",)

Row = dict[str, Any]


def run_defects() -> list[Row]:
    """A row for each defect: its tests, all of which must pass."""
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    from defects import DEFECTS, THIRD

    rows = []
    named = {str(number): defect for number, defect in DEFECTS.items()}
    for number, defect in (
        named | {f"{number} of the third attack": defect for number, defect in THIRD.items()}
    ).items():
        tests = [f"tests/{test}" for test in defect.tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            print(done.stdout[-3000:], file=sys.stderr)
        survived = len(tests) if done.returncode == 0 else 0
        rows.append({"fault": f"defect {number}: {defect.was}", "tried": len(tests), "survived": survived,
                     "command": " ".join(tests)})  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def rows_of(part: str, document: dict[str, Any]) -> list[Row]:
    """A script's document as rows."""
    script, *arguments = COMMANDS[part]
    command = shlex.join(["python", script, *document.get("arguments", arguments)])
    if part not in ("calls", "sampled"):
        keys = ("fault", "tried", "survived")
        return [{**{key: row[key] for key in keys}, "command": command} for row in document["table"]]
    counts: dict[tuple[str, str], list[int]] = {}
    for operation, fault, verdict, count in document["table"]:
        row = counts.setdefault((operation, fault), [0, 0])
        row[0] += count
        row[1] += count if verdict in ("right", "error", "other") else 0
    return [
        {"fault": f"{operation}: {fault}", "tried": tried, "survived": survived, "command": command}
        for (operation, fault), (tried, survived) in counts.items()
    ]


def run_script(part: str) -> dict[str, Any]:
    """The document of a part's script."""
    done = subprocess.run([sys.executable, *COMMANDS[part]], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def markdown(parts: dict[str, list[Row]]) -> str:
    """The table as it is read."""
    lines = ["| fault | tried | survived | command |", "|---|---|---|---|"]
    for rows in parts.values():
        for row in rows:
            command = "<br>".join(f"`{word}`" for word in row["command"].split()) if "::" in row["command"] else (
                f"`{row['command']}`"
            )  # fmt: skip
            lines.append(f"| {row['fault']} | {row['tried']} | {row['survived']} | {command} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, help="parts")
    parser.add_argument("--from", dest="given", nargs="*", default=[], metavar="PART=FILE", help="documents to take")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: results/faults.json")
    args = parser.parse_args(argv)
    given = dict(each.split("=", 1) for each in args.given)
    parts: dict[str, list[Row]] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in PARTS:
        if part in given:
            parts[part] = rows_of(part, json.loads(Path(given[part]).read_text().splitlines()[-1]))
        elif part in (args.only or () if args.only is not None or given else set(PARTS) - set(GIVEN)):
            parts[part] = run_defects() if part == "defects" else rows_of(part, run_script(part))
    parts = {part: parts[part] for part in PARTS if part in parts}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(parts, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(parts))
    rows = [row for each in parts.values() for row in each]
    bad = sum(row["tried"] - row["survived"] for row in rows)
    print(json.dumps({"rows": len(rows), "tried": sum(row["tried"] for row in rows), "bad": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
