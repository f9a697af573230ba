"""Text of a token stream: the pieces join to the whole, characters stay whole, stop strings never show."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from tokenizers import decoders, models

from flashllm.generate.detokenizer import Detokenizer
from flashllm.generate.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_tokenizer(300).backend_tokenizer)


def sentencepiece_like():
    """As Llama's: words begin with "▁", characters that are no token are bytes, the first space is not shown."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "▁a", "\n", "é", "🙂"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    made = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(made)


SENTENCEPIECE = sentencepiece_like()


def pieces_of(ids, stop=(), tokenizer=TOKENIZER):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


def ids_of(text):
    return TOKENIZER.encode(text, add_special=False)


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
    assert "".join(pieces) == TOKENIZER.decode(ids)


WORDS = st.integers(259, 268).map(lambda token_id: [token_id])
CHARACTERS = st.sampled_from("日é🙂x").map(lambda character: [byte + 3 for byte in character.encode()])


@given(st.lists(WORDS | CHARACTERS | st.just([1]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_pieces_join_where_spaces_and_bytes_are_decoded_together(parts):
    ids = [token_id for part in parts for token_id in part]
    pieces, _ = pieces_of(ids, tokenizer=SENTENCEPIECE)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids)


def test_a_space_shows_with_its_word():
    tokens = ("<s>", "▁the", "▁cat", "s", "<0xE6>", "<0x97>", "<0xA5>")
    ids = [SENTENCEPIECE.backend.token_to_id(token) for token in tokens]
    assert pieces_of(ids, tokenizer=SENTENCEPIECE)[0] == ["", "the", " cat", "s", "", "", "日", ""]


def test_a_special_token_in_between_takes_no_space_away():
    ids = [SENTENCEPIECE.backend.token_to_id(token) for token in ("▁the", "<s>", "▁cat", "</s>", "<s>", "▁", "▁a")]
    assert pieces_of(ids, tokenizer=SENTENCEPIECE)[0] == ["the", "", " cat", "", "", " ", " a", ""]


@given(st.text("abcé🙂", max_size=20), st.lists(st.text("abcé🙂", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
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

    def decode(self, ids):
        return b"".join((b"ol\xc3", b"\xa9")[i] for i in ids).decode(errors="replace")


def test_a_stop_string_before_an_incomplete_character_does_not_leak_at_the_end():
    detokenizer = Detokenizer(TwoBytes(), ["ol"])
    assert detokenizer.push(0) + detokenizer.finish() == ""
    assert detokenizer.stopped
