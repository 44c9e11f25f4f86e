"""Chinese pages are those of the English pages as they are now."""

from functools import cache

import pytest

from mindspeed.plugins.discovery import discover
from mindspeed.workbench.pages.chinese import DECLARED, PAGES, page, pages, row_of, table, translated, units, untranslated
from mindspeed.workbench.pages.reference import REFERENCE
from tools.docs import site


@cache
def texts():
    """The English pages that have Chinese ones."""
    catalog = discover(only=())
    made = {f"{name}.md": REFERENCE[name].text(catalog) for name in ("features/index", "errors")}
    return site.guides(catalog) | made


@pytest.mark.parametrize("source", PAGES)
def test_every_unit_of_an_english_page_but_a_summary_has_a_translation(source):
    catalog = discover(only=())
    waiting = {catalog.feature(name).summary() for name in catalog.specs} if source == DECLARED else set()
    changed = [unit for unit in untranslated(source, texts()[source]) if unit not in waiting]
    assert changed == [], "translate them in docs/zh/translations.yaml"


def test_every_translation_is_of_a_unit_that_is_still_there():
    there = {row_of(unit) for source in PAGES for unit in units(source, texts()[source])}
    changed = [unit for unit in table() if unit not in there]
    assert changed == [], "their English text has changed: change both in docs/zh/translations.yaml"


def test_every_chinese_page_is_made_and_leads_to_the_english_one():
    made = pages(texts())
    assert made.keys() == set(PAGES.values())
    assert "[English](../install.md)" in made["zh/install.md"]
    assert "](first-run.md)" in made["zh/install.md"]
    assert "](../launching-at-scale.md)" in made["zh/troubleshooting.md"]


def test_the_number_of_features_changes_without_a_new_translation():
    known = {"{number} features": "{number} 个特性", "4 ranks": "四个 rank"}
    assert translated("64 features", known) == "64 个特性"
    assert translated("4 ranks", known) == "四个 rank"
    assert translated("5 ranks", known) is None


def test_code_names_and_links_stay_and_prose_is_translated(monkeypatch):
    monkeypatch.setattr("mindspeed.workbench.pages.chinese.PAGES", {"a.md": "zh/a.md", "b.md": "zh/b.md"})
    text = (
        "# Title\n\n<!-- transcript: x -->\n```\n$ run it\n\n| no table |\n```\n<!-- end -->\n"
        "One line,\nand [two](b.md#x) or [b](b.md).\n\n"
        "| name | says |\n|---|---|\n| `a b` | some words |\n\n1. first thing\n\n   more of it\n2. second\n"
    )
    asked = {}

    def loud(unit, needed):
        asked[unit] = needed
        return unit.upper() if "](" not in unit else unit

    assert page("a.md", text, loud) == (
        "# TITLE\n\n<!-- made from a.md and docs/zh/translations.yaml -->\n\n"
        "[English](../a.md)\n\n"
        "```\n$ run it\n\n| no table |\n```\nOne line, and [two](../b.md#x) or [b](b.md).\n\n"
        "| NAME | SAYS |\n| --- | --- |\n| `A B` | SOME WORDS |\n\n1. FIRST THING\n\n   MORE OF IT\n2. SECOND\n"
    )
    assert {unit for unit, needed in asked.items() if not needed} == {"name", "says", "---", "`a b`"}


def test_a_summary_without_a_translation_stays_english_and_is_named_below_the_list(monkeypatch):
    monkeypatch.setattr("mindspeed.workbench.pages.chinese.PAGES", {DECLARED: "zh/features.md"})
    known = {"Features": "特性", "Scale the loss": "缩放损失"}
    monkeypatch.setattr("mindspeed.workbench.pages.chinese.translations", lambda: known)
    rows = "| [a](a.md) | Scale the loss |\n| [b](b.md) | Scale the gradient |\n"
    made = pages({DECLARED: f"# Features\n\n| feature | |\n|---|---|\n{rows}"})["zh/features.md"]
    assert made.splitlines()[6:] == [
        "| feature |  |",
        "| --- | --- |",
        "| [a](../features/a.md) | 缩放损失 |",
        "| [b](../features/b.md) | Scale the gradient |",
        "",
        "## 尚无译文",
        "",
        "- Scale the gradient",
    ]
