"""``mindspeed preflight``: a healthy node passes, and each fault of one is a check that fails and says what to do."""

import json
import os
import re
import subprocess
import sys
import time
from importlib import metadata

import pytest

from mindspeed.ops import availability, variants
from mindspeed.workbench.diagnostics import preflight
from tests.cli.test_doctor import fake_megatron
from tests.ops.built import pretend_built

JOB = """
features: [swiglu]
world: {seq_length: 64, global_batch_size: 8, activation: silu, gated_linear_unit: true}
train: {train_iters: 100}
"""


@pytest.fixture
def locked(mindspeed, tmp_path, monkeypatch):
    """The path of a lock that was made here, in a machine without locked builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINDSPEED_OPS", raising=False)
    monkeypatch.setattr(availability, "native_variants", lambda platform: {"swiglu"} if platform == "cpu" else set())
    monkeypatch.setattr(variants, "native_variants", availability.native_variants)
    pretend_built(tmp_path / "cache", operators=["swiglu"])
    (tmp_path / "job.yaml").write_text(JOB)
    path = tmp_path / "mindspeed.lock"
    done = mindspeed("lock", "-f", tmp_path / "job.yaml", "-o", path, "--platform", "cpu")
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture
def node(mindspeed, locked):
    """Checks of this node by name: ``node(status, *options)``."""

    def check(status, *options, edit=None):
        if edit is not None:
            data = json.loads(locked.read_text())
            edit(data)
            locked.write_text(json.dumps(data))
        done = mindspeed("preflight", "--lock", locked, "--free-disk", "0.001", "--free-shm", "0.001", *options, "--json")
        assert (done.exit_code, done.stderr) == (status, "")
        result = json.loads(done.stdout)
        assert result["passed"] == (status == 0)
        assert all(list(row) == ["name", "passed", "found", "wanted", "fix"] for row in result["checks"])
        assert {row["name"] for row in result["checks"] if not row["passed"]} == set() or status != 0
        return {row["name"]: row for row in result["checks"]}

    return check


def failed(rows):
    return sorted(name for name, row in rows.items() if not row["passed"])


def test_the_node_on_which_the_job_was_locked_passes(node):
    rows = node(0)
    assert list(rows) == [
        *("megatron-copies", "version-mindspeed", "version-python", "version-megatron", "version-torch"),
        *("patch-contents", "megatron-contents", "plan", "operators", "data-helpers", "token-numbers", "build-locks"),
        *("disk", "shared-memory", "saving-time"),
    ]
    assert rows["operators"]["found"].split(", ")[-1] == "swiglu C++"
    assert rows["data-helpers"]["found"].endswith(" loads")
    assert rows["token-numbers"]["found"] == "100 x 8 x 64 = 51200 tokens"


def test_torch_is_not_imported(locked):
    code = (
        "import sys; from mindspeed.cli import main; main.main(standalone_mode=False)\n"
        "assert not {'torch', 'megatron.core'} & set(sys.modules), 'imported'"
    )
    command = [sys.executable, "-c", code, "preflight", "--lock", str(locked), "--free-disk", "0.001", "--free-shm", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr
    assert done.stdout.startswith("pass  megatron-copies ")


def test_another_version_than_the_lock_says_which_is_wanted(node):
    rows = node(1, edit=lambda data: data["content"].update({"version torch": "2.6.0"}))
    assert failed(rows) == ["version-torch"]
    assert (rows["version-torch"]["wanted"], rows["version-torch"]["fix"]) == ("2.6.0", "pip install torch==2.6.0")


def test_a_patch_file_with_another_content_is_named(node):
    name = "mindspeed.features.swiglu.layers"
    rows = node(1, edit=lambda data: data["content"].update({f"source {name}": "0123456789abcdef"}))
    assert failed(rows) == [f"source-{name}"]
    row = rows[f"source-{name}"]
    assert re.fullmatch(f"{name} with content [0-9a-f]{{16}}", row["found"])
    assert row["wanted"] == "content 0123456789abcdef"
    assert row["fix"] == "install the packages that the lock file was made with, or lock the job again"


def test_of_many_files_with_another_content_the_first_are_named(node):
    def changed(data):
        data["content"] |= {key: "0" for key in data["content"] if key.startswith("target ")}

    rows = node(1, edit=changed)
    assert [name.partition("-")[0] for name in failed(rows)] == ["megatron", *["target"] * 12]
    assert re.fullmatch(r"\d+ more differences", rows["megatron-contents"]["found"])


def test_a_request_that_becomes_another_plan_here_says_what_differs(node):
    rows = node(1, edit=lambda data: data["job"]["world"].update(seq_length=128))
    assert failed(rows) == ["world-seq_length"]
    assert (rows["world-seq_length"]["found"], rows["world-seq_length"]["wanted"]) == ("seq_length=128", "64")
    rows = node(1, edit=lambda data: data["job"].update(features=["swigl"]))
    assert rows["plan"]["found"] == "MS201 the feature 'swigl' does not exist"
    assert rows["plan"]["fix"] == "did you mean swiglu?"


def test_a_difference_is_one_line_that_names_both_sides_and_what_to_do(mindspeed, locked):
    data = json.loads(locked.read_text())
    data["content"]["version torch"] = "2.6.0"
    locked.write_text(json.dumps(data))
    done = mindspeed("preflight", "--lock", locked, "--free-disk", "0.001", "--free-shm", "0.001")
    (line,) = [line for line in done.stdout.splitlines() if not line.startswith("pass  ")]
    here = metadata.version("torch")
    fix = "pip install torch==2.6.0"
    assert line == f"FAIL  version-torch          this node has torch {here}, but the lock file has 2.6.0; fix: {fix}"


def test_a_lock_without_the_facts_of_a_machine_holds_on_every_machine(node):
    def as_made_in_ci(data):
        kinds = ("operator ", "target ", "version torch", "version python")
        data["content"] = {key: value for key, value in data["content"].items() if not key.startswith(kinds)}

    rows = node(0, edit=as_made_in_ci)
    assert rows["version-torch"]["found"] == f"{metadata.version('torch')} (not in the lock)"
    assert rows["megatron-contents"]["found"] == "not in the lock file"


def test_a_node_on_which_the_operators_are_not_built_would_hold_up_the_others(node, monkeypatch, tmp_path):
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "empty"))
    rows = node(1)
    assert failed(rows) == ["operator-swiglu"]
    row = rows["operator-swiglu"]
    assert (row["found"], row["wanted"]) == ("the operator swiglu as reference", "C++")
    assert row["fix"] == "mindspeed ops build, or install the missing packages; see mindspeed ops list"


def test_operators_that_a_lock_does_not_know_are_to_be_the_best_ones(node, monkeypatch, tmp_path):
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "empty"))

    def as_made_in_ci(data):
        kinds = ("operator ", "version torch", "version python")
        data["content"] = {key: value for key, value in data["content"].items() if not key.startswith(kinds)}

    rows = node(3, edit=as_made_in_ci)
    assert failed(rows) == ["operators"]
    assert rows["operators"]["found"].split(", ")[-1].startswith("swiglu reference (not built")


@pytest.mark.guards(1)
def test_two_copies_of_megatron_are_a_fault_of_the_node(node, tmp_path, monkeypatch):
    root = fake_megatron(tmp_path / "other", "0.12.1")
    monkeypatch.syspath_prepend(str(root.parent))
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(root.parent)])  # it does not win
    rows = node(3)
    assert failed(rows) == ["megatron-copies"]
    assert f"0.12.1 in {root}" in rows["megatron-copies"]["found"]
    assert rows["megatron-copies"]["fix"] == "uninstall the other copies, or remove them from PYTHONPATH"


def test_too_little_space_is_a_fault_of_the_node(node, tmp_path):
    rows = node(3, "--free-disk", "10000000", "--free-shm", "10000000", "--run", tmp_path / "later" / "run")
    assert failed(rows) == ["disk", "shared-memory"]
    assert rows["disk"]["found"].endswith(f" GiB free in {tmp_path}")
    assert rows["disk"]["wanted"] == "1e+07 GiB"


@pytest.fixture
def left(tmp_path):
    """A build lock that is an hour old and that nobody holds."""
    path = tmp_path / "extensions" / "py311_cpu" / "fused" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    return path


@pytest.mark.guards(49)
def test_a_build_lock_that_nobody_holds_is_named_with_its_age_and_left_alone(node, left):
    rows = node(3)
    assert failed(rows) == ["build-locks"]
    assert rows["build-locks"]["found"] == f"{left} held by no process on this host, 1 h old"
    assert rows["build-locks"]["fix"] == f"rm {left}, unless another host is building in that folder"
    assert left.exists()


def test_a_build_lock_that_a_process_holds_is_no_fault(node, left):
    with left.open():
        rows = node(0)
    assert rows["build-locks"]["found"] == f"{left} held by process {os.getpid()} on {os.uname().nodename}, 1 h old"
    assert preflight.build_locks()[0].stale


@pytest.mark.guards(50)
def test_data_helpers_that_do_not_load_are_found_before_rank_0_meets_them(node, tmp_path, monkeypatch):
    folder = tmp_path / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    monkeypatch.setattr(preflight, "package_root", lambda name: tmp_path / "megatron")
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    row = node(3)["data-helpers"]
    assert row["found"] == "not compiled, and there is no g++ and no make"
    (folder / f"helpers_cpp{preflight.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    row = node(3)["data-helpers"]
    assert row["found"].startswith("ImportError: ")
    assert row["fix"].startswith(f"remove {folder}")


@pytest.mark.guards(50)
def test_token_numbers_beyond_32_bits_need_helpers_that_count_further(node, tmp_path, monkeypatch):
    more = {"train_iters": 10**9}
    assert node(0, edit=lambda data: data["job"]["train"].update(more))["token-numbers"]["found"] == (
        "1000000000 x 8 x 64 = 512000000000 tokens"
    )
    monkeypatch.setattr(preflight, "_counts_in_64_bits", lambda: False)
    rows = node(3)
    assert (failed(rows), rows["token-numbers"]["fix"]) == (["token-numbers"], "use Megatron 0.8 or newer")


@pytest.mark.parametrize(("seconds", "found"), [("110", "110 s"), (None, "30 s")])
def test_the_time_to_save_after_a_signal_is_said(node, monkeypatch, seconds, found):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if seconds is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    assert node(0)["saving-time"]["found"].startswith(f"under torchrun ranks have {found} to save after SIGTERM")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--mib", "8", "--wait", "9"], "--mib, --wait has no effect without --between-nodes"),
        (["--between-nodes", "--lock", "mindspeed.lock"], "--lock has no effect with --between-nodes"),
    ],
)
def test_an_option_of_the_other_check_is_refused(mindspeed, words, text):
    done = mindspeed("preflight", *words)
    assert done.exit_code == 2
    assert text in done.stderr
