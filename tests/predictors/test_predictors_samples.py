import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from samples import DataError, SampleReport, read_hub, read_shards, token_rows


class Words:
    """A tokenizer of one id a word, its length; an opening id first."""

    def encode(self, text):
        return [2, *(len(word) for word in text.split())]


def shard(path, lines, *, cut=0):
    raw = b"\n".join(line if isinstance(line, bytes) else json.dumps({"text": line}).encode() for line in lines)
    data = gzip.compress(raw) if path.suffix == ".gz" else raw
    path.write_bytes(data[: len(data) - cut])
    return path


def rows_of(paths, **options):
    report = SampleReport()
    options = {"samples": 20, "tokens_per_sample": 8, "seed": 0, **options}
    strict = options.pop("strict", False)
    return token_rows(lambda: read_shards(paths, report, strict=strict), Words(), report=report, **options), report


STORY = "one day a girl found a red ball in the garden and kept it until the spring came again " * 40


def test_bad_documents_are_counted_and_skipped(tmp_path):
    lines = [STORY, b"{not json", b"\xff\xfe broken", b'{"other": 1}', b'{"text": 7}', b"[1]", "", "  ", STORY]
    rows, report = rows_of([shard(tmp_path / "a.jsonl", lines)])
    assert rows.shape == (20, 8)
    assert report.skipped == {"bad line": 5, "empty document": 2}
    assert report.used == 20


@pytest.mark.parametrize("bad", [b"{not json", b'{"text": null}', b'{"text": ""}'])
def test_strict_stops_and_names_the_line(tmp_path, bad):
    path = shard(tmp_path / "a.jsonl", [STORY, bad])
    with pytest.raises(DataError, match="line 2"):
        rows_of([path], strict=True)


def test_a_truncated_shard_gives_what_it_has(tmp_path):
    noise = np.random.default_rng(0).integers(0, 10**9, 5000)
    path = shard(tmp_path / "a.jsonl.gz", [STORY, *(f"{n} words of noise" for n in noise)], cut=2000)
    rows, report = rows_of([path])
    assert len(rows) == 20
    assert report.skipped["truncated shard"] == 1
    with pytest.raises(DataError, match="truncated"):
        rows_of([path], strict=True)


def test_a_file_that_is_no_gzip(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"plain")
    with pytest.raises(DataError, match="no usable document"):
        rows_of([path])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_plain_text_is_one_document(tmp_path, name):
    raw = (STORY + "\n\n" + STORY).encode() + b"\xff"  # a byte that is no UTF-8 spoils nothing
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    rows, report = rows_of([tmp_path / name])
    assert rows.shape == (20, 8)
    assert not report.skipped
    (tmp_path / "empty.txt").write_text(" ")
    _, report = rows_of([tmp_path / "empty.txt", tmp_path / name])
    assert report.skipped == {"empty document": 1}


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        rows_of([tmp_path / "absent.jsonl"])


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(
        DataError, match="no usable document in the data: 0 samples used; skipped: 1 empty document, 1 bad"
    ):
        rows_of([shard(tmp_path / "a.jsonl", ["", b"x"])])
    with pytest.raises(DataError, match="give more text"):
        rows_of([shard(tmp_path / "b.jsonl", ["two words"])])
    with pytest.raises(DataError, match="gives 2 samples of 8 tokens, and 3 are the least"):
        rows_of([shard(tmp_path / "c.jsonl", ["one two three four five six seven"] * 2)])


def test_equal_seeds_give_equal_rows(tmp_path):
    paths = [shard(tmp_path / "a.jsonl", [STORY, STORY.upper()])]
    (first, _), (second, _), (other, _) = rows_of(paths), rows_of(paths), rows_of(paths, seed=1)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_huge_document_is_cut_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("samples.MAX_DOCUMENT_CHARS", 1000)
    rows, report = rows_of([shard(tmp_path / "a.jsonl", [STORY, "tail " * 1000])], samples=4)
    assert report.skipped == {"end of a huge document": 2}
    assert len(rows) == 4


def test_a_line_without_end_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr("samples.MAX_LINE_NBYTES", 2 * len(STORY))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (10 * len(STORY)) + b"\n" + json.dumps({"text": STORY}).encode())
    rows, report = rows_of([path])
    assert len(rows) > 0
    assert report.skipped["line of huge length"] == 1


def test_short_documents_are_packed(tmp_path):
    rows, report = rows_of([shard(tmp_path / "a.jsonl", ["three short words"] * 100)], samples=30)
    assert rows.shape == (30, 8)
    assert set(rows.flatten().tolist()) == {2, 5}
    assert report.skipped == {}


def test_long_documents_do_not_drown_short_ones(tmp_path):
    book = "aaaa " * 40_000  # 400 times the text of all the pages together
    pages = ["bbb bbb bbb bbb bbb bbb bbb"] * 20
    rows, _ = rows_of([shard(tmp_path / "a.jsonl", [book, *pages])], samples=60)
    assert np.mean([3 in row for row in rows]) > 0.1


def test_a_data_set_that_cannot_be_read_says_what_to_do(monkeypatch):
    def offline(*_args, **_options):
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(DataError, match="--data-files"):
        next(read_hub("allenai/c4", "en", limit=1))
