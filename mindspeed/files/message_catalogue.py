"""Catalogues of messages: the text form that people edit (.po), and the binary form that `gettext` reads (.mo)."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LOCALE: Final = Path(__file__).parents[1] / "locale"
CHINESE: Final = LOCALE / "zh" / "LC_MESSAGES" / "mindspeed.po"
_LINE: Final = re.compile(r'^(msgid |msgstr |)(".*")$', re.MULTILINE)
_MAGIC: Final = 0x950412DE
_HEADER_BYTES: Final = 28


def read_catalogue(text: str) -> dict[str, str]:
    """Return the translation of each message; that of the empty message is the header of the catalogue."""
    entries: list[list[str]] = []
    for keyword, quoted in _LINE.findall(text):
        if keyword == "msgid ":
            entries.append([])
        if keyword:
            entries[-1].append("")
        entries[-1][-1] += json.loads(quoted)
    return {message: translation for message, translation in entries if translation}


def compiled_catalogue(translations: Mapping[str, str]) -> bytes:
    """Return a catalogue in the binary form: header, lengths and offsets, texts (GNU gettext manual, 10.3)."""
    pairs = sorted((message.encode(), translation.encode()) for message, translation in translations.items())
    texts = [message for message, _ in pairs] + [translation for _, translation in pairs]
    second = _HEADER_BYTES + 8 * len(pairs)
    offset = second + 8 * len(pairs)
    table = []
    for text in texts:
        table += [len(text), offset]
        offset += len(text) + 1
    header = (_MAGIC, 0, len(pairs), _HEADER_BYTES, second, 0, 0)
    return struct.pack(f"<{len(header) + len(table)}I", *header, *table) + b"".join(text + b"\0" for text in texts)
