"""A conversation as the user sees it: turns, commands beginning with "/", and statistics.

Works on any session with `flashllm.generate.session.Session`'s interface. What it hands out is inert text; it knows no
keys, colours or lines (flashllm/chat/terminal.py and plain.py do).
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from flashllm.base.text import inert, one_line, valid_unicode
from flashllm.base.units import format_size, parse_size
from flashllm.chat.statistics import TurnStats
from flashllm.errors import FlashError
from flashllm.generate.session import Session, TokenRecord
from flashllm.parked.shelf import Shelf

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation and begin a new one",
    "/stats": "speed, times, cache and memory of the last answer",
    "/system": "TEXT: begin anew under these instructions; off: without",
    "/save": "NAME: keep the conversation for /load, also after a restart",
    "/load": "NAME: take up a saved conversation in the place of this one",
    "/memory": "SIZE: hold no more than that from here on, up to the limit at the start",
    "/export": "FILE: write the conversation into a new text file",
    "/quit": "end the chat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes the process holds now, and its limit."""

    used: int
    limit: int


@dataclass(slots=True)
class Chat:
    """One conversation: the session, what was said, and the last turn's statistics."""

    session: Session
    memory: Callable[[], Memory]
    direct_io: bool
    shelf: Shelf  # where /save keeps conversations
    keep_to: Callable[[int], None]  # sets the limit of memory, in bytes
    watch: Callable[[Callable[[int, int], None] | None], None]  # as engine.model.Model.watch
    stats: TurnStats = field(default_factory=TurnStats)
    transcript: list[tuple[str, str]] = field(default_factory=list)  # (speaker, text)
    notices: list[str] = field(default_factory=list)  # that nobody has said yet

    def greeting(self) -> list[str]:
        lines = [*map(one_line, self.notices), f"context: {self.session.context_limit} tokens"]
        if not self.session.has_chat_template:
            lines.append("no chat template: the model continues your text")
        return lines

    def answer(self, user_text: str) -> Generator[str, None, None]:
        """The answer's inert pieces as they come. Close the generator, or interrupt it, to stop the answer.

        Raises ContextFull where the turn does not fit (nothing has changed then), and the session's other errors.
        """
        user_text = valid_unicode(user_text)
        stats, answer = TurnStats(), ""
        try:
            with contextlib.closing(self.session.stream_chat(user_text)) as records:
                for record in records:
                    stats.add(record)
                    self.stats = stats
                    if isinstance(record, TokenRecord):
                        answer += record.text
                        if piece := inert(record.text):
                            yield piece
        finally:
            if stats.prefill is not None:
                self.transcript += [("user", user_text), ("model", answer)]

    def ending(self) -> str | None:
        """A note about the end of the last answer; None where the model itself ended it."""
        if self.session.stopped == "context":
            return f"the context limit of {self.session.context_limit} tokens is reached; /reset begins anew"
        return None

    def command(self, line: str) -> str | None:
        """Carry out a line that begins with "/": lines to show, or None where the chat ends. An unknown command is
        answered with the list."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        match name:
            case "/help":
                return _help()
            case "/quit":
                return None
            case "/reset":
                self._reset()
                return "a new conversation"
            case "/stats":
                return "\n".join(f"{name}: {value}" for name, value in self.stats_rows())
            case "/system":
                return self._system(valid_unicode(argument))
            case "/save":
                return self._save(argument)
            case "/load":
                return self._load(argument)
            case "/memory":
                return self._memory(argument)
            case "/export":
                return self._export(argument)
            case _:
                return f"there is no command {one_line(name)}; to send such text, begin it with a space\n{_help()}"

    @property
    def context_used(self) -> int:
        """Tokens in the context: the session's, less the last where that one found no room to be computed."""
        return min(len(self.session.tokens), self.session.context_limit)

    def stats_rows(self) -> list[tuple[str, str]]:
        """(name, value) of the last answer and of the state now."""
        memory = self.memory()
        return [
            *self.stats.rows(),
            ("context", f"{self.context_used} of {self.session.context_limit} tokens"),
            ("memory", f"{format_size(memory.used)} of {format_size(memory.limit)}"),
            ("direct I/O", "yes" if self.direct_io else "no"),
        ]

    def footer(self, width: int) -> str:
        """Speed, hit rate, memory and context in at most `width` characters: what does not fit is left out."""
        parts = []
        if self.stats.tokens_per_s is not None:
            parts.append(f"{self.stats.tokens_per_s:.1f} tokens/s")
        if self.stats.hit_rate is not None:
            parts.append(f"hits {self.stats.hit_rate:.0%}")
        memory = self.memory()
        parts.append(f"{format_size(memory.used)} of {format_size(memory.limit)}")
        parts.append(f"context {self.context_used}/{self.session.context_limit}")
        parts.append("/help")
        line = ""
        for part in parts:
            longer = f"{line} · {part}" if line else part
            if len(longer) <= width:
                line = longer
        return line

    def _reset(self) -> None:
        self.session.reset()
        self.transcript, self.stats = [], TurnStats()

    def _system(self, text: str) -> str:
        if not text:
            return "no instructions" if self.session.system is None else f"instructions: {inert(self.session.system)}"
        self.session.system = None if text == "off" else text
        self._reset()
        return "a new conversation, " + ("without instructions" if text == "off" else "under these instructions")

    def _save(self, name: str) -> str:
        if not name:
            return "say under what name: /save NAME"
        note = {"system": self.session.system, "messages": self.session.messages, "transcript": self.transcript}
        try:
            nbytes = self.shelf.save(name, self.session, note)
        except FlashError as error:
            return one_line(str(error))
        return f"saved as {one_line(name)}, {format_size(nbytes)}: /load {one_line(name)} takes it up again"

    def _load(self, name: str) -> str:
        if not name:
            return "say which: /load NAME"
        try:
            note = self.shelf.load(name, self.session)
        except FlashError as error:
            if self.session.tokens:  # nothing was read: this conversation goes on
                return one_line(str(error))
            self._reset()
            return f"{one_line(str(error))}; a new conversation"
        except KeyboardInterrupt:
            if not self.session.tokens:
                self._reset()
            raise
        self.stats = TurnStats()
        self.session.system = note.get("system")
        self.session.messages = [dict(message) for message in note.get("messages", [])]
        self.transcript = [(speaker, said) for speaker, said in note.get("transcript", [])]
        return f"{one_line(name)}: {len(self.session.tokens)} tokens, {len(self.transcript) // 2} turns"

    def _memory(self, argument: str) -> str:
        memory = self.memory()
        if not argument:
            return f"{format_size(memory.used)} of {format_size(memory.limit)}"
        try:
            self.keep_to(parse_size(argument))
        except FlashError as error:
            return one_line(str(error))
        memory = self.memory()
        return f"the limit is {format_size(memory.limit)} from here on; {format_size(memory.used)} are held"

    def _export(self, argument: str) -> str:
        if not argument:
            return "say where: /export FILE"
        try:
            path = Path(argument).expanduser()
        except RuntimeError:
            return f"{one_line(argument)}: there is no such user"
        system = [] if self.session.system is None else [("system", self.session.system)]
        text = "".join(f"{speaker}: {said}\n\n" for speaker, said in [*system, *self.transcript])
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return f"{one_line(str(path))} exists; choose another name"
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return f"{one_line(str(path))} cannot be written: {reason}"
        return f"saved as {one_line(str(path))}"


def _help() -> str:
    commands = "\n".join(f"{name:<8} {meaning}" for name, meaning in COMMANDS.items())
    return f"{commands}\nText that begins with a space is never a command."


def is_command(line: str) -> bool:
    """True for a line that is a command to the chat. Text that begins with a space never is."""
    return line.startswith("/")
