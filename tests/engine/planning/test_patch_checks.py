"""What is wrong with a set of patches, said before anything is touched."""

import sys
import time
from itertools import permutations
from pathlib import Path

import pytest

from mindspeed.engine.planning.patch_checks import check_patches, with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Replace
from tests.engine.patching.patch_cases import ATTENTION, STATE, mixin, planned, put, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401

pytestmark = pytest.mark.usefixtures("fake_megatron")


def texts(*patches: PlannedPatch) -> list[str]:
    return [str(problem) for problem in check_patches(patches)]


@pytest.mark.guards(12)
def test_a_missing_target_is_an_error_with_near_names() -> None:
    assert texts(replace(f"{STATE}:initialise", "glue:size_of_42")) == [
        "MS401 alpha patches megatron.core.state:initialise, which does not exist\n"
        "  fix: did you mean megatron.core.state:initialize?"
    ]


def test_a_missing_target_without_near_names_says_what_to_check() -> None:
    assert texts(replace(f"{STATE}:zzzzzz", "glue:size_of_42")) == [
        "MS401 alpha patches megatron.core.state:zzzzzz, which does not exist\n"
        "  fix: install a version of the patched package that alpha supports, or remove alpha"
    ]


def test_a_cache_to_clear_must_exist() -> None:
    assert texts(replace(f"{STATE}:get_size", "glue:size_of_42", clears=(f"{STATE}:tables",))) == [
        "MS401 alpha patches megatron.core.state:tables, which does not exist\n  fix: did you mean megatron.core.state:table?"
    ]


@pytest.mark.guards(25)
def test_two_replaces_of_one_site_conflict_under_whatever_name() -> None:
    one, two = replace(f"{STATE}:get_size", "glue:size_of_42"), replace("megatron.core.mpu:get_size", "glue:size_of_7", "beta")
    assert texts(one, two) == [
        (
            "MS402 alpha and beta replace megatron.core.state:get_size, but only one feature can\n"
            "  because: alpha: replace of megatron.core.state:get_size, a test\n"
            "  because: beta: replace of megatron.core.mpu:get_size, a test\n"
            "  fix: remove alpha or beta"
        )
    ]
    assert check_patches([two, one]) == check_patches([one, two])


def test_a_replaced_class_excludes_patches_of_its_members() -> None:
    assert texts(replace(f"{ATTENTION}:Attention", "glue:Alone"), wrap(f"{ATTENTION}:Attention.forward", owner="beta")) == [
        (
            "MS402 alpha replaces the class megatron.core.transformer.attention:Attention, but beta patches its member "
            "forward\n"
            "  because: alpha: replace of megatron.core.transformer.attention:Attention, a test\n"
            "  because: beta: wrap of megatron.core.transformer.attention:Attention.forward, a test\n"
            "  fix: remove alpha or beta"
        )
    ]


def test_unequal_sets_conflict_and_equal_ones_agree() -> None:
    assert texts(put(f"{STATE}:LIMIT", 2), put(f"{STATE}:LIMIT", 2, "beta")) == []
    assert texts(put(f"{STATE}:LIMIT", 2), put(f"{STATE}:LIMIT", True, "beta")) == [
        "MS402 megatron.core.state:LIMIT cannot have two values: alpha sets it to 2 and beta sets it to True\n"
        "  because: alpha: set of megatron.core.state:LIMIT, a test\n"
        "  because: beta: set of megatron.core.state:LIMIT, a test\n"
        "  fix: remove alpha or beta"
    ]


def test_a_feature_may_replace_what_the_base_plan_patches() -> None:
    ground = [
        replace(f"{STATE}:get_size", "glue:size_of_7", "cpu-platform", ground=True),
        wrap(f"{ATTENTION}:Attention.forward", owner="megatron-hook-points", ground=True),
        put(f"{STATE}:LIMIT", 1, "cpu-platform", ground=True),
    ]
    own = [replace(f"{STATE}:get_size", "glue:size_of_42"), replace(f"{ATTENTION}:Attention", "glue:Alone")]
    assert texts(*ground, *own, put(f"{STATE}:LIMIT", 2)) == []


def test_two_replaces_within_the_base_plan_conflict() -> None:
    one = replace(f"{STATE}:get_size", "glue:size_of_7", "cpu-platform", ground=True)
    two = replace(f"{STATE}:get_size", "glue:size_of_7", "megatron-fixes", ground=True)
    assert [problem.code for problem in check_patches([one, two])] == ["MS402"]


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (
            replace,
            (
                "MS403 the replace of megatron.core.transformer.attention:Config by alpha cannot be applied: the target is a "
                "dataclass\n"
                "  where: {file}:{line}\n"
                "  fix: patch a method of the class instead, or use a setting of the feature for a configuration value"
            ),
        ),
        (
            mixin,
            (
                "MS403 the mixin of megatron.core.transformer.attention:Config by alpha cannot be applied: the target is a "
                "dataclass\n"
                "  where: {file}:{line}\n"
                "  fix: patch a method of the class instead, or use a setting of the feature for a configuration value"
            ),
        ),
        (
            wrap,
            (
                "MS403 the wrap of megatron.core.transformer.attention:Config by alpha cannot be applied: the target is a "
                "class\n"
                "  where: {file}:{line}\n"
                "  fix: wrap one of its methods, or use Mixin"
            ),
        ),
    ],
)
def test_a_dataclass_takes_no_patch_as_a_class(patch: object, text: str, fake_megatron: Path) -> None:  # noqa: F811
    file = fake_megatron / "megatron/core/transformer/attention.py"
    line = file.read_text().splitlines().index("class Config:") + 1
    assert texts(patch(f"{ATTENTION}:Config", "glue:Loud")) == [text.format(file=file, line=line)]  # type: ignore[operator]


@pytest.mark.guards(39)
def test_a_class_that_names_itself_takes_no_replace(fake_megatron: Path) -> None:  # noqa: F811
    file = fake_megatron / "megatron/core/transformer/attention.py"
    lines = file.read_text().splitlines()
    line, use = lines.index("class Named(Base):") + 1, next(i for i, text in enumerate(lines) if "super(Named" in text) + 1
    assert texts(mixin(f"{ATTENTION}:Named")) == [
        (
            "MS403 the mixin of megatron.core.transformer.attention:Named by alpha cannot be applied: the class refers to "
            f"itself by super(Named, ...) (line {use}), which would mean the new class\n"
            f"  where: {file}:{line}\n"
            "  fix: patch a method of the class instead, or use a setting of the feature for a configuration value"
        )
    ]
    assert texts(wrap(f"{ATTENTION}:Named.forward")) == []


def test_a_function_takes_no_mixin() -> None:
    assert [p.message for p in check_patches([mixin(f"{STATE}:get_size")])] == [
        "the mixin of megatron.core.state:get_size by alpha cannot be applied: the target is not a class"
    ]


def test_all_problems_are_reported_and_skipped_patches_have_none() -> None:
    wrong = Replace(f"{STATE}:gone", "glue:size_of_7", "a test")
    patches = [
        replace(f"{STATE}:initialise", "glue:size_of_42"),
        wrap(f"{ATTENTION}:Attention"),
        put(f"{STATE}:LIMIT", 2),
        put(f"{STATE}:LIMIT", 3, "beta"),
        planned("gamma", wrong, skipped="only on npu"),
    ]
    assert sorted(problem.code for problem in check_patches(patches)) == ["MS401", "MS402", "MS403"]


def test_the_problems_do_not_depend_on_the_order_of_the_patches() -> None:
    patches = [
        replace(f"{STATE}:get_size", "glue:size_of_42"),
        replace(f"{STATE}:get_size", "glue:size_of_7", "beta"),
        replace(f"{ATTENTION}:Attention", "glue:Alone", "gamma"),
        wrap(f"{ATTENTION}:Attention.forward"),
    ]
    found = [frozenset(check_patches(order)) for order in permutations(patches)]
    assert len(found[0]) == 2
    assert set(found) == {found[0]}


def test_a_target_in_a_package_that_is_not_installed_is_taken_as_written() -> None:
    assert texts(replace("torch_npu_absent.npu:current_device", "glue:size_of_42")) == []


def test_three_hundred_patches_are_checked_quickly_and_without_imports() -> None:
    patches = [replace(f"{STATE}:get_size", "glue:size_of_42"), *(wrap(f"{STATE}:scale", owner=f"f{i}") for i in range(300))]
    start = time.process_time()
    with_sites(patches)
    check_patches(patches[1:])
    assert time.process_time() - start < 0.5
    assert not [name for name in sys.modules if name.startswith("megatron.")]
