"""What the documents say is what the code is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed.plugins.discovery import BUILT_IN
from mindspeed.plugins.problems import CODES
from mindspeed.registry import catalog

ROOT = Path(__file__).resolve().parents[2]
FEATURES = sorted(row.name for row in catalog().rows if row.distribution == BUILT_IN)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_feature_in_the_readme_is_the_example_package():
    (shown,) = re.findall(r"```python\n(class ZLossArgs.*?)```", read("README.md"), re.DOTALL)
    assert shown.strip() in read("examples/third_party_feature/acme_mindspeed/feature.py")


def test_the_transcripts_in_the_readme_are_filled():
    blocks = re.findall(r"<!-- transcript: .*? -->\n```\n(.*?)```", read("README.md"), re.DOTALL)
    assert len(blocks) == 2
    assert all(len(block.splitlines()) > 3 for block in blocks)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_a_page_with_its_claim_and_measured_effects(name):
    folder = name.replace("-", "_")
    page = read(f"mindspeed/features/{folder}/README.md")
    assert page.startswith(f"# {name}\n")
    assert catalog().feature(name).spec.numerics.claim in page.lower()
    assert f"mindspeed features verify {name}" in page
    assert (ROOT / "tests" / "features" / folder).is_dir()


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_file_is_short_and_every_argument_is_described(name):
    feature = catalog().feature(name)
    lines = read(f"mindspeed/features/{name.replace('-', '_')}/feature.py").count("\n")
    assert lines <= 150
    assert all(field.description for field in feature.Args.model_fields.values())


def test_every_code_that_is_raised_is_explained_and_every_explained_code_is_raised():
    used = set()
    for file in (ROOT / "mindspeed").rglob("*.py"):
        if file.name != "problems.py":
            used |= set(re.findall(r'"(MS\d{3})"', file.read_text(encoding="utf-8")))
    assert used - CODES.keys() == set()
    assert CODES.keys() - used == set()


def test_framework_files_are_short():
    long = {
        str(file.relative_to(ROOT)): count
        for file in (ROOT / "mindspeed").rglob("*.py")
        if (count := file.read_text(encoding="utf-8").count("\n")) > 400
    }
    assert long == {}
