"""What features declare for a trainer without Megatron: import lines that work, and reasons where there is none."""

import subprocess
import sys

import pytest

from mindspeed.plugins import Category
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.pages.features import feature_page
from mindspeed.workbench.pages.reference import REFERENCE

CATALOG = discover(only=())
CATEGORIES = {Category.CONTEXT_PARALLEL, Category.MEMORY, Category.COMPUTE, Category.PARALLEL, Category.MOE}
LINES = {name: spec.own_trainer for name, spec in CATALOG.specs.items() if spec.own_trainer.startswith("from ")}


def test_every_feature_of_these_categories_says_how_or_why_not() -> None:
    assert [name for name, spec in CATALOG.specs.items() if spec.category in CATEGORIES and not spec.own_trainer] == []


def test_every_line_imports_without_megatron() -> None:
    program = "\n".join([*LINES.values(), "import sys", "assert not any(name.startswith('megatron') for name in sys.modules)"])
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["ring-attention", "nano-pipe"])
def test_page_of_a_feature_shows_its_line_or_its_reason(name: str) -> None:
    own = CATALOG.specs[name].own_trainer
    assert (own if name in LINES else f"Works only with Megatron: {own}.") in feature_page(CATALOG.usable[name], {}, {})


def test_page_of_all_has_every_feature_once() -> None:
    text = REFERENCE["own-trainer"].text(CATALOG)
    assert {
        name for name, spec in CATALOG.specs.items() if f"\n| [{name}](features/{name}.md) |" in text and spec.own_trainer
    } == {name for name, spec in CATALOG.specs.items() if spec.own_trainer}
