"""The Chinese catalogue has what the command line prints, and nothing else."""

import gettext
import string
from io import BytesIO

import pytest

from mindspeed.files.message_catalogue import CHINESE, compiled_catalogue, read_catalogue
from tools.docs.catalogue import catalogue, messages

NEEDED = (
    *("mindspeed ", "error code ", "mindspeed/cli/", "mindspeed/problems/", "mindspeed/engine/resolution/"),
    *("mindspeed/workbench/diagnostics/doctor.py", "mindspeed/workbench/diagnostics/ascend.py"),
)
"""Places whose messages need a translation: commands with their options, codes, and the words of plans, checks and doctor."""


@pytest.fixture(scope="module")
def known():
    """The translation of each message."""
    found = read_catalogue(CHINESE.read_text(encoding="utf-8"))
    del found[""]
    return found


@pytest.fixture(scope="module")
def found():
    return messages()


def test_every_message_of_the_catalogue_is_still_in_the_code(known, found):
    gone = [message for message in known if message not in found]
    assert gone == [], "their text has changed: run python -m tools.docs.catalogue and translate what is new"


def test_help_codes_plans_checks_and_doctor_are_translated(known, found):
    missing = [message for message, place in found.items() if place.startswith(NEEDED) and message not in known]
    assert missing == [], "run python -m tools.docs.catalogue and translate them in its file"


def test_a_translation_has_the_fields_of_its_message(known):
    def fields(text):
        return {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}

    odd = {
        message: translation
        for message, translation in known.items()
        if ("{" in message or "{" in translation) and fields(message) != fields(translation)
    }
    assert odd == {}


def test_gettext_reads_what_the_catalogue_says(known):
    compiled = gettext.GNUTranslations(BytesIO(compiled_catalogue(read_catalogue(CHINESE.read_text(encoding="utf-8")))))
    assert {message: compiled.gettext(message) for message in known} == known
    assert compiled.gettext("no such message") == "no such message"


def test_what_is_written_is_read_back():
    text = catalogue({"Options": 'a "b"\n\\c'})
    assert read_catalogue(text)["Options"] == 'a "b"\n\\c'
    assert read_catalogue('msgid "a"\n"b"\nmsgstr ""\n"c"\n"d"\n\n# no translation\nmsgid "e"\nmsgstr ""\n') == {"ab": "cd"}
