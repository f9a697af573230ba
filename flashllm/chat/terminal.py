"""The chat at a terminal: multi-line input with history and a footer, streamed answers, ctrl-C that stops the answer.

Keys, colours and widths only; what is said and what commands do is `flashllm.chat.conversation`'s.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.output import Output
from rich.console import Console
from rich.text import Text

from flashllm.base.text import one_line
from flashllm.chat.conversation import Chat, is_command
from flashllm.chat.history import open_history
from flashllm.errors import ContextFull, FlashError

KEYS = "Enter sends, Alt-Enter makes a new line, ctrl-C stops an answer, ctrl-D or /quit ends"


class TerminalChat:
    """The loop. `input` and `output` are prompt_toolkit's and are for tests; by default the process's terminal."""

    def __init__(
        self, chat: Chat, *, history: Path, console: Console, input: Input | None = None, output: Output | None = None
    ) -> None:
        self._chat = chat
        self._console = console
        self._at_line_start = True
        self._prompt: PromptSession[str] = PromptSession(
            multiline=True,
            history=open_history(history, self._note),
            key_bindings=_key_bindings(),
            prompt_continuation=lambda width, line, is_soft_wrap: "" if is_soft_wrap else " " * width,
            bottom_toolbar=lambda: self._chat.footer(self._prompt.output.get_size().columns),
            input=input,
            output=output,
        )

    def run(self) -> int:
        """Talk until ctrl-D or /quit; 0."""
        self._note("; ".join([*self._chat.greeting(), KEYS]))
        while True:
            try:
                text = self._prompt.prompt("> ")
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._note("ctrl-D or /quit ends the chat")
                continue
            if not text.strip():
                continue
            if is_command(text):
                try:
                    reply = self._chat.command(text)
                except KeyboardInterrupt:
                    reply = "stopped"
                if reply is None:
                    return 0
                self._note(reply)
            else:
                self._answer(text)

    def _answer(self, text: str) -> None:
        note: Text | str | None
        self._at_line_start = True
        try:
            self._stream(text)
            note = self._chat.ending()
        except KeyboardInterrupt:
            note = "stopped"
        except ContextFull as error:
            note = one_line(str(error))
        except FlashError as error:
            note = Text(f"error: {one_line(str(error))}", style="red")
        if not self._at_line_start:
            self._console.file.write("\n")
            self._console.file.flush()
        if note is not None:
            self._note(note)

    def _stream(self, text: str) -> None:
        with contextlib.closing(self._chat.answer(text)) as pieces:
            with self._reading():
                first = next(pieces, "")
            for piece in itertools.chain([first], pieces):
                # Not through rich: it would look for markup, and wrap each piece on its own.
                self._console.file.write(piece)
                self._console.file.flush()
                self._at_line_start = piece.endswith("\n") if piece else self._at_line_start

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Meanwhile a line says that the prompt is read, and how far."""
        what = "reading the prompt"
        with self._console.status(what, spinner="line") as status, contextlib.ExitStack() as stack:
            self._chat.watch(lambda done, total: status.update(f"{what}: {done / total:.0%}"))
            stack.callback(self._chat.watch, None)
            yield

    def _note(self, text: Text | str) -> None:
        self._console.print(Text(text, style="dim") if isinstance(text, str) else text)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
