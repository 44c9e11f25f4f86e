"""The tests that a change can reach."""

from pathlib import Path

import pytest

from tests.budgets import feature_of
from tests.changed import reachable_tests


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file = file.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(
        tmp_path,
        mindspeed__low="",
        mindspeed__middle="def f():\n    from mindspeed import low\n",
        mindspeed__alone="",
        mindspeed__features__ring__feature="TARGET = 'mindspeed.alone:f'\n",
        tests__test_low="import mindspeed.low\n",
        tests__test_middle="from mindspeed.middle import f\n",
        tests__features__ring__test_ring="",
    )


def test_importers_are_reached_also_by_an_import_inside_a_function(root: Path) -> None:
    assert reachable_tests(["mindspeed/low.py"], root) == ["tests/test_low.py", "tests/test_middle.py"]


def test_a_module_that_a_string_names_is_used_and_a_feature_has_its_folder(root: Path) -> None:
    ring = ["tests/features/ring/test_ring.py", "tests/features/test_claims.py"]
    assert reachable_tests(["mindspeed/alone.py"], root) == []
    assert reachable_tests(["mindspeed/features/ring/README.md"], root) == ring


def test_a_changed_test_is_reached_and_what_all_share_reaches_all(root: Path) -> None:
    assert reachable_tests(["tests/test_low.py"], root) == ["tests/test_low.py"]
    assert reachable_tests(["tests/conftest.py"], root) == ["tests"]
    assert reachable_tests(["docs/guide.md"], root) == []


def test_the_feature_of_a_test_is_its_folder_or_the_parameter_of_its_claim() -> None:
    assert feature_of("tests/features/swiglu/test_layers.py::test_a[b]") == "swiglu"
    assert feature_of("tests/features/test_claims.py::test_a_feature_keeps_its_claim[ring-attention]") == "ring_attention"
    assert feature_of("tests/features/test_arguments.py::test_a") is None
