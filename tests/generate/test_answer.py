"""Why an answer ends: the same for a conversation and for a line of a batch."""

import pytest

from flashllm.generate.answer import Answer
from flashllm.generate.sampling import SamplingOptions


class Bytes:
    """A token is a byte."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Form:
    """A matcher whose form is complete from the start."""

    ended = True


END = frozenset({0})


def pushed(ids, *, stop=(), ignore_eos=False, most=9, room=99, **how):
    """(text, why it ended, tokens) of an answer of these ids."""
    options = SamplingOptions(max_new_tokens=most, stop=stop, ignore_eos=ignore_eos)
    answer = Answer(options, **{"decoder": Bytes(), "end_ids": END, **how})
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += answer.push(token_id, is_full=count == room)
        if answer.stopped is not None:
            break
    assert answer.left == most - count
    return text, answer.stopped, count


@pytest.mark.parametrize(
    ("ids", "how", "expected"),
    [
        (b"abc", {}, ("abc", None, 3)),
        (b"ab\0c", {}, ("ab\0", "eos", 3)),
        (b"ab\0c", {"ignore_eos": True}, ("ab\0c", None, 4)),
        (b"abcd", {"stop": ("bc",)}, ("a", "stop", 3)),
        (b"abcd", {"most": 2}, ("ab", "length", 2)),
        (b"abcd", {"most": 3, "stop": ("bc",)}, ("a", "stop", 3)),  # before the length
        (b"abcd", {"room": 2}, ("ab", "context", 2)),
        (b"abcd", {"room": 2, "most": 2}, ("ab", "length", 2)),
        (b"abcd", {"matcher": Form()}, ("a", "stop", 1)),
        (b"ab", {"most": 2, "stop": ("bcd",)}, ("ab", "length", 2)),  # what was held back
        (b"a\xe2\x82", {"most": 3}, ("a\ufffd", "length", 3)),
        (b"a\xe2\x82", {"most": 3, "stop": ("\ufffd",)}, ("a", "stop", 3)),  # text comes of it at the end alone
        (b"a\0", {"decoder": None}, ("", "eos", 2)),
    ],
)
def test_ends(ids, how, expected):
    assert pushed(ids, **how) == expected
