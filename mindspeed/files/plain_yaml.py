"""Read YAML that people write as plain data: mappings with text as keys, lists, text, numbers, true, false and null.

Tags are refused, dates and times are text. Size, depth and what aliases expand to are limited, so that reading ends soon
whatever the text is.
"""

from __future__ import annotations

from collections import defaultdict
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
_TAG: Final = "tag:yaml.org,2002:"
_TEXT: Final = f"{_TAG}str"
_MERGE: Final = f"{_TAG}merge"
_NUMBERS: Final = (f"{_TAG}int", f"{_TAG}float")
_TYPES: Final = (*_NUMBERS, f"{_TAG}bool", f"{_TAG}null")


class PlainDataError(Exception):
    """A text is no plain data, or too large; ``line`` counts from 1."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


def read_plain(text: str, repeated: list[tuple[str, int]] | None = None) -> Any:
    """Return the data of a text; None for an empty one.

    Keys that a mapping has twice are added to ``repeated``, each as a sentence with its line. Raises PlainDataError.
    """
    if len(text) > SIZE:
        raise PlainDataError(f"it has more than {SIZE:,} characters", 1)
    try:
        return _Reader(text, [] if repeated is None else repeated).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlainDataError(str(error.problem or error.context), mark.line + 1 if mark is not None else 1) from error
    except yaml.YAMLError as error:
        raise PlainDataError(" ".join(str(error).split()), 1) from error


class _Reader(yaml.SafeLoader):
    """A loader whose nodes are plain data; what is not is refused before anything is made of it."""

    def __init__(self, text: str, repeated: list[tuple[str, int]]) -> None:
        super().__init__(text)
        self._repeated = repeated
        self._depth = 0
        self._sizes: dict[Any, int] = {}
        self._keys: defaultdict[Any, dict[str, int]] = defaultdict(dict)

    def read(self) -> Any:
        node = self.get_node() if self.check_node() else None
        if self.check_node():
            raise PlainDataError("it has more than one document", _line(self.peek_event()))  # type: ignore[no-untyped-call]
        return None if node is None else self.construct_document(node)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; that of a key has a ``parent`` and no ``index``."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_key = parent is not None and index is None
        is_alias, is_collection = isinstance(event, yaml.AliasEvent), isinstance(event, yaml.CollectionStartEvent)
        refused = None
        if getattr(event, "tag", None) is not None:
            refused = f"the tag {event.tag.replace(_TAG, '!!')} is not plain data"
        elif is_key and (is_alias or is_collection):
            refused = f"a key is {'an alias' if is_alias else 'a list or a mapping'}, not text"
        elif is_alias and self.anchors.get(event.anchor) not in self._sizes:
            refused = f"the alias *{event.anchor} refers to nothing before it"
        elif is_collection and self._depth >= DEPTH:
            refused = f"lists and mappings are nested more than {DEPTH} levels deep"
        if refused:
            raise PlainDataError(refused, _line(event))
        if not is_alias:
            self.anchors.pop(event.anchor, None)  # a later value may have the anchor of an earlier one
        self._depth += is_collection
        node = super().compose_node(parent, index)
        self._depth -= is_collection
        if isinstance(node, yaml.ScalarNode) and not is_alias:
            node.tag = self._key(node, parent) if is_key else _type_of(node)
        if node not in self._sizes:
            self._sizes[node] = self._size(node)
        return node

    def _key(self, node: yaml.ScalarNode, mapping: Any) -> str:
        """Note a key that its mapping has already, and return its tag."""
        if node.tag == _MERGE:
            return _MERGE
        lines = self._keys[mapping]
        if node.value in lines:
            self._repeated.append((f"the key {node.value!r} is given twice, first in line {lines[node.value]}", _line(node)))
        lines.setdefault(node.value, _line(node))
        return _TEXT

    def _size(self, node: Any) -> int:
        """Return the number of values in a node, after those in it."""
        size = 1
        if not isinstance(node, yaml.ScalarNode):
            values = (value for _, value in node.value) if isinstance(node, yaml.MappingNode) else node.value
            size += sum(self._sizes[value] for value in values)
        if size > VALUES:
            raise PlainDataError(f"it has more than {VALUES:,} values", _line(node))
        return size


def _type_of(node: yaml.ScalarNode) -> str:
    """Return the tag of a scalar by the rules of YAML 1.1, but for dates, times and numbers with colons, which are text."""
    if node.tag not in _TYPES or (node.tag in _NUMBERS and ":" in node.value):
        return _TEXT
    if node.tag in _NUMBERS and len(node.value) > DIGITS:
        raise PlainDataError(f"a number has more than {DIGITS} digits", _line(node))
    return str(node.tag)


def _line(part: Any) -> int:
    line: int = part.start_mark.line
    return line + 1
