"""Parked conversations: taken up again, also by another process, they go on with the tokens they would have had."""

import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from arch_models import CONTEXT
from planned import ids_of
from serving import answered
from tiny_models import make_tokenizer

from flashllm.chat.conversation import Chat, Memory
from flashllm.errors import ContextFull, FlashIOError, FormatError, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.tokenizer import Tokenizer
from flashllm.parked.file import identity, read_header, read_parked, write_parked
from flashllm.parked.folder import ParkingFolder
from flashllm.parked.shelf import Shelf
from flashllm.serve.worker import Worker

TOKENIZER = Tokenizer(make_tokenizer(300).backend_tokenizer, end_ids=())
BIG = 10**9


@pytest.fixture(scope="module")
def directory(variant_of):
    return variant_of("opt")[1]


@pytest.fixture
def opened(opened, directory):
    """Opens the model anew: another process, as far as its bits go."""
    return partial(opened, directory)


def session_of(model, count=6, **options):
    return Session(model, TOKENIZER, SamplingOptions(max_new_tokens=count, ignore_eos=True, **options))


def run(stream):
    records = list(stream)
    prefill = next(record for record in records if isinstance(record, PrefillRecord))
    return prefill, [record.token_id for record in records if isinstance(record, TokenRecord)]


@pytest.mark.parametrize(("length", "bits"), [*((n, None) for n in (3, 9, 57, 58, 70)), (57, 8), (70, 4)])
def test_a_session_goes_on_as_if_it_had_never_been_away(opened, directory, tmp_path, length, bits):
    model = opened(cache_bits=bits)
    name = identity(directory, model.arithmetic)
    path = tmp_path / "one.kv"
    with session_of(model) as session:
        run(session.stream_ids(ids_of(length)))
        nbytes = write_parked(path, session, name, {"said": ["ä", 1]})
        assert nbytes == path.stat().st_size
        assert path.stat().st_mode & 0o777 == 0o600
        expected = [run(session.stream_ids(ids_of(12, seed))) for seed in (1, 2)]
    with session_of(opened(cache_bits=bits)) as session:
        parked = read_parked(path, session, name)
        assert parked.note == {"said": ["ä", 1]}
        assert (session.computed, len(session.tokens)) == (length + 5, length + 6)
        got = [run(session.stream_ids(ids_of(12, seed))) for seed in (1, 2)]
    assert [ids for _, ids in got] == [ids for _, ids in expected]
    assert [(each.tokens, each.reused_tokens) for each, _ in got] == [
        (each.tokens, each.reused_tokens) for each, _ in expected
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["one.kv"]
    if bits is not None:  # plain keys and values are others
        with session_of(opened()) as session, pytest.raises(FormatError, match="another model"):
            read_parked(path, session, identity(directory, session.model.arithmetic))


def test_torn_and_damaged_files_are_errors(opened, directory, tmp_path):
    model = opened()
    name, path = identity(directory, model.plan.mode), tmp_path / "one.kv"
    with session_of(model) as session:
        run(session.stream_ids(ids_of(20)))
        write_parked(path, session, name, {})
        whole = path.read_bytes()
        random = np.random.default_rng(3)
        for length in (0, 7, 11, 12, 50, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(FormatError, match=r"one\.kv"):
                read_parked(path, session, name)
        for at in [*range(0, 300, 7), *random.integers(0, len(whole), 40).tolist()]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(FormatError):
                read_parked(path, session, name)
        path.write_bytes(whole + b"x")
        with pytest.raises(FormatError):
            read_parked(path, session, name)
        path.write_bytes(whole)
        path.write_bytes(b"flashkv1" + whole[8:])
        with pytest.raises(FormatError, match="saved by an earlier version"):
            read_parked(path, session, name)
        path.write_bytes(whole)
        with pytest.raises(FormatError, match="another model"):
            read_parked(path, session, identity(directory, "oracle"))
        assert read_parked(path, session, name).computed == session.computed == 25
    with session_of(opened(context=16)) as session, pytest.raises(FormatError, match="larger --context"):
        read_parked(path, session, name)
    with session_of(model) as session:
        run(session.stream_ids(ids_of(20)))
        with pytest.raises(FlashIOError, match="cannot be written"):
            write_parked(tmp_path / "no" / "where.kv", session, name, {})


def test_a_fill_that_fails_leaves_an_empty_sequence(opened):
    model = opened()

    def fail(memory):
        raise FormatError("no")

    with model.new_sequence() as sequence:
        model.step([(sequence, ids_of(70))])
        with pytest.raises(FormatError):
            sequence.restore(80, [2], fail)
        assert (sequence.length, model._memory.pool.nbytes) == (0, 0)
        with pytest.raises(ContextFull):
            sequence.restore(CONTEXT + 1, [3], fail)


def test_others_pass_while_a_conversation_is_read(opened):
    """And nobody changes the sequence that it is read for."""
    model = opened()
    with model.new_sequence() as sequence, model.new_sequence() as other, ThreadPoolExecutor(1) as pool:
        expected = model.step([(sequence, ids_of(70))])
        saved = [page.copy() for pages in sequence.save() for page in pages]

        def fill(kinds):
            passed = pool.submit(model.step, [(other, ids_of(70))])
            assert np.array_equal(passed.result(timeout=60), expected)
            with pytest.raises(UsageError, match="under way"):
                model.step([(sequence, [5])])
            for page, kept in zip(itertools.chain(*kinds), saved, strict=True):
                page[:] = kept

        sequence.restore(70, [len(saved)], fill)
        assert np.array_equal(model.step([(sequence, [5])]), model.step([(other, [5])]))


def chat_of(model, directory, shelf, **options):
    return Chat(session_of(model, **options), lambda: Memory(used=1, limit=2), True, shelf, None, None)


def test_save_and_load_in_chat(opened, directory, tmp_path):
    model = opened()
    shelf = Shelf(tmp_path / "shelf", identity(directory, model.plan.mode))
    chat = chat_of(model, directory, shelf)
    assert "nothing has been said" in chat.command("/save first")
    "".join(chat.answer("The little dog ran to the tree."))
    reply = chat.command("/save first")
    assert reply.startswith("saved as first, ")
    assert "exists" in chat.command("/save first")
    expected = "".join(chat.answer("One day"))
    again = chat_of(opened(), directory, shelf)
    "".join(again.answer("It was"))
    assert again.command("/load other") == "there is no other; saved are: first"
    assert len(again.transcript) == 2  # the conversation goes on
    assert "1 turns" in again.command("/load first")
    assert "".join(again.answer("One day")) == expected
    assert again.transcript == chat.transcript
    for bad in ("../x", ".x", "a/b", "x" * 101, ""):
        assert "name" in again.command(f"/save {bad}")
        assert "name" in again.command(f"/load {bad}".strip()).lower()
    (file,) = (tmp_path / "shelf").glob("*.kv")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "damaged" in again.command("/load first")
    assert again.session.tokens == []
    for each in (chat, again):
        each.session.close()


class Clock:
    def __init__(self):
        self.now = 1.0e9

    def __call__(self):
        self.now += 1.0
        return self.now


def test_the_folder_keeps_to_its_limits(opened, directory, tmp_path, capsys):
    model, clock = opened(), Clock()
    name = identity(directory, model.plan.mode)

    def folder(max_nbytes=BIG, daily_nbytes=BIG, model_name=name):
        return ParkingFolder(tmp_path, model_name, max_nbytes=max_nbytes, daily_nbytes=daily_nbytes, clock=clock)

    def parked(where, length, seed):
        with session_of(model) as session:
            run(session.stream_ids(ids_of(length, seed)))
            return where.park(session, after=b"\x01")

    first = folder()
    assert not parked(first, 20, 0)  # too short
    assert parked(first, 70, 0)
    assert parked(first, 70, 0)  # is there
    (size,) = [path.stat().st_size for path in tmp_path.glob("*.kv")]
    assert parked(first, 70, 1)
    assert len(first.entries) == 2
    # What was used longest ago goes first, here the second: the first is used once more.
    with session_of(model) as session:
        assert first.load(first.entries[0], session)
    small = folder(max_nbytes=2 * size + 1000)
    assert len(small.entries) == 2
    assert parked(small, 70, 2)
    assert sorted(entry.tokens.ids[0] for entry in small.entries) == sorted(ids_of(70, seed)[0] for seed in (0, 2))
    assert not parked(folder(max_nbytes=1000), 70, 3)
    assert not list(tmp_path.glob("*.kv"))  # a smaller limit holds from the start
    # No more than so many bytes a day, counted over restarts.
    assert not parked(folder(daily_nbytes=3 * size), 70, 4)
    clock.now += 24 * 3600
    assert parked(folder(daily_nbytes=3 * size), 70, 4)
    assert folder(model_name="another").entries == []
    # Torn files are passed over.
    (path,) = tmp_path.glob("*.kv")
    (tmp_path / "torn.kv").write_bytes(path.read_bytes()[:100])
    os.truncate(path, path.stat().st_size - 1)
    assert folder().entries == []
    # What cannot be written is said, once.
    assert capsys.readouterr().err == ""
    gone = folder()
    shutil.rmtree(tmp_path)
    assert [parked(gone, 70, seed) for seed in (5, 6)] == [False, False]
    assert capsys.readouterr().err.count("conversations are not parked for now: ") == 1


def test_what_a_killed_server_was_writing(tmp_path):
    """Removed at the next start, counted where its process may still be there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        left = [f".{'a' * 64}.kv.{process}.tmp" for process in (gone.pid, os.getpid(), 2**31 - 1)]
        kept = [f".{'b' * 64}.kv.{process}.tmp" for process in (alive.pid, 2**70)]
        for name in (*left, *kept, ".own.tmp", ".kv.tmp"):
            (tmp_path / name).write_bytes(bytes(1000))
        ParkingFolder(tmp_path, "model", max_nbytes=2000, daily_nbytes=BIG)
        assert {path.name for path in tmp_path.iterdir()} == {*kept, ".own.tmp", ".kv.tmp"}
        os.utime(tmp_path / kept[1], (0, 0))
        ParkingFolder(tmp_path, "model", max_nbytes=1999, daily_nbytes=BIG)  # what was touched longest ago goes first
        assert {path.name for path in tmp_path.iterdir()} == {kept[0], ".own.tmp", ".kv.tmp"}
        alive.communicate(b"\n")


def test_the_name_of_what_is_being_written(opened, directory, tmp_path, monkeypatch):
    """By which a start knows it, where the writer was killed; ctrl-C leaves nothing."""
    begun = []

    def ends(source, target):
        begun.append(source)
        raise KeyboardInterrupt

    model = opened()
    name = identity(directory, model.plan.mode)
    with session_of(model) as session:
        run(session.stream_ids(ids_of(70)))
        monkeypatch.setattr(os, "rename", ends)
        with pytest.raises(KeyboardInterrupt):
            write_parked(tmp_path / f"{'c' * 64}.kv", session, name, {})
    assert list(tmp_path.iterdir()) == []
    begun[0].write_bytes(b"as a killed writer leaves it")
    folder = ParkingFolder(tmp_path, name, max_nbytes=BIG, daily_nbytes=BIG)
    assert (folder.entries, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_file_that_is_damaged_goes_and_one_that_cannot_be_read_now_stays(
    opened, directory, tmp_path, monkeypatch, is_damaged
):
    def fail(*arguments, **options):
        raise FlashIOError("the read did not end")

    model = opened()
    folder = ParkingFolder(tmp_path, identity(directory, model.plan.mode), max_nbytes=BIG, daily_nbytes=BIG)
    with session_of(model) as session:
        run(session.stream_ids(ids_of(70)))
        assert folder.park(session, after=None)
        (path,) = tmp_path.glob("*.kv")
        if is_damaged:
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(bytes(raw))
        else:
            monkeypatch.setattr("flashllm.parked.folder.read_parked", fail)
        assert not folder.load(folder.entries[0], session)
        assert session.tokens == []
    assert not folder.entries
    assert path.exists() is not is_damaged


def answer(worker, ids):
    """(reused tokens, ids) of a request, as the server makes it."""
    ((found, reused, _),) = answered(worker, [ids], count=5)
    return reused, found


def test_a_server_takes_conversations_up_after_a_restart(opened, directory, tmp_path):
    prompts = [ids_of(80, seed) for seed in range(3)]

    def served(**options):
        model = opened(**options)
        folder = ParkingFolder(tmp_path, identity(directory, model.plan.mode), max_nbytes=BIG, daily_nbytes=BIG)
        page = model.plan.memory.page_nbytes
        return Worker(
            model, TOKENIZER, max_waiting=4, keep=3 * page + 10_000, on_event=lambda event: None, parking=folder
        )

    with served() as worker:
        first = [answer(worker, ids) for ids in prompts]
        assert [reused for reused, _ in first] == [0, 0, 0]
        # One conversation stays in memory; the others come back from disk.
        assert [answer(worker, ids)[0] for ids in prompts] == [79, 79, 79]
        long = [*prompts[0], *first[0][1], *ids_of(12, 9)]
        expected = answer(worker, long)
    assert expected[0] >= 84
    files = set(tmp_path.glob("*.kv"))
    with served(context=70) as worker:  # what is longer than its context waits for another
        assert answer(worker, prompts[0][:60])[0] == 0
    assert files <= set(tmp_path.glob("*.kv"))
    with served() as worker:
        again = [answer(worker, ids) for ids in prompts]
        assert [reused for reused, _ in again] == [79, 79, 79]
        assert [ids for _, ids in again] == [ids for _, ids in first]
        assert answer(worker, [*prompts[1][:60], *ids_of(10, 5)])[0] == 60
    assert read_header(next(tmp_path.glob("*.kv"))).computed >= 64


def test_names_are_refused_before_anything_is_touched(tmp_path):
    shelf = Shelf(tmp_path / "none", "model")
    with pytest.raises(UsageError, match="a name has"):
        shelf.load("../x", None)
    assert not (tmp_path / "none").exists()
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="name too long"):  # of wide letters no file system takes so many
        shelf.load("漢" * 100, None)
