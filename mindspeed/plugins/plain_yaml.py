"""Read YAML that people write as plain data: mappings with text as keys, lists, text, numbers, true, false and null.

Tags are refused, dates and times are text. Size, depth and what aliases expand to are limited, so that reading ends soon
whatever the text is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

SIZE: Final = 200_000
"""Characters of a text."""
DEPTH: Final = 30
"""Lists and mappings inside one another."""
VALUES: Final = 50_000
"""Values of a text, those that aliases repeat included."""
DIGITS: Final = 40
"""Characters of a number."""
_MERGE: Final = "<<"
_TYPES: Final = yaml.SafeLoader("")


class PlainDataError(Exception):
    """A text is no plain data, or too large; ``line`` counts from 1."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


@dataclass(slots=True)
class _Open:
    """A list or mapping that is being read, with the key that waits for its value."""

    value: Any
    anchor: str | None
    size: int = 1
    key: str | None = None
    merged: list[Any] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)


def read_plain(text: str, repeated: list[tuple[str, int]] | None = None) -> Any:
    """Return the data of a text; None for an empty one.

    Keys that a mapping has twice are added to ``repeated``, each as a sentence with its line. Raises PlainDataError.
    """
    if len(text) > SIZE:
        raise PlainDataError(f"it has more than {SIZE:,} characters", 1)
    try:
        return _Reader([] if repeated is None else repeated).read(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlainDataError(str(error.problem or error.context), mark.line + 1 if mark is not None else 1) from error
    except yaml.YAMLError as error:
        raise PlainDataError(" ".join(str(error).split()), 1) from error


class _Reader:
    def __init__(self, repeated: list[tuple[str, int]]) -> None:
        self._repeated = repeated
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._result: Any = None

    def read(self, events: Iterator[Any]) -> Any:
        documents = 0
        for event in events:
            line = event.start_mark.line + 1
            if getattr(event, "tag", None) is not None:
                raise PlainDataError(f"the tag {event.tag.replace('tag:yaml.org,2002:', '!!')} is not plain data", line)
            match event:
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        raise PlainDataError("it has more than one document", line)
                case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                    self._begin([] if isinstance(event, yaml.SequenceStartEvent) else {}, event.anchor, line)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self._end(line)
                case yaml.ScalarEvent():
                    self._scalar(event, line)
                case yaml.AliasEvent():
                    if event.anchor not in self._anchors:
                        raise PlainDataError(f"the alias *{event.anchor} refers to nothing before it", line)
                    self._add(*self._anchors[event.anchor], line)
        return self._result

    def _begin(self, value: Any, anchor: str | None, line: int) -> None:
        if len(self._open) >= DEPTH:
            raise PlainDataError(f"lists and mappings are nested more than {DEPTH} levels deep", line)
        if self._wants_key:
            raise PlainDataError("a key is a list or a mapping, not text", line)
        self._open.append(_Open(value, anchor))

    @property
    def _wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _end(self, line: int) -> None:
        closed = self._open.pop()
        for mapping in closed.merged:
            closed.value = {**mapping, **closed.value}
        if closed.anchor:
            self._anchors[closed.anchor] = closed.value, closed.size
        self._add(closed.value, closed.size, line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        if self._wants_key:
            self._begin_value(event.value, line)
            return
        value = _plain(event.value, line) if event.implicit[0] else event.value
        if event.anchor:
            self._anchors[event.anchor] = value, 1
        self._add(value, 1, line)

    def _begin_value(self, key: str, line: int) -> None:
        lines = self._open[-1].lines
        if key in lines and key != _MERGE:
            self._repeated.append((f"the key {key!r} is given twice, first in line {lines[key]}", line))
        lines.setdefault(key, line)
        self._open[-1].key = key

    def _add(self, value: Any, size: int, line: int) -> None:
        if not self._open:
            self._result = value
            return
        into = self._open[-1]
        into.size += size
        if into.size > VALUES:
            raise PlainDataError(f"it has more than {VALUES:,} values", line)
        if isinstance(into.value, list):
            into.value.append(value)
        elif into.key is None:
            raise PlainDataError("a key is an alias, not text", line)
        elif into.key == _MERGE:
            mappings = value if isinstance(value, list) else [value]
            if not all(isinstance(mapping, dict) for mapping in mappings):
                raise PlainDataError(f"{_MERGE} needs a mapping, or a list of mappings", line)
            into.merged += mappings
            into.key = None
        else:
            into.value[into.key] = value
            into.key = None


def _plain(text: str, line: int) -> Any:
    """Return the value of a scalar without quotes, by the rules of YAML 1.1 but for dates, times and numbers with colons."""
    tag: str = _TYPES.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return _TYPES.bool_values[text.lower()]
    if kind not in ("int", "float") or ":" in text:
        return text
    if len(text) > DIGITS:
        raise PlainDataError(f"a number has more than {DIGITS} digits", line)
    node = yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", text)
    return _TYPES.construct_yaml_int(node) if kind == "int" else _TYPES.construct_yaml_float(node)
