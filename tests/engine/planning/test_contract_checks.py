"""A plan holds the installed Megatron to what was recorded of its version; one for another version to that record."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mindspeed
from mindspeed.engine.inspection import source, source_cache, target_info
from mindspeed.engine.planning.patch_checks import check_contracts, check_patches, notes_on, with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.engine.resolution.environment import made_up
from mindspeed.files.cache_folder import CACHE_VARIABLE
from mindspeed.megatron.fixes.feature import TABLES, bugs_mended_by, mended_bugs
from mindspeed.plugins.patches import Wrap, patch_from_json
from mindspeed.problems import PatchError, ResolutionError
from tests.engine.inspection.megatron_copies import copy_megatron, edit

STATE = "megatron.core.parallel_state"
OPTIONS = "def get_nccl_options(pg_name, nccl_comm_cfgs"


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of megatron-core first on the path; what is remembered of it is forgotten with it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    core = copy_megatron(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return core


def wrap(target: str, owner: str = "alpha") -> PlannedPatch:
    patch = Wrap(target, "glue:marked", "a test")
    return PlannedPatch(owner, patch, patch.target)


def problems(version: str, *targets: str) -> list[str]:
    return [str(problem) for problem in check_patches([wrap(target) for target in targets], version)]


def test_a_megatron_as_it_was_released_has_no_problem(core: Path) -> None:
    patches = [wrap(f"{STATE}:get_nccl_options")]
    assert check_patches(patches, "0.16.1") == []
    assert notes_on(patches, "0.16.1") == []


@pytest.mark.guards(10)
def test_changed_parameters_are_an_error_that_names_feature_target_version_and_change(core: Path) -> None:
    edit(core / "parallel_state.py", f"{OPTIONS}):", "def get_nccl_options(pg_name, *, extra):")
    assert problems("0.16.1", f"{STATE}:get_nccl_options") == [
        (
            f"MS407 {STATE}:get_nccl_options, which alpha patches, differs from that of megatron-core 0.16.1: parameters: "
            "+extra, -nccl_comm_cfgs\n"
            "  because: megatron-core 0.16.1 has a function (pg_name, nccl_comm_cfgs)\n"
            "  because: megatron-core 0.16.1 here has a function (pg_name, *, extra)\n"
            f"  where: {core / 'parallel_state.py'}:150\n"
            "  fix: install megatron-core 0.16.1 as it was released, or remove alpha"
        )
    ]


def test_a_release_above_the_recorded_ones_is_held_to_the_nearest_below(core: Path) -> None:
    edit(core / "package_info.py", "PATCH = 1", "PATCH = 2")
    edit(core / "parallel_state.py", "def get_nccl_options(", "def make_nccl_options(")
    assert problems("0.16.2", f"{STATE}:get_nccl_options", f"{STATE}:destroy_model_parallel") == [
        (
            f"MS401 alpha patches {STATE}:get_nccl_options, which does not exist in megatron-core 0.16.2\n"
            "  because: in megatron-core 0.16.1 it is a function (pg_name, nccl_comm_cfgs)\n"
            f"  fix: did you mean {STATE}:make_nccl_options?"
        )
    ]


@pytest.mark.long
def test_a_plan_is_refused_with_every_changed_target_of_the_base_plan_too(core: Path) -> None:
    edit(core / "transformer" / "utils.py", "def gelu_impl(x)", "def gelu_impl(x, y)")
    edit(core / "utils.py", "def is_te_min_version(", "def is_te_at_least(")
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(environment=made_up("cpu", "0.16.1"))
    assert [problem.code for problem in error.value.problems] == ["MS401", "MS407"]
    assert [problem.message for problem in error.value.problems] == [
        "megatron-fixes patches megatron.core.utils:is_te_min_version, which does not exist in megatron-core 0.16.1",
        (
            "megatron.core.transformer.utils:gelu_impl, which megatron-fixes patches, differs from that of megatron-core "
            "0.16.1: parameters: +y"
        ),
    ]


def test_other_code_and_appended_parameters_are_notes(core: Path) -> None:
    edit(core / "parallel_state.py", OPTIONS, f"{OPTIONS}, a=1")
    edit(core / "activations.py", "torch.pow(F.relu(x), 2)", "F.relu(x) ** 2")
    patches = [wrap(f"{STATE}:get_nccl_options"), wrap("megatron.core.activations:squared_relu", "beta")]
    assert check_patches(patches, "0.16.1") == []
    assert [(row.kind, row.feature, row.text) for row in notes_on(patches, "0.16.1")] == [
        ("note", "alpha", f"{STATE}:get_nccl_options has more parameters, unlike in megatron-core 0.16.1"),
        ("note", "beta", "megatron.core.activations:squared_relu has other code, unlike in megatron-core 0.16.1"),
    ]


EDITS = {
    "router-z-loss-per-token": ("moe/router.py", "z_loss = z_loss_func(logits,", "z_loss = z_loss_func(1 * logits,"),
    "router-losses-per-token": (
        "moe/router.py",
        "num_layers = self.config.num_layers\n",
        "num_layers = 1 * self.config.num_layers\n",
    ),
    "latent-attention-keys-of-one-rank": ("multi_latent_attention.py", "mscale = 1.0\n", "mscale = 1.0 * 1\n"),
}
"""Other code at the targets of fixes that would correct a loss or a gradient twice."""


def test_a_patch_for_recorded_code_is_left_out_where_a_fork_has_other_code(core: Path) -> None:
    environment = made_up("cpu", "0.16.1")
    planned = mindspeed.plan(environment=environment)
    assert set(EDITS) <= bugs_mended_by(planned)
    for file, old, new in EDITS.values():
        edit(core / "transformer" / file, old, new)
    plan = mindspeed.plan(environment=environment)
    assert bugs_mended_by(plan) == mended_bugs("0.16.1") - set(EDITS)
    why = "its code is not that of megatron-core 0.16.1"
    targets = [row["target"] for row in TABLES["fixes"] if row["bug"] in EDITS]
    assert {row.text for row in plan.rows if why in row.text} == {f"patch of {target} is skipped: {why}" for target in targets}
    assert {problem.message for problem in check_contracts(planned.patches, "0.16.1")} == {
        f"megatron-fixes does not fit the {target} that is installed: {why}" for target in targets
    }


def test_a_target_that_no_contract_knows_is_a_note(core: Path) -> None:
    patches = [wrap(f"{STATE}:get_global_memory_buffer"), wrap("torch.cuda:is_available")]
    assert check_patches(patches, "0.16.1") == []
    assert [row.text for row in notes_on(patches, "0.16.1")] == [
        f"{STATE}:get_global_memory_buffer has no recorded contract to compare with"
    ]


def test_a_plan_for_another_version_is_checked_against_its_record() -> None:
    target = "megatron.core.fusions.fused_bias_geglu:quick_gelu"
    assert problems("0.16.1", target) == []
    assert problems("0.14.0", target, f"{STATE}:destroy_model_parallel") == [
        f"MS401 alpha patches {target}, which does not exist in megatron-core 0.14.0\n"
        "  fix: did you mean megatron.core.fusions.fused_bias_geglu:bias_geglu?"
    ]
    (planned,) = with_sites([wrap("megatron.core.transformer.moe.moe_utils:router_gating_linear")], "0.14.0")
    assert planned.site == "megatron.core.transformer.moe.moe_utils:router_gating_linear"


def test_nothing_is_known_of_a_version_below_every_record() -> None:
    assert problems("0.9.0", f"{STATE}:no_such_name") == []


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_every_patch_of_a_built_in_plan_has_a_contract(platform: str) -> None:
    features = ["data-parallel", "tensor-parallel", "pipeline-parallel", "async-ddp", "swiglu", "rms-norm", "recompute"]
    world = {"world_size": 8, "tp": 2, "pp": 2, "num_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    model = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu"}
    environment = replace(made_up(platform, "0.16.1"), training=True)
    plan = mindspeed.plan(features, world={**world, **model}, environment=environment)
    assert "megatron.training.arguments:validate_args" in [planned.patch.target for planned in plan.patches]
    assert [row for row in plan.rows if "contract" in row.text] == []


def test_what_was_read_is_remembered_until_a_file_changes(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [f"{STATE}:get_nccl_options", f"{STATE}:destroy_model_parallel"]
    first = target_info.find_places(targets, "0.16.1")

    def refuse(file: str) -> None:
        raise AssertionError(f"{file} is parsed again")

    with monkeypatch.context() as patched:
        patched.setattr(source, "parse", refuse)
        patched.setattr(source, "_tables", {})
        assert target_info.find_places(targets, "0.16.1") == first
        source_cache.source_cache_of.cache_clear()  # as in another process, which has the file alone
        assert target_info.find_places(targets, "0.16.1") == first
    edit(core / "parallel_state.py", "def get_nccl_options(pg_name,", "def get_nccl_options(name,")
    edit(core / "parallel_state.py", "def destroy_model_parallel()", "def destroy_model_parallel(now)")
    for target, signature in zip(targets, ("(name, nccl_comm_cfgs)", "(now)"), strict=True):
        contract = target_info.find_places([target], "0.16.1")[target].contract
        assert contract is not None
        assert contract.signature == signature


def test_a_damaged_or_unwritable_memory_only_costs_time(core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{STATE}:get_nccl_options"
    first = target_info.find_places([target], "0.16.1")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("{")
    source_cache.source_cache_of.cache_clear()
    assert target_info.find_places([target], "0.16.1") == first
    monkeypatch.setenv(CACHE_VARIABLE, str(core / "__init__.py"))
    source_cache.source_cache_of.cache_clear()
    assert target_info.find_places([target], "0.16.1") == first


def test_core_and_training_from_two_folders_are_refused_with_both(
    core: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = tmp_path / "checkout" / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").touch()
    (training / "arguments.py").write_text(
        "def parse_args(extra_args_provider=None, ignore_unknown_args=False): ...\ndef validate_args(args, defaults={}): ...\n"
    )
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "checkout"), *sys.path])
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(environment=made_up("cpu", "0.16.1"))
    assert [str(problem) for problem in error.value.problems] == [
        f"MS408 megatron.core comes from {core} and megatron.training from {training}\n"
        f"  fix: put {tmp_path / 'checkout'} first on PYTHONPATH, or uninstall the other copy"
    ]


def test_a_plan_that_was_made_elsewhere_is_held_to_what_is_here(core: Path) -> None:
    plan = mindspeed.plan(environment=made_up("cuda", "0.16.1"))
    edit(core / "utils.py", "def is_te_min_version(version,", "def is_te_min_version(version, *,")
    with pytest.raises(PatchError) as error:
        mindspeed.activate(plan)
    assert [problem.message for problem in error.value.problems] == [
        (
            "megatron.core.utils:is_te_min_version, which megatron-fixes patches, differs from that of megatron-core 0.16.1: "
            "parameters: in another order"
        )
    ]
    assert mindspeed.deactivate() is None


def test_a_plan_for_another_version_is_not_activated(core: Path) -> None:
    plan = mindspeed.plan(environment=made_up("cuda", "0.16.1"))
    edit(core / "package_info.py", "PATCH = 1", "PATCH = 2")
    with pytest.raises(PatchError) as error:
        mindspeed.activate(plan)
    assert [str(problem) for problem in error.value.problems] == [
        (
            "MS306 the plan was made for megatron-core 0.16.1, but 0.16.2 is installed\n"
            "  fix: install megatron-core 0.16.1, or make the plan again"
        )
    ]


def test_a_changed_target_of_a_release_after_the_tested_ones_is_a_problem_and_the_others_are_counted(core: Path) -> None:
    edit(core / "package_info.py", "MINOR = 16", "MINOR = 21")
    (warning,) = [note.text for note in notes_on([wrap(f"{STATE}:get_nccl_options")], "0.21.1") if note.kind == "warning"]
    newer = "megatron-core 0.21.1 is newer than the releases that features are tested on, >=0.14,<0.21"
    assert warning == f"{newer}; targets of this plan: 1 same"
    edit(core / "parallel_state.py", f"{OPTIONS}):", "def get_nccl_options(pg_name, *, extra):")
    (text,) = problems("0.21.1", f"{STATE}:get_nccl_options")
    assert text.startswith(
        f"MS407 {STATE}:get_nccl_options, which alpha patches, has changed since megatron-core 0.20.0: "
        "parameters: +extra, -nccl_comm_cfgs\n"
    )
    assert text.endswith("\n  fix: install megatron-core 0.20.0, or remove alpha")


def test_a_new_optional_parameter_anywhere_is_no_problem_for_a_wrapper_that_finds_its_own_by_name(core: Path) -> None:
    edit(core / "package_info.py", "MINOR = 16", "MINOR = 21")
    head = "def is_pipeline_last_stage("
    edit(core / "parallel_state.py", f"{head}ignore_virtual=True, ", f"{head}ignore_virtual=True, extra=None, ")
    target = f"{STATE}:is_pipeline_last_stage"
    by_name = PlannedPatch("alpha", Wrap(target, "glue:marked", "a test", by_name=True), target)
    assert [text.partition(" ")[0] for text in problems("0.21.1", target)] == ["MS407"]
    assert check_patches([by_name], "0.21.1") == []
    assert [note.text.partition("; ")[2] for note in notes_on([by_name], "0.21.1") if note.kind == "warning"] == [
        "targets of this plan: 1 appended"
    ]
    edit(core / "parallel_state.py", "ignore_virtual=True, extra=None", "extra, ignore_virtual=True")
    assert [problem.code for problem in check_patches([by_name], "0.21.1")] == ["MS407"]


def test_a_wrapper_that_finds_its_own_by_name_is_so_in_a_plan_that_was_stored() -> None:
    patch = Wrap("megatron.core.parallel_state:get_nccl_options", "glue:marked", "a test", by_name=True)
    assert patch_from_json(patch.to_json()) == patch
    assert "by_name" not in replace(patch, by_name=False).to_json()


def test_a_megatron_that_does_not_say_its_version_is_a_warning_with_its_path(core: Path) -> None:
    (core / "package_info.py").write_text("")
    (warning,) = notes_on([wrap(f"{STATE}:get_nccl_options")], None)
    assert (warning.kind, warning.text) == (
        "warning",
        f"{core.parent} does not contain its version, so its functions are not compared with a release",
    )
