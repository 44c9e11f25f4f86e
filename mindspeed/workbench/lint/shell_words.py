"""Cut the text of a shell script into words and operators, each with its line: the part of bash that launch scripts use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

MAX_CHARACTERS: Final = 1_000_000
MAX_DEPTH: Final = 50

WordKind = Literal["text", "parameter", "arithmetic", "command"]


class ShellLimit(ValueError):  # noqa: N818
    """A script is too large, too deeply nested or too long to expand; its text names the limit and, by ``{line}``, the line."""

    def __init__(self, text: str, line: object = "") -> None:
        super().__init__(text.format(line=line))
        self.text, self.line = text, line


def require_depth(depth: int, line: int) -> None:
    """Refuse what is nested more deeply than any launch script. Raises ShellLimit."""
    if depth > MAX_DEPTH:
        raise ShellLimit(f"line {{line}} is nested more than {MAX_DEPTH} levels deep", line)


@dataclass(frozen=True, slots=True)
class WordPart:
    """Hold a part of a word: text, or the inside of ``${...}``, ``$((...))`` or ``$(...)``, and whether quotes surround it."""

    kind: WordKind
    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a word, an operator such as ``;`` or a newline, an array assignment with its elements, or a here document."""

    kind: Literal["word", "operator", "array", "document"]
    line: int
    parts: tuple[WordPart, ...] = ()
    text: str = ""
    elements: tuple[Token, ...] = ()

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions; empty for any other."""
        return self.parts[0].text if len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted else ""


_TOKEN: Final = re.compile(
    r"(?P<newline>\n)|(?P<passed>[ \t\r]+|\\(?:\r?\n|\Z)|#[^\n]*)|(?P<array>[A-Za-z_]\w*\+?=)\("
    r"|<<-?\s*(?P<quote>['\"]?)(?P<heredoc>\w+)(?P=quote)|(?P<operator>&&|\|\||;;|;|\||&>>?|[0-9]*>>?&?|[0-9]*<<?-?|&|\(|\))"
)
"""Match the tokens that are not words."""
_PIECE: Final = re.compile(
    r"(?P<passed>\\\n)|(?P<escaped>\\.?)|(?P<single>'[^']*'?)|(?P<double>\")|(?P<expansion>[$`])"
    r"|(?P<plain>[^ \t\r\n;|&<>()\"'$`\\]+)",
    re.DOTALL,
)
"""A piece of a word."""
_INSIDE: Final = re.compile(r"\\[\n$`\"\\]|\\|[$`]|[^\"$`\\]+")
"""A piece of a text between double quotes."""
_INSIDE_DOCUMENT: Final = re.compile(r"\\[\n$`\\]|\\|[$`]|[^$`\\]+")
"""A piece of a here document whose variables are expanded."""
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")


def tokens(text: str, line: int = 1) -> list[Token]:
    """Split a script, or a part of one that begins at ``line``, into words. Raises ShellLimit."""
    if len(text) > MAX_CHARACTERS:
        raise ShellLimit(f"the script has {len(text)} characters, more than {MAX_CHARACTERS}")
    return list(_Lexer(text, line).tokens())


def quoted_parts(text: str, line: int) -> list[WordPart]:
    """Split a text as if it stood between double quotes. Raises ShellLimit."""
    return _Lexer(text, line)._parts(_INSIDE)


class _Lexer:
    """Read a text from its beginning to its end; ``at`` is the next character and ``line`` its line."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.document: tuple[str, bool] | None = None

    def tokens(self, end: str = "", depth: int = 0) -> Iterator[Token]:
        require_depth(depth, self.line)
        while self.at < len(self.text) and self.text[self.at] != end:
            found, line = _TOKEN.match(self.text, self.at), self.line
            if found is None:
                yield self._word()
                continue
            self._go_to(found.end())
            if found["newline"]:
                if self.document is not None:
                    yield self._document(*self.document)
                yield Token("operator", line, text="\n")
            elif found["array"]:
                elements = tuple(token for token in self.tokens(")", depth + 1) if token.kind == "word")
                yield Token("array", line, text=found["array"], elements=elements)
            elif found["heredoc"]:
                self.document = found["heredoc"], bool(found["quote"])
            elif found["operator"]:
                yield Token("operator", line, text=found["operator"])
        self.at += 1

    def _go_to(self, at: int) -> str:
        """Go on to another character, and return what lies between."""
        passed, self.at = self.text[self.at : at], at
        self.line += passed.count("\n")
        return passed

    def _document(self, end: str, is_literal: bool) -> Token:
        """Read the lines of a here document, which begins at this line, up to its end."""
        self.document, start, lines = None, self.line, list[str]()
        while self.at < len(self.text):
            stop = _or_end(self.text.find("\n", self.at), self.text)
            read = self._go_to(min(stop + 1, len(self.text)))
            if read.strip() == end:
                break
            lines.append(read)
        text = "".join(lines)
        parts = _lines(text, start) if is_literal else _Lexer(text, start)._parts(_INSIDE_DOCUMENT)
        return Token("document", start, tuple(parts))

    def _word(self) -> Token:
        line, parts = self.line, list[WordPart]()
        while (found := _PIECE.match(self.text, self.at)) is not None:
            if found["double"]:
                parts += self._quoted()
            elif found["expansion"]:
                parts.append(self._expansion(quoted=False))
            else:
                start, piece = self.line, self._go_to(found.end())
                if found["single"]:
                    text = piece.removeprefix("'").removesuffix("'")
                    parts += _lines(text, start) or [WordPart("text", "", start, quoted=True)]
                elif not found["passed"]:
                    parts.append(WordPart("text", piece.removeprefix("\\"), start, quoted=bool(found["escaped"])))
        return Token("word", line, tuple(parts))

    def _quoted(self) -> list[WordPart]:
        """The parts between double quotes, one for each line of text."""
        self.at += 1
        line, parts = self.line, self._parts(_INSIDE)
        self.at += 1
        return parts or [WordPart("text", "", line, quoted=True)]

    def _parts(self, piece: re.Pattern[str]) -> list[WordPart]:
        """The parts of a text that consists of such pieces, in which only variables and commands are expanded."""
        parts, text, line = list[WordPart](), "", self.line
        while (found := piece.match(self.text, self.at)) is not None:
            if found.group() in ("$", "`"):
                parts += [*_lines(text, line), self._expansion(quoted=True)]
                text, line = "", self.line
            elif self._go_to(found.end()) == "\\\n":
                parts += _lines(text, line)
                text, line = "", self.line
            else:
                text += found.group()[1:] if len(found.group()) == 2 and found.group()[0] == "\\" else found.group()
        return [*parts, *_lines(text, line)]

    def _expansion(self, quoted: bool) -> WordPart:
        line, at = self.line, self.at
        if self.text[at] == "`":
            stop = _or_end(self.text.find("`", at + 1), self.text)
            self.at = stop + 1
            return WordPart("command", self.text[at + 1 : stop], line, quoted)
        for opening, closing, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "parameter")):
            if self.text.startswith(opening, at):
                stop = _closing(self.text, at + len(opening), opening[-1], closing[-1]) - (len(closing) - 1)
                self._go_to(stop + len(closing))
                return WordPart(kind, self.text[at + len(opening) : stop], line, quoted)  # type: ignore[arg-type]
        name = _NAME.match(self.text, at + 1)
        self.at = name.end() if name else at + 1
        return WordPart("parameter", name.group(), line, quoted) if name else WordPart("text", "$", line, quoted)


def _lines(text: str, line: int) -> list[WordPart]:
    """Quoted text as one part for each of its lines."""
    parts = enumerate(re.split(r"(?<=\n)", text))
    return [WordPart("text", part, line + number, quoted=True) for number, part in parts if part]


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """The position of the bracket that closes one before ``at``; ``$((`` is closed by the second of two."""
    depth = 2 if text[at - 2 : at] == "((" else 1
    for bracket in re.compile(f"[{re.escape(opening + closing)}]").finditer(text, at):
        depth += 1 if bracket.group() == opening else -1
        if depth == 0:
            return bracket.start()
    return len(text)


def _or_end(position: int, text: str) -> int:
    return position if position >= 0 else len(text)
