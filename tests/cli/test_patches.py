"""``mindspeed patches drift``, ``record`` and ``follow``."""

import json
from pathlib import Path

import pytest

from mindspeed.engine.inspection.contracts import BASELINE
from mindspeed.engine.inspection.releases import read_release, recorded_releases, release_file
from tests.engine.inspection.megatron_copies import copy_megatron, edit
from tests.workbench.verification.test_following import tree

STATE = "megatron.core.parallel_state"


@pytest.fixture
def checkout(tmp_path):
    """A source tree of megatron-core to edit, which is on no path."""
    copy_megatron(tmp_path)
    return tmp_path


def drifted(result):
    """``{(feature, target): (verdict, near)}`` of what is not the same."""
    rows = json.loads(result.stdout)["targets"]
    return {(row["feature"], row["target"]): (row["verdict"], row["near"]) for row in rows if row["verdict"] != "same"}


@pytest.mark.guards(10)
def test_a_renamed_symbol_of_a_checkout_is_gone_and_its_new_name_is_told(mindspeed, checkout):
    edit(checkout / "megatron/core/parallel_state.py", "def get_nccl_options(", "def nccl_options_of(")
    result = mindspeed("patches", "drift", "--megatron", checkout, "--json")
    assert result.exit_code == 1
    found = drifted(result)
    gone = {key: value for key, value in found.items() if value[0] == "gone"}
    assert gone == {("megatron-hook-points", f"{STATE}:get_nccl_options"): ("gone", [f"{STATE}:nccl_options_of"])}
    assert {verdict for verdict, _ in found.values()} <= {"gone", "not applied", "not recorded"}
    assert mindspeed("patches", "drift", "--megatron", checkout / "megatron", "--json").stdout == result.stdout


def test_every_verdict_is_told_apart(mindspeed, checkout):
    core = checkout / "megatron/core"
    edit(
        core / "parallel_state.py",
        "def get_nccl_options(pg_name, nccl_comm_cfgs",
        "def get_nccl_options(pg_name, nccl_comm_cfgs, a=1",
    )
    edit(core / "parallel_state.py", "def destroy_model_parallel():", "def destroy_model_parallel(now):")
    edit(core / "activations.py", "torch.pow(F.relu(x), 2)", "F.relu(x) ** 2")
    found = drifted(mindspeed("patches", "drift", "--megatron", checkout, "--json"))
    assert found["megatron-hook-points", f"{STATE}:get_nccl_options"] == ("appended", [])
    assert found["megatron-hook-points", f"{STATE}:destroy_model_parallel"] == ("changed", [])
    assert found["megatron-fixes", "megatron.core.activations:squared_relu"] == ("body changed", [])


def test_the_text_names_versions_verdicts_changes_and_new_names(mindspeed, checkout):
    edit(checkout / "megatron/core/parallel_state.py", "def get_nccl_options(", "def nccl_options_of(")
    edit(checkout / "megatron/core/utils.py", "def is_te_min_version(version,", "def is_te_min_version(version, *,")
    text = mindspeed("patches", "drift", "--megatron", checkout).stdout
    assert text.startswith(f"megatron-core 0.16.1 in {checkout}, against 0.16.1\nFEATURE ")
    assert f"\nmegatron-hook-points: gone: {STATE}:get_nccl_options\n  now {STATE}:nccl_options_of\n" in text
    changed = "\nmegatron-fixes: changed: megatron.core.utils:is_te_min_version\n"
    assert f"{changed}  parameters: in another order\n" in text
    assert text.rstrip().splitlines()[-1].startswith("2 changed, 1 gone, ")


def test_an_unchanged_checkout_has_nothing_to_report(mindspeed, checkout):
    result = mindspeed("patches", "drift", "--megatron", checkout, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["megatron"] == BASELINE
    assert {verdict for verdict, _ in drifted(result).values()} <= {"not applied", "not recorded"}


@pytest.mark.parametrize("version", recorded_releases())
def test_every_recorded_version_is_compared_from_its_record_alone(mindspeed, monkeypatch, version):
    monkeypatch.setattr("mindspeed.engine.planning.drift.read_contract", None)
    result = mindspeed("patches", "drift", "--megatron", version, "--json")
    assert result.exit_code == (0 if version == BASELINE else 1)
    data = json.loads(result.stdout)
    assert list(data) == ["megatron", "targets"]
    assert data["megatron"] == version
    assert all(list(row) == ["feature", "target", "verdict", "near"] for row in data["targets"])
    rows = read_release(release_file(version))["targets"].keys() & read_release(release_file(BASELINE))["targets"].keys()
    assert not {row["target"] for row in data["targets"] if row["verdict"] == "not recorded"} & rows


def test_a_guarded_patch_of_another_version_is_a_row_and_no_failure(mindspeed):
    rows = json.loads(mindspeed("patches", "drift", "--megatron", "0.14.0", "--json").stdout)["targets"]
    target = "megatron.core.transformer.attention:Attention._apply_output_gate"
    assert [row for row in rows if row["target"] == target] == [
        {"feature": "megatron-fixes", "target": target, "verdict": "not applied", "near": []}
    ]
    text = mindspeed("patches", "drift", "--megatron", "0.14.0").stdout
    assert f"\nmegatron-fixes: not applied: {target}\n  only for megatron-core >=0.16\n" in text


def test_an_unknown_version_lists_the_recorded_ones(mindspeed):
    result = mindspeed("patches", "drift", "--megatron", "0.99.0")
    assert result.exit_code == 3
    known = ", ".join(recorded_releases())
    assert result.stderr == (
        f"MS502 mindspeed has no record of megatron-core 0.99.0 to compare with, only of {known}\n"
        "  fix: give the path of its source tree or unpacked wheel instead: mindspeed patches drift --megatron PATH\n"
    )


def test_a_folder_without_megatron_is_refused(mindspeed, tmp_path):
    result = mindspeed("patches", "drift", "--megatron", tmp_path)
    assert result.exit_code == 3
    assert result.stderr == (
        f"MS502 {tmp_path} does not contain megatron/core\n"
        "  fix: give the folder that contains megatron/, or a Megatron version (mindspeed docs drift lists them)\n"
    )


def test_features_of_other_packages_are_compared_too(mindspeed, install, checkout, tmp_path, monkeypatch):
    install("acme", {"acme-feature": ""})
    file = tmp_path / "acme_features.py"
    patch = f'Wrap("{STATE}:destroy_model_parallel", "acme:wrap", "a test"), Wrap("{STATE}:initialize", "acme:wrap", "a test")'
    file.write_text(f"{file.read_text()}\n    @hookimpl\n    def patches(self):\n        return [{patch}]\n")
    found = json.loads(mindspeed("patches", "drift", "--megatron", checkout, "--json").stdout)["targets"]
    own = {row["target"]: (row["verdict"], row["near"]) for row in found if row["feature"] == "acme-feature"}
    assert own == {
        f"{STATE}:destroy_model_parallel": ("same", []),
        f"{STATE}:initialize": ("gone", [f"{STATE}:is_unitialized", f"{STATE}:is_initialized"]),
    }


def test_recording_writes_the_same_file_again(mindspeed, checkout, tmp_path):
    folder = tmp_path / "recorded"
    result = mindspeed("patches", "record", "--megatron", checkout, "--into", folder, "--json")
    written = release_file(BASELINE, folder)
    assert json.loads(result.stdout) == {"megatron": BASELINE, "file": str(written)}
    assert written.read_text() == release_file(BASELINE).read_text()


def test_a_tree_that_does_not_say_its_version_is_not_recorded(mindspeed, checkout, tmp_path):
    (checkout / "megatron/core/package_info.py").unlink()
    result = mindspeed("patches", "record", "--megatron", checkout, "--into", tmp_path / "recorded")
    assert result.stderr == (
        f"MS502 the version of the Megatron in {checkout} cannot be determined\n"
        "  fix: give a complete checkout, in which megatron/core/package_info.py defines the version\n"
    )
    assert not (tmp_path / "recorded").exists()


def test_the_command_writes_the_report_and_the_record(mindspeed, tmp_path: Path) -> None:
    new = tree(tmp_path / "new", "0.21.0")
    result = mindspeed("patches", "follow", new, "--no-claims", "--into", tmp_path / "out", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["megatron"], data["since"], data["claims"]) == ("0.21.0", "0.20.0", [])
    page = (tmp_path / "out" / "0.21.0.md").read_text()
    assert page.startswith("# megatron-core 0.21.0, against 0.20.0\n")
    assert "there are no diffs" in page or data["notes"]


def test_a_folder_without_megatron_is_not_followed(mindspeed, tmp_path: Path) -> None:
    result = mindspeed("patches", "follow", tmp_path, "--no-claims", "--into", tmp_path / "out")
    assert result.exit_code == 3
    assert result.stderr == (
        f"MS502 {tmp_path} does not contain megatron/core\n"
        "  fix: give the folder that contains megatron/, or a Megatron version (mindspeed docs drift lists them)\n"
    )


def test_a_job_file_limits_the_report_to_what_its_plan_patches(mindspeed, checkout, tmp_path):
    """Patches of other features are of no interest to the job."""
    (job := tmp_path / "job.yaml").write_text("features: [rms-norm]\nworld: {normalization: RMSNorm}\nplatform: cpu\n")
    edit(checkout / "megatron/core/parallel_state.py", "def destroy_model_parallel():", "def destroy_model_parallel(now):")
    every = json.loads(mindspeed("patches", "drift", "--megatron", checkout, "--json").stdout)["targets"]
    done = mindspeed("patches", "drift", "--megatron", checkout, "-f", job, "--json")
    rows = json.loads(done.stdout)["targets"]
    assert done.exit_code == 1
    assert 0 < len(rows) < len(every)
    assert {row["feature"] for row in rows} < {row["feature"] for row in every}
    lines = mindspeed("patches", "drift", "--megatron", checkout, "-f", job).stdout.splitlines()
    assert [line.split()[-1] for line in lines if " changed " in line] == [f"{STATE}:destroy_model_parallel"]
    assert not [line for line in lines if " same " in line and ":" in line]
