"""The chat through a pipe: each line of the input is a turn, each answer goes to the output.

Lines only; what is said and what commands do is `flashllm.chat.conversation`'s.
"""

import contextlib
from collections.abc import Iterable
from typing import TextIO

from flashllm.base.text import one_line
from flashllm.chat.conversation import Chat, is_command
from flashllm.errors import ContextFull


def run_plain(chat: Chat, lines: Iterable[bytes], out: TextIO, err: TextIO) -> int:
    """Each line a user turn: answers on `out`, everything else on `err`. Empty lines are skipped; 0.

    A turn for which the context has no room left begins a new conversation; a line that is too long even for an empty
    context is skipped. Both are announced. Other errors end the run.
    """

    def note(text: str) -> None:
        for line in text.splitlines():
            print(f"flashllm: {line}", file=err, flush=True)

    for line in chat.greeting():
        note(line)
    for number, raw in enumerate(lines, 1):
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not text.strip():
            continue
        if is_command(text):
            if (reply := chat.command(text)) is None:
                break
            note(reply)
            continue
        try:
            _answer_plain(chat, text, out)
        except ContextFull as error:
            if not chat.session.tokens:
                note(f"line {number} is skipped: {one_line(str(error))}")
                continue
            note(f"line {number} begins a new conversation: {one_line(str(error))}")
            chat.command("/reset")
            try:
                _answer_plain(chat, text, out)
            except ContextFull as still:
                note(f"line {number} is skipped: {one_line(str(still))}")
                continue
        if (ending := chat.ending()) is not None:
            note(ending)
    return 0


def _answer_plain(chat: Chat, text: str, out: TextIO) -> None:
    """Write one answer, ended by a newline however it ends; an empty line for one without text."""
    last = ""
    try:
        with contextlib.closing(chat.answer(text)) as pieces:
            for piece in pieces:
                out.write(piece)
                out.flush()
                last = piece
    except ContextFull:
        last = last or "\n"  # there is no answer
        raise
    finally:
        if not last.endswith("\n"):
            out.write("\n")
            out.flush()
