"""Texts for readers: English sentences that a command line can print in another language.

Data keeps the English sentence. A translation is looked up by `gettext`, where a text is printed for a person. The
catalogues are ``mindspeed/locale/*/LC_MESSAGES/mindspeed.po``; only the command line binds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from gettext import gettext
from string import Formatter
from typing import Any


class Text(str):
    """An English sentence that remembers its template and the text of each replacement field.

    ``fields`` maps a field, as the template has it between its braces, to its text. A text among them is translated too.
    """

    __slots__ = ("fields", "template")
    template: str
    fields: Mapping[str, str]

    def __new__(cls, template: str, fields: Mapping[str, str]) -> Text:
        self = super().__new__(cls, _joined(template, fields))
        self.template, self.fields = template, fields
        return self

    def __getnewargs__(self) -> tuple[str, Mapping[str, str]]:  # type: ignore[override]
        return self.template, self.fields

    @classmethod
    def plain(cls, text: str) -> Text:
        """Return a text without fields."""
        return cls(text.replace("{", "{{").replace("}", "}}"), {})

    @classmethod
    def of(cls, template: str, **values: Any) -> Text:
        """Fill a template with values by name."""
        return cls.filled(template, values)

    @classmethod
    def filled(cls, template: str, values: Mapping[str, Any]) -> Text:
        """Fill a template as ``str.format_map`` does. Raises as that does."""
        fields = {}
        for _, field in _parts(template):
            if field is not None and field not in fields:
                value = values.get(field)
                fields[field] = value if isinstance(value, Text) else f"{{{field}}}".format_map(values)
        return cls(template, fields)


def marked(text: str) -> str:
    """Return the text; the catalogue has it, because it is translated where it is printed."""
    return text


def localized(text: str) -> str:
    """Return a text in the reader's language, as `gettext` selects it; in English without a translation."""
    if isinstance(text, Text):
        fields = {field: localized(value) if isinstance(value, Text) else value for field, value in text.fields.items()}
        return _joined(_translated(text.template), fields)
    return _translated(text)


def _translated(text: str) -> str:
    return gettext(text) if text else text  # of the empty text, gettext returns its own header


def _joined(template: str, fields: Mapping[str, str]) -> str:
    return "".join(literal if field is None else f"{literal}{fields[field]}" for literal, field in _parts(template))


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield each literal text of a template, and the field behind it."""
    for literal, name, spec, conversion in Formatter().parse(template):
        if name is None:
            yield literal, None
        else:
            yield literal, f"{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
