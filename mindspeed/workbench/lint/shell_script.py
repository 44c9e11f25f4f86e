"""Read the commands of a shell script with its variables in place, as bash would expand them; nothing is run.

Simple assignments, ``${NAME:-default}`` and its relatives, arrays, appended text, arithmetic, continued lines, plain tests,
``case`` and functions are understood. So are other scripts: the text of ``bash -c`` or ``eval``, a here document for a shell
or a file, and the files that are sourced or called, where they exist. The output of commands is known for ``echo``,
``basename``, ``dirname`` and ``pwd`` alone: ``$(hostname)`` stays as it is written, without blanks.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Final

from mindspeed.megatron_lm.argument_words import whole_number
from mindspeed.workbench.lint.shell_words import (
    MAX_CHARACTERS,
    ShellLimit,
    Token,
    WordPart,
    quoted_parts,
    require_depth,
    tokens,
)

MAX_STEPS: Final = 2_000_000
"""About the characters that all expansions of a script may give together."""
CALL_STEPS: Final = 20
"""Steps of a call of a function, besides those of its body."""
MAX_EXPRESSION: Final = 200
"""Characters of an arithmetic expression."""

Fragment = tuple[str, int]
"""Text and its line."""
Value = list[Fragment]


@dataclass(frozen=True, slots=True)
class Word:
    """Hold a word of a command after all expansions, and the line of the script, and its file, where its text stands."""

    text: str
    line: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """Hold a simple command: its words, the variables that nothing gave a value, and those that it gets in its environment."""

    words: tuple[Word, ...]
    unset: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


def shell_commands(
    text: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None, path: str = ""
) -> list[ShellCommand]:
    """Return the commands that a script would run with these arguments and variables, in order.

    A loop counts once. A test that needs the machine, as for a file, counts as false. A script with a ``path`` is read with the
    files that it sources or calls: from the current folder, or else from its folder. Raises ShellLimit for a script that is too
    large, nested too deeply, or takes too many steps.
    """
    files = _Files()
    values: dict[str, list[Value]] = {name: [[(value, 0)]] for name, value in (environ or {}).items()}
    shell = _Shell.of(values, files, (path,) if path else ())
    shell.arguments = tuple(Word(argument, 0) for argument in arguments)
    try:
        shell.run(tokens(text, files.add(path, text)))
    except ShellLimit as limit:
        raise ShellLimit(limit.text, files.described(limit.line)) from None
    return [replace(command, words=tuple(map(files.placed, command.words))) for command in shell.commands]


class _Files:
    """The scripts of a launch, whose lines are numbered on from one to the next: first line and path of each."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._paths: list[str] = []
        self._next = 1

    def add(self, path: str, text: str) -> int:
        """Number the lines of another script; returns the first number."""
        self._first.append(self._next)
        self._paths.append(path)
        self._next += text.count("\n") + 1
        return self._first[-1]

    def placed(self, word: Word) -> Word:
        """The word with its file, and its line there."""
        at = bisect(self._first, word.line) - 1
        return replace(word, line=word.line - self._first[at] + 1, file=self._paths[at]) if at >= 0 else word

    def described(self, line: object) -> str:
        """The line of a limit in words, with the file of a script that another one has."""
        word = self.placed(Word("", line if isinstance(line, int) else 0))
        return f"{word.line} of {word.file}" if word.file not in ("", self._paths[0]) else str(word.line)


@dataclass(frozen=True, slots=True)
class _Script:
    """Hold a script that a command of another one gets, its line, its arguments, and the words by which it is launched.

    A script in a file has its path.
    """

    text: str
    line: int
    arguments: tuple[Word, ...] = ()
    launcher: tuple[Word, ...] = ()
    path: str = ""


@dataclass(slots=True)
class _Frame:
    """Hold an open ``if`` or ``case``: whether the branch is taken now, whether one was taken, and what is being read.

    ``reading`` is true inside a condition of ``if``. ``subject`` is the word of ``case``, ``patterns`` are those that are read
    before a branch.
    """

    active: bool
    done: bool = False
    reading: bool = False
    verdicts: list[bool] = field(default_factory=list)
    any_of: bool = False
    subject: str = ""
    patterns: list[Token] | None = None


@dataclass(slots=True)
class _Shell:
    values: dict[str, list[Value]]
    inherited: frozenset[str]
    files: _Files
    reading: tuple[str, ...]
    """The paths of the scripts that are being read, each of which has the next one."""
    name: str
    arguments: tuple[Word, ...] = ()
    commands: list[ShellCommand] = field(default_factory=list)
    frames: list[_Frame] = field(default_factory=list)
    functions: dict[str, Sequence[Token]] = field(default_factory=dict)
    running: dict[str, dict[str, list[Value] | None]] = field(default_factory=dict)
    """The functions that run, with the outer values of the local variables of each."""
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The variables whose value comes from these ones, which have none."""
    unset: dict[str, None] = field(default_factory=dict)
    skip_next: bool = False
    exported: set[str] = field(default_factory=set)
    has_moved: bool = False
    """True once a command has changed the current folder, which is that of the check at first."""
    depth: int = 0
    steps: int = 0

    @classmethod
    def of(cls, environ: dict[str, list[Value]], files: _Files, reading: tuple[str, ...]) -> _Shell:
        return cls(environ, frozenset(environ), files, reading, next(reversed(reading), "script.sh"))

    def _spend(self, steps: int, line: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise ShellLimit(f"the expansions of the script take more than {MAX_STEPS} steps, at line {{line}}", line)

    def run(self, script: Sequence[Token]) -> None:
        """Run the script command by command; the body of a function is kept until the function is called."""
        command: list[Token] = []
        index = 0
        script = [*script, Token("operator", 0, text="\n")]
        while index < len(script):
            token = script[index]
            index += 1
            if self.frames and self.frames[-1].patterns is not None:
                self._pattern(self.frames[-1], self.frames[-1].patterns, token)
            elif token.plain == "in" and len(command) >= 2 and command[-2].plain == "case":
                self._open_case(command)
                command = []
            elif (name := _function(command, token, script[index : index + 1])) is not None:
                index = self._define(name, script, index - 1)
                command = []
            elif token.kind != "operator" or token.text in ("(", ")"):
                command.append(token)
            elif "<" in token.text or ">" in token.text:
                command += [Token("operator", token.line, text=token.text)] if ">" in token.text else []
                index += 1  # the file of a redirection
            else:
                self._command(command, token.text)
                command = []
                if token.text == ";;" and self.frames:
                    self.frames[-1].active, self.frames[-1].patterns = False, []

    def _open_case(self, command: list[Token]) -> None:
        """Open ``case WORD in``, the last words of a command."""
        *before, _, subject = command
        if before:
            self._command(before, "\n")
        text = " ".join(word.text for word in self._expanded([_protected(subject)]))
        self.frames.append(_Frame(active=False, subject=text, patterns=[]))
        require_depth(len(self.frames), subject.line)

    def _pattern(self, case: _Frame, patterns: list[Token], token: Token) -> None:
        """Read a token of the patterns before a branch of ``case``, and take the branch where one of them matches first."""
        if token.plain == "esac" and not patterns:
            self.frames.pop()
        elif token.kind == "word":
            patterns.append(token)
        elif token.text == ")":
            words = [word.text for word in self._expanded(patterns)]
            case.active, case.patterns = not case.done and any(fnmatchcase(case.subject, word) for word in words), None
            case.done |= case.active

    def _define(self, name: str, script: Sequence[Token], index: int) -> int:
        """Keep the body of a function between the braces behind a place of a script; returns the place after it."""
        while index < len(script) and script[index].kind == "operator":
            index += 1
        if index == len(script) or script[index].plain != "{":
            return index
        start, depth = index + 1, 1
        while depth and index + 1 < len(script):
            index += 1
            depth += (script[index].plain == "{") - (script[index].plain == "}")
        if self._active:
            self.functions[name] = script[start:index]
        return index + 1

    @property
    def _active(self) -> bool:
        return all(frame.active and not frame.reading for frame in self.frames)

    def _command(self, command: list[Token], ending: str) -> None:
        """Run one simple command, and remember whether the next one is skipped."""
        skipped, self.skip_next = self.skip_next, False
        while command and self._keyword(command[0].plain, command):
            self._spend(len(command), command[0].line)
            require_depth(len(self.frames), command[0].line)
            command = command[1:]
        if not command or skipped:
            return
        if self.frames and self.frames[-1].reading:
            outer = all(frame.active and not frame.reading for frame in self.frames[:-1])
            self.frames[-1].verdicts.append(outer and self._holds(command))
            self.frames[-1].any_of |= ending == "||"
        elif self._active:
            if command[0].plain in ("[", "[[", "test") and ending in ("&&", "||"):
                self.skip_next = self._holds(command) == (ending == "||")
                return
            self._simple(command)

    def _keyword(self, word: str, command: list[Token]) -> bool:
        """Act on a word of the grammar at the head of a command; returns whether it was one, to be removed."""
        if word == "if":
            self.frames.append(_Frame(active=True, reading=True))
        elif word in ("while", "until"):
            self.frames.append(_Frame(active=True))
            command[1:] = []
        elif word == "for":
            self.frames.append(_Frame(active=True))
            if self._active and len(command) > 3:
                first = self._expanded(command[3:])[:1]
                self.values[command[1].plain] = [[(word.text, word.line)] for word in first]
            command[1:] = []
        elif word == "then" and self.frames:
            frame = self.frames[-1]
            verdict = any(frame.verdicts) if frame.any_of else all(frame.verdicts)
            frame.active, frame.reading = verdict and not frame.done, False
            frame.done |= frame.active
        elif word in ("else", "elif") and self.frames:
            self.frames[-1].active, self.frames[-1].reading = not self.frames[-1].done, word == "elif"
            self.frames[-1].verdicts = []
        elif word in ("fi", "done", "esac") and self.frames:
            self.frames.pop()
        elif word not in ("do", "{", "}", "!"):
            return False
        return True

    def _simple(self, command: list[Token]) -> None:
        """Assign variables, or collect a command."""
        if [token.text for token in command[:2]] == ["(", "("] or command[0].plain == "let":
            self._let(command[command[0].plain == "let" :])
            return
        rest = list(command)
        while rest and (rest[0].kind == "array" or _assignment(rest[0]) is not None):
            self._assign(rest.pop(0))
        if not rest:
            return
        before = command[: len(command) - len(rest)]
        if rest[0].plain in ("export", "local", "declare", "readonly", "typeset"):
            names = list(map(_name, rest[1:]))
            if rest[0].plain == "export":
                self.exported.update(names)
            elif self.running and rest[0].plain != "readonly":
                outer = self.running[next(reversed(self.running))]
                outer |= {name: self.values.get(name) for name in names if name not in outer}
            for token in rest[1:]:
                if token.kind == "array" or _assignment(token) is not None:
                    self._assign(token)
            return
        self.unset = {}
        words = self._expanded([token for token in rest if token.kind == "word"])
        if not words:
            return
        names = sorted(self.exported | set(map(_name, before)))
        environ = {name: self._text(name) for name in names if name in self.values}
        if words[0].text in self.functions:
            self._call(words[0].text, words[1:])
        elif words[0].text == "eval":
            self._inside(self, _Script(" ".join(word.text for word in words[1:]), words[-1].line, self.arguments))
        elif words[0].text in ("source", ".") and (script := self._file(words[1:])) is not None:
            self._inside(self, script if script.arguments else replace(script, arguments=self.arguments))
        elif (script := self._script(words, rest)) is not None:
            inherited = {name: self.values[name][:1] for name in (*self.inherited, *environ) if name in self.values}
            shell = _Shell.of(inherited, self.files, (*self.reading, *filter(None, [script.path])))
            shell.exported, shell.unknown, shell.has_moved = set(environ), dict(self.unknown), self.has_moved
            self._inside(shell, script)
        else:
            self.has_moved |= words[0].text in ("cd", "pushd", "popd")
            self.commands.append(ShellCommand(tuple(words), tuple(self.unset), tuple(environ.items())))

    def _call(self, name: str, arguments: Sequence[Word]) -> None:
        """Run the body of a function, but not inside itself."""
        if name in self.running:
            return
        self.depth += 1
        require_depth(self.depth, arguments[0].line if arguments else 0)
        self._spend(CALL_STEPS + len(self.functions[name]), 0)
        self.running[name] = {}
        outer = self.arguments, self.frames
        self.arguments, self.frames = tuple(arguments), []
        self.run(self.functions[name])
        self.arguments, self.frames = outer
        self.values |= {local: value for local, value in self.running[name].items() if value is not None}
        for local in [local for local, value in self.running.pop(name).items() if value is None]:
            self.values.pop(local, None)
        self.depth -= 1

    def _script(self, words: Sequence[Word], command: Sequence[Token]) -> _Script | None:
        """The script that a command gets by ``bash -c``, in a file, through ``ssh``, or in a here document."""
        texts = [word.text for word in words]
        names = [text.rpartition("/")[2] for text in texts]
        for at in (at for at, name in enumerate(names) if name in SHELLS):
            options = list(takewhile(lambda text: text.startswith("-"), texts[at + 1 :]))
            text = at + 1 + len(options)
            if text < len(texts) and any(re.fullmatch(r"-\w*c", option) for option in options):
                return _Script(texts[text], words[text].line, tuple(words[text + 2 :]), tuple(words[:at]))
            if (script := self._file(words[text:], words[:at])) is not None:
                return script
        if texts[0].endswith(".sh") and "/" in texts[0]:
            return self._file(words)
        quoted = next((at for at, text in enumerate(texts) if re.search(r"\s", text)), None)
        if names[0] in _REMOTE and quoted is not None:
            return _Script(" ".join(texts[quoted:]), words[quoted].line, (), tuple(words[:quoted]))
        document = next((token for token in command if token.kind == "document"), None)
        is_written = names[0] == "tee" or (names[0] == "cat" and any(">" in token.text for token in command))
        if document is None or not (is_written or _READERS.intersection(names)):
            return None
        parts = (self._joined(self._part(part), part.line) for part in document.parts)
        return _Script("".join(text for value in parts for text, _ in value), document.line)

    def _file(self, words: Sequence[Word], launcher: Sequence[Word] = ()) -> _Script | None:
        """The script in the file that the first word names, with the others as arguments; None where it cannot be read.

        A script that is being read is not read inside itself.
        """
        if not words or not self.reading:
            return None
        beside = os.path.join(os.path.dirname(self.reading[-1]), words[0].text)
        path = next((path for path in (words[0].text, beside) if os.path.isfile(path)), None)
        if path is None or os.path.realpath(path) in map(os.path.realpath, self.reading):
            return None
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_CHARACTERS + 1)
        except OSError:
            return None
        return _Script(text, self.files.add(path, text), tuple(words[1:]), tuple(launcher), path)

    def _inside(self, shell: _Shell, script: _Script) -> None:
        """Run a script that this one has in a shell, and collect its commands."""
        self.depth += 1
        require_depth(self.depth, script.line)
        self._spend(len(script.text), script.line)
        unset, first = tuple(self.unset), len(shell.commands)
        outer = shell.frames, shell.arguments, shell.reading
        shell.frames, shell.arguments, shell.steps, shell.depth = [], script.arguments, self.steps, self.depth
        shell.reading = (*self.reading, script.path) if script.path else self.reading
        shell.run(tokens(script.text, script.line))
        shell.frames, shell.arguments, shell.reading = outer
        self.steps = shell.steps
        found = shell.commands[first:]
        del shell.commands[first:]
        for command in found:
            names = tuple(dict.fromkeys((*unset, *command.unset)))
            self.commands.append(ShellCommand((*script.launcher, *command.words), names, command.environ))
        self.depth -= 1

    def _text(self, name: str) -> str:
        return "".join(text for value in self.values[name][:1] for text, _ in value)

    def _assign(self, token: Token) -> None:
        self.unset = {}
        if token.kind == "array":
            name, appended = token.text.rstrip("+="), token.text.endswith("+=")
            elements: list[Value] = [[(word.text, word.line)] for word in self._expanded(token.elements)]
            self.values[name] = [*(self.values.get(name, []) if appended else []), *elements]
            self._remember(name, appended)
            return
        name, appended, first = _assignment(token) or ("", False, "")
        head = WordPart("text", first, token.parts[0].line)
        value = [fragment for part in (head, *token.parts[1:]) for fragment in self._joined(self._part(part), part.line)]
        before = self.values.get(name, [[]])[0] if appended and self.values.get(name) else []
        self.values[name] = [[*before, *value]]
        self._remember(name, appended)

    def _remember(self, name: str, appended: bool) -> None:
        """Keep which variables without a value a variable got its value from."""
        self.unknown[name] = (*(self.unknown.get(name, ()) if appended else ()), *self.unset)

    def _expanded(self, words: Sequence[Token]) -> list[Word]:
        return [word for token in words for word in self._split(token)]

    def _split(self, token: Token) -> list[Word]:
        """Expand a word and cut it at the blanks that no quotes protect."""
        words: list[list[Fragment]] = [[]]
        is_word = [False]
        for part in token.parts:
            whole = part.quoted or part.kind == "text"
            for number, value in enumerate(self._part(part)):
                if number:
                    words.append([])
                    is_word.append(part.quoted)
                is_word[-1] |= part.quoted
                for text, line in value:
                    for piece in [text] if whole else re.split(r"(\s+)", text):
                        if piece.isspace() and not whole:
                            words.append([])
                            is_word.append(False)
                        elif piece:
                            words[-1].append((piece, line))
        return [
            Word("".join(text for text, _ in word), word[0][1] if word else token.line)
            for word, kept in zip(words, is_word, strict=True)
            if word or kept
        ]

    def _part(self, part: WordPart) -> list[Value]:
        """Expand a part of a word to values: one, or those of an array."""
        self.depth += 1
        require_depth(self.depth, part.line)
        values = self._values(part)
        self.depth -= 1
        self._spend(1 + sum(1 + len(text) for value in values for text, _ in value), part.line)
        return values

    def _values(self, part: WordPart) -> list[Value]:
        if part.kind == "text":
            return [[(part.text, part.line)]]
        if part.kind == "arithmetic":
            return [[(self._arithmetic(part), part.line)]]
        if part.kind == "command":
            output = self._output(part)
            return [[(output if output is not None else re.sub(r"\s+", "_", f"$({part.text})"), part.line)]]
        values = self._parameter(part)
        if part.quoted and part.text.endswith("*]"):
            return [self._joined(values, part.line)]
        is_short = len(values) == 1 and not re.search(r"\s", "".join(text for text, _ in values[0]))
        return [[(text, part.line) for text, _ in values[0]]] if is_short else values

    def _output(self, part: WordPart) -> str | None:
        """The output of a command that prints its words, a part of a path, or a folder; None for any other."""
        if not re.match(r"\s*(echo|basename|dirname|pwd|cd)\b", part.text):
            return None
        self._spend(CALL_STEPS + len(part.text), part.line)
        found = tokens(part.text.strip(), part.line)
        words = [word.text for word in self._expanded([token for token in found if token.kind == "word"])]
        if not words or any(re.search(r"\$\(|[*?[\\]", word) for word in words):
            return None
        return _printed(words, [token.text for token in found if token.kind != "word"], self.has_moved)

    def _joined(self, values: list[Value], line: int) -> Value:
        return [fragment for number, value in enumerate(values) for fragment in ([(" ", line)] if number else []) + value]

    def _parameter(self, part: WordPart) -> list[Value]:
        match = _PARAMETER.fullmatch(part.text)
        if match is None:
            return [[]]
        length, name, index, sign, operand = match.group("length", "name", "index", "operator", "operand")
        known = self._lookup(name)
        if index in ("[@]", "[*]") or name in "@*":
            values = known or []
        else:
            at = whole_number((index or "[0]")[1:-1]) or 0
            values = (known or [])[at : at + 1] or [[]]
        text = "".join(text for text, _ in self._joined(values, part.line))
        if length:
            return [[(str(len(known or []) if index else len(text)), part.line)]]
        is_given = known is not None and (bool(text) or not (sign or "").startswith(":"))
        if sign in (":-", "-", ":=", "=") and not is_given:
            default = self._joined([[(w.text, w.line)] for w in self._expanded(tokens(operand, part.line))], part.line)
            if "=" in sign:
                self.values[name] = [default]
            return [default]
        if sign in (":+", "+"):
            words = self._expanded(tokens(operand, part.line)) if is_given else []
            return [self._joined([[(word.text, word.line)] for word in words], part.line)]
        self.unset.update(dict.fromkeys((name,) if known is None and name not in "@*" else self.unknown.get(name, ())))
        if sign in ("%", "%%", "#", "##"):
            self._spend(len(text) ** 2 // 10, part.line)
            return [[(_trimmed(text, sign, operand), part.line)]]
        return values

    def _lookup(self, name: str) -> list[Value] | None:
        if name in "@*":
            return [[(word.text, word.line)] for word in self.arguments]
        if name.isdecimal():
            given: dict[int | None, Word] = dict(enumerate((Word(self.name, 0), *self.arguments)))
            word = given.get(whole_number(name))
            return [[(word.text, word.line)]] if word is not None else None
        special = {"?": "0", "#": str(len(self.arguments))}
        if self.reading:
            special["BASH_SOURCE"] = self.reading[-1]
        return [[(special[name], 0)]] if name in special else self.values.get(name)

    def _arithmetic(self, part: WordPart) -> str:
        def value(match: re.Match[str]) -> str:
            known = self._lookup(match.group())
            return "".join(text for text, _ in known[0]) if known else "0"

        found = None
        if len(part.text) <= MAX_EXPRESSION:
            values = (self._joined(self._part(inner), part.line) for inner in quoted_parts(part.text, part.line))
            text = "".join(text for value in values for text, _ in value)
            found = _calculated(re.sub(r"[A-Za-z_]\w*", value, text)) if len(text) <= MAX_EXPRESSION else None
        return str(found) if found is not None else f"$(({part.text}))".replace(" ", "")

    def _let(self, command: list[Token]) -> None:
        """Assign what ``((NAME = expression))`` or ``let NAME=expression`` calculates."""
        text = "".join(word.text for word in self._expanded([token for token in command if token.kind == "word"]))
        if match := re.fullmatch(r"([A-Za-z_]\w*)=([^=].*)", text):
            part = WordPart("arithmetic", match[2], command[0].line)
            self.values[match[1]] = [[(self._arithmetic(part), part.line)]]

    def _holds(self, command: list[Token]) -> bool:
        """Return whether a test holds; one that is not understood does not."""
        words = [word.text for word in self._expanded([_protected(token) for token in command if token.kind == "word"])]
        if words[:1] == ["true"]:
            return True
        if not words or words[0] not in ("[", "[[", "test"):
            return False
        words = [word for word in words[1:] if word not in ("]", "]]")]
        negated = words[:1] == ["!"]
        match words[negated:]:
            case ["-z", text]:
                holds = not text
            case ["-n", text] | [text]:
                holds = bool(text)
            case [left, sign, right] if sign in _COMPARISONS:
                holds = _COMPARISONS[sign](left, right)
            case [left, sign, right] if sign in _NUMERIC:
                numbers = whole_number(left), whole_number(right)
                holds = None not in numbers and _NUMERIC[sign](*numbers)
            case _:
                return False
        return holds != negated


SHELLS: Final = frozenset({"bash", "sh", "zsh", "dash"})
_REMOTE: Final = frozenset({"ssh", "pdsh"})
_READERS: Final = SHELLS | _REMOTE | {"sbatch", "qsub"}
"""Programs that run a script from their standard input."""
_PARAMETER: Final = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?])(?P<index>\[[^\]]*\])?"
    r"(?:(?P<operator>:[-=+?]|[-=+?]|%%?|##?)(?P<operand>.*))?",
    re.DOTALL,
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_COMPARISONS: Final = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMERIC: Final = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "lt", "ge", "le")}


def _printed(words: Sequence[str], operators: Sequence[str], has_moved: bool) -> str | None:
    """Return what ``echo``, ``basename``, ``dirname`` or ``pwd``, also behind ``cd``, prints, without newline; else None."""
    command, *rest = words
    if rest[:1] == ["--"] and command != "echo":
        del rest[0]
    if command == "cd" and operators and operators[-1] in ("&&", ";") and all(">" in sign for sign in operators[:-1]):
        match [word for word in rest if word not in ("/dev/null", "1")]:
            case [folder, "pwd"] if not has_moved or os.path.isabs(folder):
                return os.path.abspath(folder)
            case [folder, "pwd", "-P"] if not has_moved or os.path.isabs(folder):
                return os.path.realpath(folder)
    if operators:
        return None
    match [command, *rest]:
        case ["echo", *texts] if not re.fullmatch("-[neE]*[eE][neE]*", "".join(texts[:1])):
            return " ".join(texts[texts[:1] == ["-n"] :]).rstrip("\n")
        case ["basename", path, *suffixes] if len(suffixes) < 2:
            name = path.rstrip("/").rpartition("/")[2] or path[:1]
            return name.removesuffix(*suffixes) if suffixes and suffixes != [name] else name
        case ["dirname", path]:
            return os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")
        case ["pwd"] if not has_moved:
            return os.getcwd()
    return None


def _function(command: Sequence[Token], token: Token, following: Sequence[Token]) -> str | None:
    """The name of a function that a token begins to define behind the words of a command; None where it does not."""
    is_marked = len(command) == 2 and command[0].plain == "function"
    if token.text == "(" and following[0].text == ")" and (len(command) == 1 or is_marked):
        return command[-1].plain
    return command[1].plain if token.plain == "{" and is_marked else None


def _assignment(token: Token) -> tuple[str, bool, str] | None:
    """Name, whether the value is appended, and the text behind ``=`` in the first part; None for any other word."""
    if token.kind != "word" or not token.parts or token.parts[0].kind != "text" or token.parts[0].quoted:
        return None
    match = _ASSIGNMENT.fullmatch(token.parts[0].text)
    return (match.group(1), bool(match.group(2)), match.group(3)) if match else None


def _name(token: Token) -> str:
    """The name of the variable that a word of an assignment or of ``export`` is about."""
    found = _assignment(token)
    return found[0] if found else token.text.rstrip("+=") if token.kind == "array" else token.plain


def _protected(token: Token) -> Token:
    """A word of a test, in which an empty variable is an empty word."""
    quoted = tuple(WordPart(part.kind, part.text, part.line, quoted=True) for part in token.parts)
    return Token("word", token.line, (*quoted, WordPart("text", "", token.line, quoted=True)))


def _trimmed(text: str, sign: str, pattern: str) -> str:
    """Text without the beginning or the end that matches a shell pattern."""
    cuts = range(len(text) + 1) if sign in ("#", "%%") else range(len(text), -1, -1)
    for cut in cuts:
        piece = text[:cut] if "#" in sign else text[cut:]
        if fnmatchcase(piece, pattern):
            return text[cut:] if "#" in sign else text[:cut]
    return text


def _calculated(expression: str) -> int | None:
    """The value of an expression of numbers; None where it is none, or too long."""
    try:
        return _number(ast.parse(expression.strip(), mode="eval").body) if len(expression) <= MAX_EXPRESSION else None
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _quotient(left: int, right: int) -> int:
    """Divide as bash does, toward zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


def _power(left: int, right: int) -> int:
    return pow(left, right, 1 << 64)


_OPERATORS: Final = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
    ast.Pow: _power,
}


def _number(node: ast.AST) -> int:
    """Calculate with the 64 bits of bash."""
    match node:
        case ast.Constant(value=int(value)):
            number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_number(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            number = _OPERATORS[type(sign)](_number(left), _number(right))
        case _:
            raise ValueError("not a calculation")
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
