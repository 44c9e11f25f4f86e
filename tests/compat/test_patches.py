"""Patches registered through ``MindSpeedPatchesManager`` go through the engine and keep its guarantees."""

import pytest

from mindspeed.engine.runtime import session
from mindspeed.patch_utils import MindSpeedPatchesManager as Manager
from tests.compat import targets
from tests.compat.conftest import problems_of

HERE = "tests.compat.targets"


def owners(site):
    return next(one.owners for one in session.current().applied.sites if one.site == site)


def test_a_replacement_is_applied_listed_and_attributed_to_the_old_names():
    Manager.register_patch(f"{HERE}.double", targets.triple)
    assert targets.double(1) == 2
    Manager.apply_patches()
    assert targets.double(1) == 3
    assert session.current().plan.names == ("compat:patches",)
    assert owners(f"{HERE}:double") == ("compat:patches",)
    (planned,) = [p for p in session.current().plan.patches if p.owner == "compat:patches"]
    assert (planned.patch.kind, planned.patch.value) == ("replace", f"{HERE}:triple")
    assert planned.patch.reason == "registered through the old names as a replacement, because its name is not a wrapper's"


@pytest.mark.parametrize("wrapper", [targets.bracket_wrapper, targets.star_decorator])
def test_a_name_with_a_suffix_wraps_and_the_plan_says_by_which_rule(wrapper):
    Manager.register_patch(f"{HERE}.double", wrapper)
    Manager.apply_patches()
    suffix = wrapper.__name__.partition("_")[2]
    assert targets.double(4) == (wrapper.__name__.partition("_")[0], 8)
    (planned,) = [p for p in session.current().plan.patches if p.owner == "compat:patches"]
    reason = f"registered through the old names as a wrapper, because its name {wrapper.__name__} ends in {suffix}"
    assert planned.patch.reason == reason


def test_wrappers_nest_in_the_order_of_their_registration():
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.register_patch(f"{HERE}.double", targets.star_decorator)
    Manager.apply_patches()
    assert targets.double(1) == ("star", ("bracket", 2))


def test_methods_and_closures_can_be_patched():
    def area(self, side):
        return ("mine", side)

    Manager.register_patch(f"{HERE}.Shape.area", area)
    Manager.register_patch(f"{HERE}.greet", lambda name: name.upper())
    Manager.apply_patches()
    assert targets.Shape().area(3) == ("mine", 3)
    assert targets.greet("you") == "YOU"
    assert owners(f"{HERE}:Shape.area") == ("compat:patches",)


@pytest.mark.guards(14, 39)
def test_a_wrapper_without_the_suffix_is_refused_before_it_fails_in_a_call():
    Manager.register_patch(f"{HERE}.double", targets.forgotten_suffix)
    (problem,) = problems_of(Manager.apply_patches)
    assert problem.code == "MS409"
    assert problem.message == (
        f"compat:patches replaces {HERE}.double by forgotten_suffix, but it is a wrapper: it takes a function and returns one"
    )
    assert problem.fix_text == "rename it to forgotten_suffix_wrapper, so that it is used as a wrapper"
    assert targets.double(1) == 2


@pytest.mark.guards(12)
def test_a_missing_target_is_an_error_with_near_names_and_nothing_is_planted():
    import megatron.core.transformer.mlp as mlp

    before = dict(vars(mlp))
    Manager.register_patch("megatron.core.transformer.mlp.MLPSubmodule", targets.Shape)
    (problem,) = problems_of(Manager.apply_patches)
    assert problem.code == "MS401"
    assert problem.message == "compat:patches patches megatron.core.transformer.mlp:MLPSubmodule, which does not exist"
    assert problem.fix_text.startswith("did you mean megatron.core.transformer.mlp:MLPSubmodules")
    assert vars(mlp) == before
    assert session.current() is None


def test_a_dummy_in_a_package_that_exists_is_refused():
    Manager.register_patch("megatron.core.transformer.mlp.brand_new", targets.triple, create_dummy=True)
    codes = {problem.code: problem for problem in problems_of(Manager.apply_patches)}
    assert codes["MS409"].message == (
        "compat:patches requests a dummy module megatron.core.transformer.mlp.brand_new, which does not exist"
    )
    assert codes["MS409"].fix_text == ("mindspeed creates no dummy modules: define the name in your package and call it there")


def test_a_dummy_of_a_package_that_is_not_installed_is_left_out_and_said(capsys):
    Manager.register_patch("no_such_engine.pytorch.Linear", targets.Shape, create_dummy=True)
    Manager.register_patch(f"{HERE}.double", targets.triple, create_dummy=True)
    Manager.apply_patches()
    said = capsys.readouterr().err
    assert (
        "mindspeed: compat:patches: patch of no_such_engine.pytorch.Linear with Shape: its package is not installed, and "
        "mindspeed creates no dummy modules\n"
    ) in said
    assert f"patch of {HERE}.double with triple: create_dummy is not needed: the target exists\n" in said
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_engine")


def test_patching_with_nothing_is_refused():
    Manager.register_patch(f"{HERE}.double")
    (problem,) = problems_of(Manager.apply_patches)
    assert (problem.code, problem.message) == ("MS409", f"compat:patches patches {HERE}.double with None")


def test_a_target_without_a_module_is_refused_at_once():
    (problem,) = problems_of(Manager.register_patch, "double", targets.triple)
    assert problem.message == "the patch target 'double' in a call of register_patch does not have the form package.module.name"


def test_two_replacements_are_a_conflict_and_by_force_the_last_wins_with_a_row(capsys):
    Manager.register_patch(f"{HERE}.double", targets.triple)
    Manager.register_patch(f"{HERE}.double", targets.quadruple)
    (problem,) = problems_of(Manager.apply_patches)
    assert problem.code == "MS402"
    assert problem.message == f"compat:patches replaces {HERE}:double twice"
    Manager.registrations.clear()
    Manager.register_patch(f"{HERE}.double", targets.triple)
    Manager.register_patch(f"{HERE}.double", targets.quadruple, force_patch=True)
    Manager.apply_patches()
    assert targets.double(1) == 4
    row = f"patch of {HERE}.double with triple: compat:patches replaces it with quadruple and force=True"
    assert row in [row.text for row in session.current().plan.rows if row.kind == "left-out"]
    assert row in capsys.readouterr().err


@pytest.mark.guards("20b")
def test_applying_twice_changes_nothing():
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.apply_patches()
    first = targets.double
    Manager.apply_patches()
    assert targets.double is first
    assert targets.double(1) == ("bracket", 2)


@pytest.mark.guards(20, 30)
def test_apply_remove_apply_restores_the_replacement_too():
    original = targets.double
    Manager.register_patch(f"{HERE}.double", targets.triple)
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.apply_patches()
    assert targets.double(1) == ("bracket", 3)
    Manager.remove_patches()
    assert targets.double is original
    assert session.current() is None
    Manager.apply_patches()
    assert targets.double(1) == ("bracket", 3)


@pytest.mark.guards(20)
def test_one_patch_can_be_suspended_and_is_applied_is_a_truth_value_and_can_be_called():
    original = targets.double
    Manager.register_patch(f"{HERE}.double", targets.triple)
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.register_patch(f"{HERE}.greet", targets.bracket_wrapper)
    info = Manager.patches_info[f"{HERE}.double"]
    assert not info.is_applied
    assert not info.is_applied()
    Manager.apply_patches()
    assert info.is_applied
    assert info.is_applied() is True
    assert info.patch_func is targets.triple
    assert info.wrappers == [targets.bracket_wrapper]
    info.remove_patch()
    assert targets.double is original
    assert not info.is_applied()
    assert targets.greet("you") == ("bracket", "hello you")
    info.apply_patch()
    assert targets.double(1) == ("bracket", 3)
    assert info.is_applied


def test_a_wrapper_is_removed_by_name():
    Manager.register_patch(f"{HERE}.double", targets.bracket_wrapper)
    Manager.register_patch(f"{HERE}.double", targets.star_decorator)
    Manager.apply_patches()
    Manager.remove_wrappers(f"{HERE}.double", "bracket_wrapper")
    assert targets.double(1) == ("star", 2)
    (problem,) = problems_of(Manager.remove_wrappers, f"{HERE}.double", "bracket_wrapper")
    assert problem.message == f"{HERE}.double has no wrapper bracket_wrapper"
    Manager.remove_wrappers(f"{HERE}.double", "bracket_wrapper", remove_check=False)


def test_a_plan_of_others_stays_active_beside_old_patches_and_after_them():
    import mindspeed

    mindspeed.activate(mindspeed.plan(features=["rms-norm"], world={"normalization": "RMSNorm"}))
    digest = session.current().plan.digest
    Manager.register_patch(f"{HERE}.double", targets.triple)
    Manager.apply_patches()
    assert session.current().plan.names == ("compat:patches", "rms-norm")
    assert targets.double(1) == 3
    Manager.remove_patches()
    assert session.current().plan.digest == digest
    assert targets.double(1) == 2


@pytest.mark.guards(25, 39)
def test_an_old_patch_and_a_feature_of_ours_on_one_site_are_a_conflict_and_the_plan_before_stays():
    import mindspeed

    mindspeed.activate(mindspeed.plan(features=["rotary-embedding"], world={"rotary": True}))
    digest = session.current().plan.digest
    replaced = next(
        p.site for p in session.current().plan.patches if p.owner == "rotary-embedding" and p.patch.kind == "replace"
    )
    Manager.register_patch(replaced.replace(":", "."), targets.triple, force_patch=True)
    (problem,) = problems_of(Manager.apply_patches)
    assert problem.code == "MS402"
    assert problem.features == ("compat:patches", "rotary-embedding")
    assert session.current().plan.digest == digest
