"""Cut the text of a shell script into words and operators, each with its line: the part of bash that launch scripts use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

WordKind = Literal["text", "parameter", "arithmetic", "command"]


@dataclass(frozen=True, slots=True)
class WordPart:
    """Hold a piece of a word: text, or the inside of ``${...}``, ``$((...))`` or ``$(...)``, and whether quotes surround it."""

    kind: WordKind
    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a word with its parts, an operator such as ``;`` or a newline, or an array assignment with its elements."""

    kind: Literal["word", "operator", "array"]
    line: int
    parts: tuple[WordPart, ...] = ()
    text: str = ""
    elements: tuple[Token, ...] = ()

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions; empty for any other."""
        return self.parts[0].text if len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted else ""


_OPERATORS: Final = re.compile(r"&&|\|\||;;|;|\||&>>?|[0-9]*>>?&?|[0-9]*<<?-?|&|\(|\)")
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=\(")
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_HEREDOC: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")


def tokens(text: str, line: int = 1) -> list[Token]:
    """Cut a script, or a piece of one that begins at ``line``."""
    return list(_Lexer(text, line).tokens())


class _Lexer:
    """Read a text from its beginning to its end; ``at`` is the next character and ``line`` its line."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.skipped_until: str | None = None

    def tokens(self, end: str = "") -> Iterator[Token]:
        while self.at < len(self.text):
            character = self.text[self.at]
            if end and character == end:
                self.at += 1
                return
            if character == "\n":
                yield Token("operator", self.line, text="\n")
                self._newline()
            elif character in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self._continuation()
            elif character == "#":
                self.at = _or_end(self.text.find("\n", self.at), self.text)
            elif (array := _ARRAY.match(self.text, self.at)) is not None:
                yield self._array(array.group())
            elif (heredoc := _HEREDOC.match(self.text, self.at)) is not None:
                self.at, self.skipped_until = heredoc.end(), heredoc.group(2)
            elif (operator := _OPERATORS.match(self.text, self.at)) is not None:
                self.at = operator.end()
                yield Token("operator", self.line, text=operator.group())
            else:
                yield self._word(end)

    def _newline(self) -> None:
        self.at += 1
        self.line += 1
        while self.skipped_until is not None and self.at < len(self.text):
            stop = _or_end(self.text.find("\n", self.at), self.text)
            if self.text[self.at : stop].strip() == self.skipped_until:
                self.skipped_until = None
            self.at, self.line = min(stop + 1, len(self.text)), self.line + 1

    def _continuation(self) -> None:
        self.at = self.text.index("\n", self.at) + 1
        self.line += 1

    def _array(self, opening: str) -> Token:
        line = self.line
        self.at += len(opening)
        elements = tuple(token for token in self.tokens(")") if token.kind == "word")
        return Token("array", line, text=opening.removesuffix("("), elements=elements)

    def _word(self, end: str) -> Token:
        line, parts = self.line, []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;|&<>()" or (end and character == end):
                break
            if character in "\"'":
                parts += self._quoted(character)
            elif character in "$`":
                parts.append(self._expansion(quoted=False))
            elif self.text.startswith("\\\n", self.at):
                self._continuation()
            elif character == "\\":
                parts.append(WordPart("text", self.text[self.at + 1 : self.at + 2], self.line, quoted=True))
                self.at += 2
            else:
                stop = re.compile(r"[\s;|&<>()\"'$`\\]").search(self.text, self.at)
                stop_at = stop.start() if stop else len(self.text)
                if end and end in self.text[self.at : stop_at]:
                    stop_at = self.text.index(end, self.at)
                parts.append(WordPart("text", self.text[self.at : stop_at], self.line))
                self.at = stop_at
        return Token("word", line, tuple(parts))

    def _quoted(self, quote: str) -> list[WordPart]:
        """The parts between quotes, one for each line of text; an empty pair is one empty part."""
        parts, text, line = [], "", self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            character = self.text[self.at]
            if character == "\n":
                parts.append(WordPart("text", text + "\n", line, quoted=True))
                self.at, self.line = self.at + 1, self.line + 1
                text, line = "", self.line
            elif quote == '"' and self.text.startswith("\\\n", self.at):
                parts.append(WordPart("text", text, line, quoted=True))
                self._continuation()
                text, line = "", self.line
            elif quote == '"' and character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\'):
                text += self.text[self.at + 1]
                self.at += 2
            elif quote == '"' and character in "$`":
                parts.append(WordPart("text", text, line, quoted=True))
                parts.append(self._expansion(quoted=True))
                text, line = "", self.line
            else:
                text += character
                self.at += 1
        self.at += 1
        return [*parts, WordPart("text", text, line, quoted=True)]

    def _expansion(self, quoted: bool) -> WordPart:
        line, at = self.line, self.at
        if self.text[at] == "`":
            stop = _or_end(self.text.find("`", at + 1), self.text)
            self.at = stop + 1
            return WordPart("command", self.text[at + 1 : stop], line, quoted)
        for opening, closing, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "parameter")):
            if self.text.startswith(opening, at):
                stop = _closing(self.text, at + len(opening), opening[-1], closing[-1]) - (len(closing) - 1)
                self.at = stop + len(closing)
                self.line += self.text.count("\n", at, self.at)
                return WordPart(kind, self.text[at + len(opening) : stop], line, quoted)  # type: ignore[arg-type]
        name = _NAME.match(self.text, at + 1)
        self.at = name.end() if name else at + 1
        return WordPart("parameter", name.group(), line, quoted) if name else WordPart("text", "$", line, quoted)


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """The position of the bracket that closes one before ``at``; ``$((`` is closed by the second of two."""
    depth = 2 if text[at - 2 : at] == "((" else 1
    while at < len(text):
        depth += (text[at] == opening) - (text[at] == closing)
        if depth == 0:
            return at
        at += 1
    return at


def _or_end(position: int, text: str) -> int:
    return position if position >= 0 else len(text)
