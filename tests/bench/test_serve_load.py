"""The server's load script runs, and ends with one JSON document."""

from scripts import REPOSITORY, document_of, run_python


def test_a_small_load():
    small = ["--requests", "6", "--at-once", "2", "--rounds", "1", "--tokens", "5"]
    report = document_of(run_python(REPOSITORY / "bench/serve/serve_load.py", *small, timeout=280))
    assert report["load"]["answered"] == 6
    assert report["overhead"]["server_ms"] > 0
