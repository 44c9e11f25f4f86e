"""Arguments that some Megatron versions do not have are refused when the plan is made, also for a version made up."""

import pytest

from mindspeed.engine.inspection.config_arguments import PLACES, arguments_of
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.planning.plan import PlannedOverride
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron.argument_overrides import check_overrides
from mindspeed.megatron.hook_points import hook_points_for
from mindspeed.plugins.patches import ArgOverride


def override(argument: str) -> PlannedOverride:
    return PlannedOverride(("alpha",), ArgOverride(argument, True, "a test"))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Megatron is at hand."""
    monkeypatch.setattr("mindspeed.engine.inspection.config_arguments.megatron_version", lambda: None)


def test_an_argument_of_a_later_megatron_is_refused_with_near_names(made_up: None) -> None:
    wanted = [override("overlap_grad_reduce"), override("fp4_recipe"), override("qk_l2_norm")]
    assert check_overrides(wanted, "0.16.1") == []
    assert [str(problem) for problem in check_overrides(wanted, "0.14.0")] == [
        "MS401 fp4_recipe, set by alpha, is not an argument of megatron-core 0.14.0\n"
        "  fix: did you mean fp8_recipe or quant_recipe?",
        "MS401 qk_l2_norm, set by alpha, is not an argument of megatron-core 0.14.0\n  fix: did you mean qk_layernorm?",
    ]


def test_a_patch_release_is_judged_by_its_sibling(made_up: None) -> None:
    assert arguments_of("0.15.0") == arguments_of("0.15.3") != arguments_of("0.14.0")
    assert arguments_of("0.12.1") is None
    assert arguments_of(None) is None


def test_a_plan_for_another_machine_wraps_the_places_that_take_its_arguments(made_up: None) -> None:
    wrapped = hook_points_for([], ["overlap_param_gather"], megatron="0.14.0")
    assert [patch.target.partition(":")[2] for patch in wrapped] == [
        "DistributedDataParallelConfig.__post_init__",
        "OptimizerConfig.__post_init__",
        "parse_args",
        "validate_args",
    ]


@pytest.mark.parametrize("version", recorded_releases("configuration"))
def test_every_place_has_names_in_every_version(made_up: None, version: str) -> None:
    names = arguments_of(version)
    assert names is not None
    hybrid = version_in(version, ">=0.18")
    assert {place: bool(found) for place, found in names.items()} == {
        place.name: hybrid or place.name != "HybridModel" for place in PLACES
    }
