"""The core's benchmarks run, and end with one JSON document."""

import json
import shutil
import subprocess

import pytest
from scripts import REPOSITORY, document_of, run_script

READER = ["--file-size", "1MiB", "--sizes", "512B,4KiB", "--threads", "2", "--rounds", "2", "--seconds", "0.001"]


@pytest.mark.parametrize(
    ("script", "arguments", "figures", "compared"),
    [
        ("kernels/kernels.py", ["--tiny", "--threads", "1", "--seconds", "0.001"], 82, "percent_of_roof"),
        ("kernels/attention.py", ["--tiny", "--threads", "1", "--rounds", "1"], 3, "ratio"),
        ("io/reader.py", [*READER, "--queue-depths", ""], 3, "percent_of_roof"),
    ],
)
def test_benchmarks_end_with_one_json_document(script, arguments, figures, compared):
    document = document_of(run_script(f"bench/{script}", *arguments))
    assert len(document["results"]) == figures
    assert all(compared in figure for figure in document["results"])


def test_up_rows_and_down_columns_are_timed_apart_with_the_instructions_asked_for():
    quick = ["--tiny", "--threads", "1", "--seconds", "0.001", "--dtypes", "", "--simd", "scalar"]
    document = document_of(run_script("bench/kernels/kernels.py", *quick))
    nbytes = {}
    for each in document["results"]:
        nbytes.setdefault(each["dtype"], {})[each["name"]] = each["nbytes"]
    for encoding in ("int4_32", "q2_k", "q6_k"):
        found = nbytes[f"{encoding} x int8"]
        assert found["gathered"] == found["up rows"] + found["down columns"] == 2 * found["up rows"]
    assert document["used"] == "scalar"
    assert all("inner_loop" not in each["gflop_per_cpu_s"] for each in document["tokens"])


def test_speculation_runs_with_the_instructions_asked_for():
    quick = ["--tokens", "12", "--rounds", "1", "--forced", "--simd", "scalar"]
    document = document_of(run_script("bench/engine/speculation.py", *quick))
    assert document["used"] == "scalar"
    assert document["forced"]["ms"] > 0


def test_rows_that_tokens_name_are_timed(tmp_path):
    sizes = ["--rows", "300", "--layers", "12", "--kept", "1", "400", "--tokens", "8", "--turns", "2", "--warm", "8"]
    document = document_of(run_script("bench/cache/token_rows.py", tmp_path / "rows", *sizes, "--encoding", "int8_32"))
    one, whole = document["results"]
    assert one["hit_rate"] < whole["hit_rate"]
    assert whole["rows_kept"] == document["rows"] == 300


def test_the_reader_curve_is_written_and_plotted(tmp_path):
    result = run_script("bench/io/reader.py", *READER, "--queue-depths", "3", "--out", tmp_path / "curve")
    document = document_of(result)
    assert json.loads((tmp_path / "curve.json").read_text()) == document
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    backends = ["threads"] if document["conditions"]["without_io_uring"] else ["threads", "io_uring"]
    found = {(each["backend"], each["size"], each["sequential"]) for each in document["results"]}
    assert found == {(backend, size, size == 1 << 20) for backend in backends for size in (512, 4096, 1 << 20)}
    assert (tmp_path / "curve.md").read_text().count("| random |") == 2


def test_the_overlap_table_takes_medians(tmp_path):
    """Synthetic rounds: the table's medians, rates and document."""
    rows = [
        {"round": r, "backend": backend, "size": size, "recall": recall, "token_ms": ms + r}
        for r in range(3)
        for backend, size, recall, ms in [
            ("none", 0, -2.0, 100.0),
            *(("threads 32", 16384, recall, 300.0) for recall in (-1.0, 0.0, 0.5, 0.7, 0.9)),
        ]
    ]
    (tmp_path / "rounds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = run_script("bench/io/overlap.py", "table", tmp_path / "rounds.jsonl", "--json", tmp_path / "out")
    rate = 32 * 393 * 16384 / 301 / 1e6
    assert f"| 16 KiB | threads 32 | 301 (300–302) | {rate:.2f} | 301 (300–302) |" in result.stdout
    document = document_of(result)
    assert json.loads((tmp_path / "out").read_text()) == document
    assert {row["rounds"] for row in document["results"]} == {3}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_overlap_program_is_in_step_with_the_core():
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{REPOSITORY / 'flashllm' / 'csrc'}"]
    command = ["g++", *flags, REPOSITORY / "bench" / "io" / "overlap.cpp"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
