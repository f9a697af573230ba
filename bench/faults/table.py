"""The table of faults: what was tried, what survived, and by which command; the eleven defects at its head.

    python bench/faults/table.py                     runs everything, for hours, into results/faults.json and faults.md
    python bench/faults/table.py --only defects      one part; the others' rows stay as they were
    python bench/faults/table.py --from reads=F.json takes a part's document instead of running it

Parts: defects (their tests), calls (every system call fails in turn), reads, deaths, mutations, commands.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FAULTS = ROOT / "tests" / "faults"
RESULTS = Path(__file__).parent / "results" / "faults.json"
COMMANDS = {
    "calls": ["harness.py"],
    "reads": ["reads.py", "--reads", "1000000"],
    "deaths": ["kills.py"],
    "mutations": ["mutations.py", "--each", "5300"],
    "commands": ["mutations.py", "--command", "500"],
}
PARTS = ("defects", *COMMANDS)

Row = dict[str, Any]


def run_defects() -> list[Row]:
    """A row for each defect: its tests, all of which must pass."""
    sys.path.insert(0, str(FAULTS))
    from defects import DEFECTS

    rows = []
    for number, defect in DEFECTS.items():
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
    command = " ".join(["python", f"tests/faults/{COMMANDS[part][0]}", *COMMANDS[part][1:]])
    if part != "calls":
        keys = ("fault", "tried", "survived")
        return [{**{key: row[key] for key in keys}, "command": command} for row in document["table"]]
    counts: dict[tuple[str, str], list[int]] = {}
    for operation, fault, verdict, count in document["table"]:
        row = counts.setdefault((operation, fault), [0, 0])
        row[0] += count
        row[1] += count if verdict in ("right", "error") else 0
    return [
        {"fault": f"{operation}: {fault}", "tried": tried, "survived": survived, "command": command}
        for (operation, fault), (tried, survived) in counts.items()
    ]


def run_script(part: str) -> dict[str, Any]:
    """The document of a part's script."""
    name, *arguments = COMMANDS[part]
    done = subprocess.run([sys.executable, str(FAULTS / name), *arguments], stdout=subprocess.PIPE, check=False)
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
        elif (args.only is None and not given) or part in (args.only or ()):
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
