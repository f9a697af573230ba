"""The documents: no dead link, no file named that does not exist, no result that nothing cites, no table of its own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tables

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("bench", "flashllm", "predictors", "tests", "tools")  # not .venv, not build
FILES = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if "__pycache__" not in path.parts]
DOCUMENTS = sorted([REPOSITORY / "README.md", *(path for path in FILES if path.suffix == ".md")])
READMES = [path for path in DOCUMENTS if path.name == "README.md"]
PATHS = {"/" + path.relative_to(REPOSITORY).as_posix() for path in [*FILES, *REPOSITORY.iterdir()]}

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"[\w./-]+\.(?:py|cpp|h|md|pyi|svg|png)|[\w.-]+(?:/[\w.-]+)*/")
ELSEWHERE = {
    "csrc/cache/NAME_policy.h",
    "csrc/cache/NAME_policy.cpp",
    "flashllm/predictors/",
}  # to be written; in a wheel


def id_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", FENCED.sub("", text))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def expanded(name: str) -> list[str]:
    """The names that a shell's braces stand for: a.{h,cpp} is a.h and a.cpp."""
    found = re.search(r"\{([^{}]*)\}", name)
    if found is None:
        return [name]
    before, behind = name[: found.start()], name[found.end() :]
    return [each for choice in found[1].split(",") for each in expanded(before + choice + behind)]


def missing_names(text: str) -> Iterator[str]:
    """Files and folders of the repository that `text` names as code, by the last parts of their paths at least."""
    fenced = "\n".join(FENCED.findall(text))
    for code in [*CODE.findall(FENCED.sub("", text)), *re.findall(r"python ([\w/]+\.py)", fenced)]:
        for name in expanded(code):
            known = not NAMED.fullmatch(name) or name in ELSEWHERE
            if not known and not any(path.endswith("/" + name.rstrip("/")) for path in PATHS):
                yield name


@pytest.mark.parametrize("path", DOCUMENTS, ids=id_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(dead_links(path, path.read_text(encoding="utf-8"))) == []


def test_every_kind_of_model_is_marked_by_how_it_was_tested() -> None:
    text = (REPOSITORY / "flashllm/convert/README.md").read_text(encoding="utf-8")
    rows = text.split("## Which models")[1].split("\n## ")[0].strip().split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        assert "parity-tested" in row
        assert re.search(r"never run trained|run trained: ", row), row


@pytest.mark.parametrize("path", READMES, ids=id_of)
def test_named_files_exist(path: Path) -> None:
    assert list(missing_names(path.read_text(encoding="utf-8"))) == []


def test_a_dead_link_and_a_missing_file_are_found() -> None:
    readme = REPOSITORY / "README.md"
    text = "[a](bench/gone.json) [b](bench/README.md#gone) [c](bench/README.md#quality) [d](https://example.org/gone)"
    assert list(dead_links(readme, text)) == ["bench/gone.json", "bench/README.md#gone"]
    named = "`engine/gone.py` `engine/model.py` `csrc/model/` `csrc/gone/` `csrc/cache/gone_table.{h,cpp}`\n"
    named += "```sh\npython bench/gone.py --all\n```\n"
    assert list(missing_names(named)) == [
        "engine/gone.py",
        "csrc/gone/",
        *("csrc/cache/gone_table.h", "csrc/cache/gone_table.cpp"),
        "bench/gone.py",
    ]


def test_every_result_is_cited() -> None:
    cited = set()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        cited |= {link.split("/")[-1] for link in LINK.findall(text)}
        cited |= {name.split("/")[-1] for code in CODE.findall(text) for name in expanded(code.strip())}
    results = {path for path in FILES if path.parent.name == "results" and path.parts[-4] == "bench"}
    assert len(results) > 50
    assert [id_of(path) for path in sorted(results) if path.name not in cited] == []


def test_the_first_page_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=id_of)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == tables.rendered(text), "python bench/tables.py writes the tables"


def test_the_picture_is_that_of_the_results() -> None:
    assert tables.PICTURE.read_text(encoding="utf-8") == tables.picture()


def test_every_table_stands_in_one_document_and_a_changed_digit_is_mended() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    marks = [name for text in texts for name in re.findall(r"<!-- table ([\w-]+) -->", text)]
    assert sorted(marks) == sorted(tables.TABLES)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    wrong = text.replace(" s a token", "9 s a token")
    assert wrong != text
    assert tables.rendered(wrong) == text


def test_the_script_says_what_differs_and_mends_it(tmp_path, monkeypatch, capsys) -> None:
    document, picture = tmp_path / "README.md", tmp_path / "picture.svg"
    document.write_text("before\n<!-- table first-page -->\nold\n<!-- end of table -->\nbehind\n")
    monkeypatch.setattr(tables, "REPOSITORY", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", (document,))
    monkeypatch.setattr(tables, "PICTURE", picture)
    assert tables.main(["--check"]) == 1
    assert not picture.exists()
    assert tables.main([]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"changed": ["README.md", "picture.svg"]}
    assert document.read_text().startswith("before\n<!-- table first-page -->\n\n| model |")
    assert tables.main(["--check"]) == 0
