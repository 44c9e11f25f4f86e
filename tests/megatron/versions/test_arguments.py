"""Arguments that some Megatron versions do not have are refused when the plan is made, also for a version made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed.inspection.contracts import CORE, recorded_versions
from mindspeed.inspection.megatron_copies import megatron_version, package_root
from mindspeed.megatron.argument_overrides import check_overrides
from mindspeed.megatron.config_arguments import FOLDER, PLACES, arguments_of, record_arguments, recorded_arguments
from mindspeed.megatron.hook_points import hook_points_for
from mindspeed.planning.plan import PlannedOverride
from mindspeed.plugins.patches import ArgOverride
from mindspeed.resolution.environment import SUPPORTED_MEGATRON, version_in


def override(argument: str) -> PlannedOverride:
    return PlannedOverride(("alpha",), ArgOverride(argument, True, "a test"))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Megatron is at hand."""
    for name in ("package_root", "megatron_version"):
        monkeypatch.setattr(f"mindspeed.megatron.config_arguments.{name}", lambda *_: None)


def test_every_supported_release_with_contracts_has_recorded_names() -> None:
    assert recorded_arguments() == tuple(v for v in recorded_versions(CORE) if version_in(v, SUPPORTED_MEGATRON))


@pytest.mark.skipif(megatron_version() not in recorded_arguments(), reason="the installed megatron-core is not a recorded one")
def test_recording_the_installed_megatron_gives_the_committed_file(tmp_path: Path) -> None:
    root, version = package_root("core"), megatron_version()
    assert root is not None
    assert version is not None
    written = record_arguments(root, version, tmp_path)
    assert written.read_text() == (FOLDER / written.name).read_text(), "see 'A new Megatron release' in CONTRIBUTING.md"


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
    ]


@pytest.mark.parametrize("version", recorded_arguments())
def test_every_place_has_names_in_every_version(version: str) -> None:
    names = json.loads((FOLDER / f"{version}.json").read_text())["arguments"]
    assert {place: bool(found) for place, found in names.items()} == {place.name: True for place in PLACES}
