"""Chinese pages are those of the English pages as they are now."""

import pytest

from tools.docs.chinese import PAGES, ROOT, page, pages, translations, units


@pytest.mark.parametrize("source", PAGES)
def test_every_unit_of_an_english_page_has_a_translation(source):
    known = translations()
    changed = [unit for unit, needed in units(source).items() if needed and unit not in known]
    assert changed == [], "translate them in docs/zh/translations.yaml, then run: make docs"


def test_every_translation_is_of_a_unit_that_is_still_there():
    there = {unit for source in PAGES for unit in units(source)}
    assert [unit for unit in translations() if unit not in there] == []


@pytest.mark.parametrize("source", PAGES)
def test_a_chinese_page_is_made_from_the_page_and_the_table(source):
    assert (ROOT / PAGES[source]).read_text(encoding="utf-8") == pages()[PAGES[source]], "run: make docs"


def test_code_names_and_links_stay_and_prose_is_translated(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.docs.chinese.ROOT", tmp_path)
    monkeypatch.setattr("tools.docs.chinese.PAGES", {"docs/a.md": "docs/zh/a.md", "docs/b.md": "docs/zh/b.md"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "# Title\n\n<!-- transcript: x -->\n```\n$ run it\n\n| no table |\n```\n<!-- end -->\n"
        "One line,\nand [two](b.md#x) or [b](b.md).\n\n"
        "| name | says |\n|---|---|\n| `a b` | some words |\n\n1. first thing\n\n   more of it\n2. second\n"
    )
    asked = {}

    def loud(unit, needed):
        asked[unit] = needed
        return unit.upper() if "](" not in unit else unit

    assert page("docs/a.md", loud) == (
        "# TITLE\n\n<!-- made by `make docs` from docs/a.md and docs/zh/translations.yaml; do not edit -->\n\n"
        "[English](../a.md)\n\n"
        "```\n$ run it\n\n| no table |\n```\nOne line, and [two](../b.md#x) or [b](b.md).\n\n"
        "| NAME | SAYS |\n| --- | --- |\n| `A B` | SOME WORDS |\n\n1. FIRST THING\n\n   MORE OF IT\n2. SECOND\n"
    )
    assert {unit for unit, needed in asked.items() if not needed} == {"name", "says", "---", "`a b`"}
