"""Chinese pages are those of the English pages as they are now."""

import pytest

from mindspeed.plugins.discovery import discover
from tools.docs.chinese import DECLARED, PAGES, ROOT, page, pages, row_of, translated, translations, units, untranslated


@pytest.mark.parametrize("source", PAGES)
def test_every_unit_of_an_english_page_but_a_summary_has_a_translation(source):
    catalog = discover(only=())
    waiting = {catalog.feature(name).summary() for name in catalog.specs} if source == DECLARED else set()
    changed = [unit for unit in untranslated(source) if unit not in waiting]
    assert changed == [], "translate them in docs/zh/translations.yaml, then run: make docs"


def test_every_translation_is_of_a_unit_that_is_still_there():
    there = {row_of(unit) for source in PAGES for unit in units(source)}
    changed = [unit for unit in translations() if unit not in there]
    assert changed == [], "their English text has changed: change both in docs/zh/translations.yaml, then run: make docs"


def test_the_number_of_features_changes_without_a_new_translation():
    known = {"{number} features": "{number} 个特性", "4 ranks": "四个 rank"}
    assert translated("64 features", known) == "64 个特性"
    assert translated("4 ranks", known) == "四个 rank"
    assert translated("5 ranks", known) is None


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


@pytest.fixture
def two_features(tmp_path, monkeypatch):
    """A list of two features, of which the table translates the first."""
    monkeypatch.setattr("tools.docs.chinese.ROOT", tmp_path)
    monkeypatch.setattr("tools.docs.chinese.TABLE", tmp_path / "table.yaml")
    monkeypatch.setattr("tools.docs.chinese.PAGES", {DECLARED: "docs/zh/features.md"})
    (tmp_path / "docs" / "features").mkdir(parents=True)
    (tmp_path / "table.yaml").write_text("- {en: Features, zh: 特性}\n- {en: Scale the loss, zh: 缩放损失}\n", encoding="utf-8")
    rows = "| [a](a.md) | Scale the loss |\n| [b](b.md) | Scale the gradient |\n"
    (tmp_path / DECLARED).write_text(f"# Features\n\n| feature | |\n|---|---|\n{rows}", encoding="utf-8")


def test_a_summary_without_a_translation_stays_english_and_is_named_below_the_list(two_features):
    assert pages()["docs/zh/features.md"].splitlines()[6:] == [
        "| feature |  |",
        "| --- | --- |",
        "| [a](../features/a.md) | 缩放损失 |",
        "| [b](../features/b.md) | Scale the gradient |",
        "",
        "## 尚无译文",
        "",
        "- Scale the gradient",
    ]
