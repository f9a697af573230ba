"""Tests of the defects that an attack found (`defects.py` lists them all), where no module's tests are nearer."""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from damage import rehash
from defects import DEFECTS, THIRD
from generating import greedy, ids_of
from scripts import run_python

from flashllm import FlashModel
from flashllm.chat.conversation import Chat, Memory
from flashllm.cli import main
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FlashError, FlashIOError, FormatError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.generate.tokenizer import Tokenizer

TESTS = Path(__file__).parent.parent
OPTIONS = ["--threads", "1"]


def test_every_defect_has_its_tests():
    for number, defect in (DEFECTS | THIRD).items():
        assert defect.tests, number
        for test in defect.tests:
            file, name = test.split("::")
            assert f"\ndef {name}(" in (TESTS / file).read_text(encoding="utf-8"), test


@pytest.fixture
def run(capfd):
    """The command line in this process: status, output, errors."""

    def call(*argv):
        status = main([str(word) for word in argv])
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def copy(tiny, tmp_path):
    """A model directory that may be changed."""
    return Path(shutil.copytree(tiny().path("random"), tmp_path / "model"))


def test_2_a_flipped_byte_of_any_file_is_noticed(copy):
    """Wherever it is, before a token is made; the rows' bytes are compared as they are read."""
    rng = random.Random(0)
    names = sorted(Manifest.load(copy).files)
    assert {"resident.safetensors", "predictors.safetensors", "tokenizer.json", "config.json"} <= set(names)
    for name in [each for each in names if each not in ("ffn.safetensors", "special_tokens_map.json")]:
        raw = (copy / name).read_bytes()
        for _ in range(6):
            flipped = bytearray(raw)
            flipped[rng.randrange(len(raw))] ^= 0x40
            (copy / name).write_bytes(flipped)
            with pytest.raises(FormatError, match=name.replace(".", r"\.")):  # ChecksumError is one
                load_text_and_model(copy)
        (copy / name).write_bytes(raw)
    load_text_and_model(copy)


def load_text_and_model(directory):
    Tokenizer.load(directory)
    FlashModel.from_pretrained(directory, threads=1, io_threads=2).close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENFILE])
@pytest.mark.parametrize("kind", ["model", "folder"])
def test_4_a_stat_that_fails_is_an_error_or_changes_nothing(tiny, monkeypatch, kind, number):
    directory = tiny().path("random") if kind == "model" else tiny().source
    expected = Tokenizer.load(directory)
    text = "The little dog ran."
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "flashllm.json"):
        with monkeypatch.context() as patch:
            for call in ("stat", "lstat"):
                real = getattr(os, call)

                def fails(path, *args, real=real, name=name, **kwargs):
                    if not isinstance(path, int) and str(path).endswith(name):
                        raise OSError(number, os.strerror(number), str(path))
                    return real(path, *args, **kwargs)

                patch.setattr(os, call, fails)
            try:
                got, message = Tokenizer.load(directory), ""
            except FlashIOError as error:
                got, message = None, str(error)
        if got is None:
            assert name in message
            continue
        assert got.encode(text) == expected.encode(text)
        assert (got.end_ids, got.special) == (expected.end_ids, expected.special)


def test_6_generate_accepts_the_minimum_that_plan_names(tiny):
    """In processes of their own, as a user has them: once what `plan` names, and once a twentieth less."""
    path, flashllm = tiny("bfloat16").path("random"), ["-m", "flashllm"]
    minimum = json.loads(run_python(*flashllm, "plan", path, "--json", *OPTIONS).stdout)["minimum_bytes"]
    run = [*flashllm, "generate", path, "--prompt", "The little dog", "--max-new-tokens", "2", *OPTIONS, "--memory"]
    run_python(*run, minimum)
    assert "MB or more" in run_python(*run, minimum * 95 // 100, status=1).stderr


# Files changed in place: (name, what to make of its JSON or text). What a message must name is the file.
MALFORMED = {
    "empty tokenizer": ("tokenizer.json", lambda text: ""),
    "empty object as tokenizer": ("tokenizer.json", lambda text: "{}"),
    "tokenizer_config is a list": ("tokenizer_config.json", lambda text: "[]"),
    "vocab_size 10": ("config.json", {"vocab_size": 10}),
    "vocab_size text": ("config.json", {"vocab_size": "300"}),
    "context beyond the table": ("config.json", {"max_position_embeddings": 4096}),
    "model_type is a list": ("config.json", {"model_type": ["opt"]}),
    "model_type is null": ("config.json", {"model_type": None}),
    "layers 10^6": ("config.json", {"num_hidden_layers": 10**6}),
    "layers 0": ("config.json", {"num_hidden_layers": 0}),
    "heads do not divide": ("config.json", {"num_attention_heads": 3}),
    "hidden size negative": ("config.json", {"hidden_size": -64}),
    "activation unknown": ("config.json", {"activation_function": "bogus"}),
    "config is a list": ("config.json", lambda text: "[]"),
    "config is cut": ("config.json", lambda text: text[:40]),
    "config is empty": ("config.json", lambda text: ""),
    "config with NaN": ("config.json", lambda text: text.replace("64", "NaN", 1)),
    "eos of the wrong type": ("generation_config.json", {"eos_token_id": {"a": 1}}),
    "generation_config is a text": ("generation_config.json", lambda text: '"x"'),
}


def malform(directory, kind):
    name, change = MALFORMED[kind]
    text = (directory / name).read_text()
    changed = change(text) if callable(change) else json.dumps({**json.loads(text), **change})
    (directory / name).write_text(changed)
    return name


@pytest.mark.parametrize("kind", MALFORMED)
def test_7_a_malformed_checkpoint_names_its_file(tiny, tmp_path, run, kind):
    source = Path(shutil.copytree(tiny().source, tmp_path / "hf"))
    name = malform(source, kind)
    began = time.monotonic()
    status, out, err = run("convert", source, tmp_path / "out")
    assert time.monotonic() - began < 5
    if status != 0:
        assert out == ""
        assert err.splitlines()[-1].startswith("flashllm: error: ")
        assert name in err or "tensor" in err or "model_type" in err
        assert "bug" not in err
        return
    status, _, err = run("generate", tmp_path / "out", "--prompt", "The", "--max-new-tokens", "1", *OPTIONS)
    assert status == 1  # what conversion does not read, a run refuses
    assert name in err
    assert "bug" not in err


@pytest.mark.parametrize("kind", MALFORMED)
def test_7_a_malformed_model_directory_names_its_file(copy, run, kind):
    name = malform(copy, kind)
    rehash(copy)
    status, out, err = run("generate", copy, "--prompt", "The", "--max-new-tokens", "1", *OPTIONS)
    assert (status, out) == (1, "")
    assert any(text in err for text in (name, "resident.safetensors: ", "model_type"))
    assert "bug" not in err


LARGE = {
    "labels": ("config.json", lambda text: json.dumps({**json.loads(text), "num_labels": 10**9})),  # a few bytes
    "empty lists": ("flashllm.json", lambda text: "[" + "[]," * 19_000_000 + "[]]"),
    "a sparse terabyte": ("config.json", None),
}
# Commands, one after the other; ru_maxrss would have the parent's memory from before exec.
PEAK = """
import re, sys, time
from flashllm.cli import main
for command in sys.argv[1:]:
    print("status", main(command.split()), file=sys.stderr)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(int(peak) * 1024, time.process_time(), file=sys.stderr)
"""


def cost_of(*commands):
    """(bytes at the peak, seconds of the processor, standard error) of these commands in one process of their own."""
    said = run_python("-c", PEAK, *(" ".join(map(str, words)) for words in commands)).stderr
    nbytes, seconds = said.split()[-2:]
    return int(nbytes), float(seconds), said


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_8_small_files_cost_little(tiny, tmp_path):
    commands = []
    for kind, (name, change) in LARGE.items():
        directory = Path(shutil.copytree(tiny().path("random"), tmp_path / kind.replace(" ", "-")))
        if change is None:
            os.truncate(directory / name, 10**12)
        else:
            (directory / name).write_text(change((directory / name).read_text()))
        if kind == "labels":
            rehash(directory)
        commands.append(["generate", directory, "--prompt", "The", "--max-new-tokens", "1", *OPTIONS])
    peak, seconds, said = cost_of(*commands)
    assert peak < 256e6
    assert seconds < 20  # it had been 90 s
    for each, (name, _) in zip(said.split("status 1\n")[:-1], LARGE.values(), strict=True):
        assert name in each
        assert "bug" not in each


@pytest.mark.parametrize("name", ["~nouser/x", "~no-such-user", "a\0b", "../x", "x" * 5000, "\udcff", "con/aux", ""])
def test_10_no_name_ends_a_chat(tmp_path, monkeypatch, name):
    from flashllm.parked.shelf import Shelf

    class Said:
        """A session in which something was said."""

        computed, tokens, messages, system = 3, (5, 6, 7), (), None

    monkeypatch.chdir(tmp_path)
    chat = Chat(Said(), lambda: Memory(used=1, limit=2), True, Shelf(tmp_path / "kept", "model"), None, None)
    for verb in ("/save", "/load", "/export"):
        reply = chat.command(f"{verb} {name}".strip())
        assert reply
        assert "\n" not in reply
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000 + "z", "a\0b", "\udcff\udcfe", "~no-such-user/model"])
def test_11_names_that_no_file_can_have(name, run):
    for use in (lambda: FlashModel.from_pretrained(name), lambda: Model.open(Path(name))):
        with pytest.raises((UsageError, FlashIOError)):
            use()
    for verb in ("inspect", "verify", "plan"):
        status, out, err = run(verb, name)
        assert (status, out) == (2, "")
        assert "bug" not in err


def test_11_a_model_closed_while_another_thread_generates(tiny, load):
    for attempt in range(4):
        flash = load(tiny("bfloat16").path("random"))
        ended = []

        def use(flash=flash, ended=ended):
            try:
                while True:
                    greedy(flash, ids_of(20), 8)
            except FlashError as error:
                ended.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.02 * attempt)
        flash.close()
        thread.join(30)
        assert len(ended) == 1
        assert isinstance(ended[0], UsageError)
        assert "closed" in str(ended[0])


def test_11_companions_that_are_links_out_of_the_folder(tiny, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"key": "hunter2"}')
    source = Path(shutil.copytree(tiny().source, tmp_path / "hf"))
    link = source / "special_tokens_map.json"
    link.unlink(missing_ok=True)
    for target in (secret, Path("../secret.json")):
        link.symlink_to(target)
        with pytest.raises(FormatError, match=r"special_tokens_map\.json: is a link that leaves the folder"):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        link.unlink()
    (source / "own.json").write_text("{}")
    link.symlink_to("own.json")  # inside the folder
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "special_tokens_map.json").read_text() == "{}"


def test_11_the_hubs_cache_consists_of_links(tiny, tmp_path):
    """models--NAME/snapshots/REVISION holds links to models--NAME/blobs."""
    root = tmp_path / "models--owner--name"
    snapshot = root / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for path in tiny().source.iterdir():
        blob = root / "blobs" / hashlib.sha256(path.name.encode()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    convert(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tiny().source / "tokenizer.json").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_11_a_full_stderr(tiny):
    """A message that nobody can be told changes no status."""
    for argv, expected in ((["verify", tiny().path()], 0), (["verify", "no-such-model"], 2), (["frobnicate"], 2)):
        command = " ".join(map(str, [sys.executable, "-m", "flashllm", *argv, "2>/dev/full"]))
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == expected


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_third_1_a_long_line_of_a_batch_costs_little(tiny, tmp_path):
    lines = [
        {"custom_id": "long", "prompt": "dog " * 1_500_000},
        {"custom_id": "short", "prompt": "dog", "max_tokens": 2},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["offload", "run", tiny().path("random"), "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"]
    peak, _, said = cost_of(command)
    assert "status 0\n" in said
    answers = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "tokens or more" in answers["long"]["error"]["message"]
    assert answers["short"]["completion_tokens"] == 2
    assert peak < 300e6  # it had been a gigabyte
