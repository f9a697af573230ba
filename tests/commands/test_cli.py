"""The command line from the outside: statuses, the one error line, what is on which stream, what is imported."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys

import pytest
from damage import flip
from scripts import run_python
from tiny_models import make_tiny_opt

import flashllm.cli
from flashllm import _core
from flashllm.base.text import inert
from flashllm.cli import COMPLETION, VERBS, make_parser
from flashllm.commands import options
from flashllm.commands.chat import sampling_defaults
from flashllm.config import CACHE_POLICIES
from flashllm.errors import BudgetError, FormatError
from flashllm.profile.costs import ReaderChoice

PIECE = ["--threads", "1"]


def is_one_error_line(err):
    return err.startswith("flashllm: error: ") and err.count("\n") == 1 and err.endswith("\n")


# Parsing.


def test_help_imports_nothing_heavy_and_the_chosen_verbs_module_alone():
    code = (
        "import sys; from flashllm.cli import VERBS, main; main(['verify', '--help']);"
        "print(sorted(name for name in sys.modules if name.startswith('flashllm.commands.')), file=sys.stderr);"
        "heavy = {'torch', 'transformers', 'datasets', 'scipy', 'huggingface_hub', 'rich', 'prompt_toolkit'};"
        "asked = [['--version'], [], ['--help'], *([verb, '--help'] for verb in VERBS)];"
        "bad = [argv for argv in asked if main(argv) or heavy & set(sys.modules)]; sys.exit(repr(bad) if bad else 0)"
    )
    result = run_python("-c", code)
    assert eval(result.stderr) == [f"flashllm.commands.{name}" for name in ("asked", "options", "verify")]
    assert "\nflashllm 0" in result.stdout
    assert result.stdout.count("usage: flashllm") == 3 + len(VERBS)
    for verb in VERBS:
        assert f"    {verb} " in result.stdout


def test_options_are_few():
    """What benches and tests alone need is a field of `RunConfig`, or an argument of a Python function."""

    def options_of(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from (option for each in action.choices.values() for option in options_of(each))
            yield from (name for name in action.option_strings if name.startswith("--") and name != "--help")

    found = set(options_of(make_parser(COMPLETION)))
    assert {"--memory", "--bits", "--input", "--park-size"} <= found
    assert len(found) <= 60, sorted(found)


@pytest.mark.parametrize(
    "argv",
    [
        ["frobnicate"],
        ["--frobnicate"],
        ["generate"],
        ["generate", "m", "extra", "--prompt", "x"],
        ["generate", "--prompt", "x", "--mode", "magic"],
        ["generate", "--prompt", "x", "--memory", "7GX"],
        ["generate", "--prompt", "x", "--memory", "0"],
        ["generate", "--prompt", "x", "--memory", "-1GB"],
        ["generate", "--prompt", "x", "--top-p", "nan"],
        ["generate", "--prompt", "x", "--top-p", "0"],
        ["generate", "--prompt", "x", "--min-p", "1.5"],
        ["generate", "--prompt", "x", "--temperature", "inf"],
        ["generate", "--prompt", "x", "--temperature=-1"],
        ["generate", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "--prompt", "x", "--threads", "two"],
        ["generate", "--prompt", "x", "--mode", "oracle"],
        ["generate", "--prompt", "x", "--threads", "100000"],
        ["generate", "--prompt", "x", "--seed", str(2**63)],
        ["generate", "--prompt", "x", "--max-new", "3"],
        ["chat", "--window", "5"],
        ["chat", "--memory", "9" * 5000],
        ["chat", "--memory", "9" * 300 + "TB"],
        ["convert", "only-source"],
        ["convert", "a", "b", "--dtype", "int8"],
        ["convert", "a", "b", "--bits", "5"],
        ["convert", "a", "b", "--text", "c"],
        ["convert", "a", "b", "--calibrate", "c", "--sparsify", "0.3"],
        ["serve", "--allow-origin", "foo"],
        ["serve", "--allow-origin", "https://example.org/"],
        ["serve", "--park-size", "1GB"],
        ["serve", "--park", "parked", "--keep", "0"],
        ["chat", "qwen3-4b"],
        ["plan", "/no/such/dir"],
        ["verify", "no-such-dir"],
        ["verify", "~no-such-user/model"],
        ["inspect", "weird\x1b[2J\nname"],
        ["offload"],
        ["offload", "frobnicate"],
    ],
)
def test_wrong_use_is_one_line_and_status_2(run, argv):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert is_one_error_line(err), err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (FormatError("a.safetensors: damaged\nhere\x1b[31m"), 1, "a.safetensors: damaged here[31m"),
        (BudgetError("too small"), 1, "too small"),
        (OSError(28, "No space left on device", "/disk/file"), 1, "/disk/file: No space left on device"),
        (OSError("bare"), 1, "bare"),
        (MemoryError(), 1, "out of memory"),
        (TypeError("oops"), 1, "TypeError: oops (a bug in flashllm; --debug"),
        (KeyboardInterrupt(), 130, "flashllm: interrupted"),
        (KeyboardInterrupt("interrupted; go on"), 130, "flashllm: interrupted; go on"),
        (RecursionError("deep"), 1, "RecursionError: deep"),
        (ValueError("embedded null byte"), 2, "a file's name holds a NUL character"),
        (ValueError("other"), 1, "ValueError: other (a bug in flashllm"),
    ],
)
def test_every_failure_is_one_line(run, monkeypatch, error, status, words):
    class Module:
        @staticmethod
        def add_arguments(parser):
            parser.add_argument("--x")

        @staticmethod
        def main(args):
            raise error

    monkeypatch.setattr(flashllm.cli.importlib, "import_module", lambda name: Module)
    got, out, err = run("verify")
    assert (got, out) == (status, "")
    assert words in err
    if status == 130:
        assert err == words + "\n"
        return
    assert is_one_error_line(err)
    for argv in (["--debug", "verify"], ["verify", "--debug"]):
        got, _, err = run(*argv)
        assert got == status
        assert "Traceback" in err
        assert err.splitlines()[-1].startswith("flashllm: error: ")


def test_ctrl_c_while_the_command_line_is_imported():
    code = (
        "import builtins, sys; imported = builtins.__import__\n"
        "def stopped(name, *rest):\n"
        "    if name == 'flashllm.cli': raise KeyboardInterrupt\n"
        "    return imported(name, *rest)\n"
        "from flashllm.__main__ import main; builtins.__import__ = stopped; sys.exit(main())"
    )
    done = run_python("-c", code, status=130)
    assert (done.stdout, done.stderr) == ("", "flashllm: interrupted\n")


def test_a_signal_that_ends_cleans_up_as_ctrl_c(run, monkeypatch):
    def ended(args):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(importlib.import_module("flashllm.commands.verify"), "main", ended)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run("verify", "x") == (130, "", "flashllm: interrupted\n")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_numbers_and_sizes():
    assert options.size("512MiB") == 512 * 2**20
    assert options.whole(0, 5)("5") == 5
    assert options.number(0, 1, low_allowed=False)("1") == 1
    for parse, text in ((options.whole(1, 5), "6"), (options.whole(1), "1.5"), (options.number(0, None), "x")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


def test_sampling_options_that_were_not_given_are_absent():
    args = make_parser("generate").parse_args(["generate", "--prompt", "x"])
    assert options.given_sampling(args) == {}
    args = make_parser("generate").parse_args(
        ["generate", "--prompt", "x", "--temperature", "0", "--stop", "a", "--stop", "", "--stop", "b", "--top-k", "0"]
    )
    assert options.given_sampling(args) == {"temperature": 0.0, "stop": ("a", "b"), "top_k": 0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 1, "top_k": 50, "repetition_penalty": 1.1, "top_p": None, "min_p": 0.1},
            {"temperature": 1, "top_k": 50, "repetition_penalty": 1.1, "min_p": 0.1},
        ),
    ],
)
def test_chat_samples_as_the_model_says(tmp_path, config, expected):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == expected


# The verbs, on a tiny model.


def test_convert_verify_and_inspect(run, document, tiny, tmp_path):
    source, model = tiny("float32").source, tmp_path / "model"
    status, out, err = run("convert", source, model, "--dtype", "float16")
    assert (status, out) == (0, f"{model}\n")
    assert err.startswith("convert: ")
    status, _, err = run("convert", source, model)
    assert status == 2
    assert "exists" in err
    assert document("verify", model)["ok"] is True
    assert document("inspect", model)["path"] == str(model)
    status, out, _ = run("inspect", model)
    assert status == 0
    assert "float16" in out

    flip(model / "ffn.safetensors", 5000)
    status, out, err = run("verify", model)
    assert (status, out) == (1, "")
    assert "flashllm: error: " in err
    assert "layer 0, neuron" in err
    status, out, _ = run("verify", model, "--json")
    assert status == 1
    assert json.loads(out)["problems"][0]["layer"] == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint that is soon compared with its source."""
    return make_tiny_opt(tmp_path_factory.mktemp("small"), num_layers=1, d_ff=128)


@pytest.mark.parametrize(
    ("arguments", "encodings"),
    [(["--bits", "8"], ("int8_32", "float32")), (["--resident-bits", "4"], ("float32", "int4_32"))],
)
def test_convert_to_fewer_bits(run, document, small, arguments, encodings, *, tmp_path):
    status, _, err = run("convert", small, tmp_path / "model", *arguments)
    assert status == 0, err
    assert "against its source's" in err
    facts = document("inspect", tmp_path / "model")
    assert (facts["rows"]["encoding"], facts["resident_encoding"]) == encodings
    assert facts["quality"]["text"] == "text_sample.txt"
    assert "quality" in run("inspect", tmp_path / "model")[1]


def test_convert_with_calibration(run, document, small, tmp_path):
    text = tmp_path / "sample.txt"
    text.write_text("The little dog ran to the big tree and looked up. " * 20)
    bits = ["--bits", "4", "--resident-bits", "8"]
    status, _, err = run("convert", small, tmp_path / "model", *bits, "--calibrate", text)
    assert status == 0, err
    facts = document("inspect", tmp_path / "model")
    assert (facts["rows"]["encoding"], facts["resident_encoding"]) == ("int4_32", "int8_32")
    assert (facts["activations"], facts["quality"]["text"]) == ("int16", "text_sample.txt")
    status, _, err = run("convert", small, tmp_path / "other", "--calibrate", text)
    assert status == 2
    assert "codes of 8 or 4 bits" in err


def test_a_hugging_face_folder_is_not_converted_to_look_at_it(run, tiny):
    for verb in ("inspect", "verify", "plan"):
        status, out, err = run(verb, tiny("float32").source)
        assert (status, out) == (2, "")
        assert "flashllm convert" in err


def test_generate_prints_one_document(run, document, tiny):
    argv = ("generate", tiny().path(), "--prompt", "The little", "--max-new-tokens", "5", *PIECE)
    facts = document(*argv)
    assert len(facts["token_ids"]) == len(facts["tokens"]) == 5
    assert facts["text"] == "".join(token["text"] for token in facts["tokens"])
    for token in facts["tokens"]:
        parts = [token[f"{kind}_ms"] for kind in ("io", "memory", "compute", "other")]
        assert sum(parts) == pytest.approx(token["total_ms"])
        assert token["active"] == token["hits"] + token["misses"]
        assert token["bytes_read"] >= 0
        assert "times" not in token
    assert facts["prefill"]["tokens"] > 0
    assert facts["plan"]["cache_policy"] == CACHE_POLICIES[0]
    assert facts["plan"]["window"] == 5
    assert facts["model"]["path"] == str(tiny().path())
    assert isinstance(facts["direct_io"], bool)
    assert facts["peak_rss_bytes"] > 10**7

    status, text, err = run(*argv)
    assert status == 0
    assert text == inert(facts["text"]) + "\n"
    assert "5 tokens, first after" in err

    packed = document(*argv, "--seed", "1", "--cache-bits", "8")  # of a page's tokens none sees it packed
    assert packed["token_ids"] == facts["token_ids"]
    piped = run(*argv[:3], "-", *argv[4:], "--json", stdin=b"The little\n")
    assert json.loads(piped[1])["token_ids"] == facts["token_ids"]


def test_sampling_is_repeatable_with_a_seed(document, tiny):
    argv = ("generate", tiny().path(), "--prompt", "A", "--max-new-tokens", "6", *PIECE, "--temperature", "2")
    first, again, other = (document(*argv, "--seed", seed)["token_ids"] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_generate_tells_the_backend_in_use_not_the_one_planned(document, tiny, monkeypatch):
    """A kernel without io_uring reads with threads where a calibration chose io_uring."""
    choice = ReaderChoice(backend="io_uring", depth=4, max_gap=0, source="calibration")
    monkeypatch.setattr("flashllm.plan.resolve.choose_reader", lambda *_, **__: choice)
    monkeypatch.setattr("flashllm.engine.build.open_reader", lambda *_, **__: _core.Reader(4))
    facts = document("generate", tiny().path(), "--prompt", "x", "--max-new-tokens", "1", *PIECE)
    assert facts["reader"]["backend"] == "threads"


def test_generate_announces_the_context_limit(run, tiny):
    argv = ("generate", tiny().path(), "--prompt", "The little dog", "--context", "24", *PIECE)
    status, _, err = run(*argv, "--max-new-tokens", "100")
    assert status == 0
    assert "the context limit of 24 tokens is reached" in err
    status, out, err = run("generate", tiny().path(), "--prompt", "x y " * 100, "--context", "24", *PIECE)
    assert (status, out) == (1, "")
    assert is_one_error_line(err)
    assert "context limit" in err


def test_generate_says_where_json_is_not_whole(run, tiny, tmp_path):
    def said(schema, *options):
        file = tmp_path / "schema.json"
        file.write_text(json.dumps(schema))
        status, _, err = run("generate", tiny().path(), "--prompt", "x", "--json-schema", file, *options, *PIECE)
        assert status == 0, err
        return err

    names = {"enum": ["a name that is longer than the limit"]}
    assert "--max-new-tokens 2 is reached: the answer is not whole JSON" in said(names, "--max-new-tokens", "2")
    assert "the context limit of 5 tokens is reached: the answer is not whole JSON" in said(names, "--context", "5")
    assert "not whole" not in said({"enum": [1]}, "--max-new-tokens", "1")
    assert "not whole" not in said({"enum": [1, 11]}, "--max-new-tokens", "1")  # goes on, or ends here


def test_errors_of_loading_are_one_line(run, tiny):
    status, out, err = run("generate", tiny().path("bare"), "--prompt", "x", *PIECE)
    assert (status, out) == (2, "")
    assert "no predictors" in err
    assert is_one_error_line(err)
    status, _, err = run("generate", tiny().path(), "--prompt", "x", "--memory", "1MB", *PIECE)
    assert status == 1
    assert is_one_error_line(err)
    status, _, err = run("chat", tiny().path(), "--context", "100000", *PIECE, stdin=b"")
    assert (status, is_one_error_line(err)) == (2, True)


def test_chat_by_pipe(run, tiny):
    argv = ("chat", tiny().path(), *PIECE, "--max-new-tokens", "8", "--seed", "1")
    status, out, err = run(*argv, stdin=b"Once \xff upon\n\n/stats\n" + b"z" * 5000 + b"\nthe end\n")
    assert status == 0, err
    assert "continues your text" in err
    assert "speed: " in err
    assert "line 4 is skipped" in err
    assert out.endswith("\n")
    assert "\x1b" not in out
    status, alone, _ = run(*argv, stdin=b"Once \xff upon\n")
    assert status == 0
    assert out.startswith(alone)
    assert len(out) > len(alone) > 0


# Signals and pipes need a process.


def test_a_closed_pipe_is_quiet(tiny):
    command = [sys.executable, "-m", "flashllm", "inspect", str(tiny().path())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (1, b"")


def test_an_interrupt_is_one_line_and_status_130(run, tiny, monkeypatch):
    class Interrupting:
        closed = False

        @property
        def buffer(self):
            yield b"The little\n"
            signal.raise_signal(signal.SIGINT)

        def isatty(self):
            return False

    monkeypatch.setattr(sys, "stdin", Interrupting())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        status, out, err = run("chat", tiny().path(), *PIECE, "--max-new-tokens", "2")
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    assert out.endswith("\n")
    assert err.splitlines()[-1] == "flashllm: interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("verb", "redirect", "status"),
    [
        ("chat", ">&-", 0),
        ("verify", "2>&-", 0),
        ("chat", "<&-", 0),
        ("chat", ">/dev/full", 1),
        ("verify", ">/dev/full", 1),
    ],
)
def test_streams_that_are_closed_or_full(tiny, verb, redirect, status):
    more = "--max-new-tokens 2" if verb == "chat" else ""
    command = f"{sys.executable} -m flashllm {verb} {tiny().path()} {more} {redirect}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        ["sh", "-c", command], input="hello\n", capture_output=True, text=True, check=False, env=buffered
    )
    assert result.returncode == status
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert ("flashllm: error: No space left on device" in result.stderr) == (status == 1)


def test_a_run_in_the_background_gives_way_and_its_limit_may_follow(tiny):
    code = (
        "import os, sys, psutil; from flashllm.cli import main; before = os.nice(0); status = main(sys.argv[1:]);"
        "idle = not psutil.LINUX or psutil.Process().ionice().ioclass == psutil.IOPRIO_CLASS_IDLE;"
        "sys.exit(status or (0 if os.nice(0) == min(19, before + 10) and idle else 9))"
    )
    argv = ["generate", tiny().path(), "--prompt", "The", "--max-new-tokens", "2", "--nice", "--memory", "auto"]
    assert json.loads(run_python("-c", code, *argv, "--no-profile", "--json").stdout)["stopped"] == "length"
