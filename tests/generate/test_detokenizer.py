"""Text of a token stream: the pieces join to the whole, characters stay whole, stop strings never show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer

from flashllm.generate.detokenizer import Detokenizer

TOKENIZER = make_tokenizer(300)


def pieces_of(ids, stop=()):
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["The little dog", "naïve café — 日本語 🙂🙂", "a\n\n b\t", "é", "🙂"])
def test_characters_split_over_tokens_come_whole(text):
    ids = ids_of(text)
    pieces, stopped = pieces_of(ids)
    assert "".join(pieces) == text
    assert not stopped
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) >= len(text.encode()) / 8


def test_a_piece_comes_as_soon_as_it_is_certain():
    pieces, _ = pieces_of(ids_of("a🙂b"))
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


@given(st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_decoded_whole(ids):
    pieces, _ = pieces_of(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text("abcé🙂", max_size=20), st.lists(st.text("abcé🙂", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_first_stop_string(text, stop):
    pieces, stopped = pieces_of(ids_of(text), stop)
    ends = [text.index(s) for s in stop if s in text]
    shown = "".join(pieces)
    assert stopped == bool(ends)
    assert not any(s in shown for s in stop)
    assert text.startswith(shown)
    if not ends:
        assert shown == text
    elif len(stop) == 1:
        assert shown == text[: ends[0]]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    pieces, stopped = pieces_of([*ids_of("x"), *ids_of("E"), *ids_of("N"), *ids_of("y")], ["END"])
    assert pieces == ["x", "", "", "ENy", ""]
    assert not stopped
    pieces, stopped = pieces_of([*ids_of("x"), *ids_of("E"), *ids_of("N")], ["END"])
    assert pieces == ["x", "", "", "EN"]  # finish: no more tokens come
    assert not stopped


class TwoBytes:
    """A tokenizer whose token 0 is "ol" and half of an é, as byte-level vocabularies do hold."""

    def decode(self, ids, skip_special_tokens):
        return b"".join((b"ol\xc3", b"\xa9")[i] for i in ids).decode(errors="replace")


def test_a_stop_string_before_an_incomplete_character_does_not_leak_at_the_end():
    detokenizer = Detokenizer(TwoBytes(), ["ol"])
    assert detokenizer.push(0) + detokenizer.finish() == ""
    assert detokenizer.stopped
