"""A text in pieces has the ids of the whole: byte-level BPE by every rule for words, SentencePiece's, by any text."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from flashllm.api import pieces
from flashllm.api.pieces import Pieces, TooLong
from flashllm.convert.checkpoint.gguf.words import RULES

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and it's we'll don't 12345 times. " * 20,
    "日本語のテキスト。中文字符，한국어 Привет ЖЖЖ e\u0301 😀🙂 " * 30,
    "aaaa AAAA bbbb CCcc    \n\n\n   \n !!!\n\n//// .... \t\t\n" * 60,
    *("a" * 3000, " " * 3000, "\n" * 500, "!" * 1000, "漢" * 500),
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def by_bytes(name):
    """A tokenizer like those of GGUF files with this rule for words."""
    rule = RULES[name]
    made = Tokenizer(models.BPE(ignore_merges=rule.whole))
    made.normalizer = normalizers.NFC() if rule.form == "NFC" else None
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.cuts]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, show_progress=False, max_token_length=48,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    begins = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)])
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begins])
    return made


def of_pieces(normalizer=None, splitter=None):
    """A tokenizer like SentencePiece's."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    made.train_from_iterator((text[:1500] for text in TEXTS), trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", *fallback], max_token_length=16, show_progress=False,
    ))  # fmt: skip
    return made


def unigram():
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator((text[:1500] for text in TEXTS), trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False,
    ))  # fmt: skip
    return made


SPACE = normalizers.Replace(" ", "▁")
MAKERS = {
    **{
        name: (lambda name=name: by_bytes(name))
        for name in ("smollm", "gpt-2", "falcon", "gpt-4o", "default", "qwen2", "qwen35", "llama3", "tekken")
    },
    "llama": lambda: of_pieces(normalizers.Sequence([normalizers.Prepend("▁"), SPACE])),
    "metaspace": lambda: of_pieces(splitter=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace words": lambda: of_pieces(splitter=pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "gemma": lambda: of_pieces(SPACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "unigram": unigram,
}
KINDS = pytest.mark.parametrize("kind", MAKERS)


@functools.cache
def tokenizer(kind):
    backend = MAKERS[kind]()
    return backend, Pieces(backend)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "PIECE_CHARS": 500,
            "_MOST_CHARS": 4000,
            "_WHOLE_CHARS": 16000,
            "_MARGIN": 100,
            "_END": 32,
        }.items():
            patch.setattr(pieces, name, value)
        yield


def ended(steps):
    """(steps, what they end with)."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


LETTERS = ("a", "b", "A", "x", "漢", "字", "é", "e\u0301", "Ж", "ж", "の", "한", "\u1112\u1161", "ª", "😀")
OTHERS = (" ", "  ", "\n", "\r\n", "\t", "1", "9", "!", "/", ".", "'s", "'", "\u00a0", "\x04")
PARTS = (*LETTERS, *OTHERS, "<|im_end|>", "<|im_", "The quick ", "dog dog ")
runs = st.tuples(st.sampled_from(PARTS), st.sampled_from([1, 2, 3, 40, 300, 700])).map(lambda run: run[0] * run[1])
texts = st.lists(runs | st.lists(st.sampled_from(PARTS), max_size=60).map("".join), max_size=25).map("".join)


def fits_no_piece(text):
    """Two characters over and over, for longer than any piece: cut anywhere, tokens may fall otherwise for ever."""
    twice = pieces._MOST_CHARS // 2 - pieces._MARGIN
    return any(part * twice in text for part in ("e\u0301", "\u1112\u1161", "\r\n"))


@KINDS
@settings(max_examples=15, deadline=None)
@given(text=texts, add_special=st.booleans())
@example(text="\u1112\u1161" * 2100, add_special=False)
def test_the_ids_are_the_wholes(kind, text, add_special):
    backend, cut = tokenizer(kind)
    expected = backend.encode(text, add_special_tokens=add_special).ids
    try:
        steps, ids = ended(cut.encode(text, add_special=add_special))
    except TooLong:
        # A word of its own; what no token stands for.
        assert kind == "unigram" or "\x04" in text or fits_no_piece(text)
        return
    assert ids == expected
    assert steps > 0 or len(text) <= pieces.PIECE_CHARS
    assert cut.least(text) <= len(expected)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "unigram"])
def test_words_longer_than_pieces(kind):
    backend, cut = tokenizer(kind)
    for text in (
        *(char * 5000 for char in (*"a !漢1", "aB")),
        *("\n" * 5000 + "x", "x" + "A" * 5000 + "ab c", "\n" + " " * 5000 + "\n x", "!" + "\n" * 5000 + " \nx"),
        *("😀" * 2000, "<|im_end|>" * 600),
    ):
        assert ended(cut.encode(text))[1] == backend.encode(text).ids, text[:4]


@KINDS
def test_it_stops_past_what_is_wanted(kind):
    backend, cut = tokenizer(kind)
    text = "The dog ran to the river. " * 1500
    all_steps, ids = ended(cut.encode(text))
    assert ids == backend.encode(text).ids
    steps, some = ended(cut.encode(text, most=300))
    assert 300 < len(some) < 1000
    assert steps < all_steps / 10
    assert cut.least(text) <= len(ids)
    assert (cut.least(text) > 0) == (kind != "unigram")


def test_what_may_shrink_has_no_bound():
    backend = by_bytes("gpt-2")
    text = "the dog " * 1000
    assert Pieces(backend).least(text) > 0
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])  # it takes any number of spaces
    assert Pieces(backend).least(text) == 0
    backend = by_bytes("gpt-2")
    backend.normalizer = normalizers.Strip()
    assert Pieces(backend).least(text) == 0
    with pytest.raises(TooLong):
        ended(Pieces(backend).encode(text * 10))
