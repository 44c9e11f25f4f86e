"""A target without a row in a release file is "not recorded", which fails nothing."""

import json
from pathlib import Path

import pytest

from mindspeed.engine.inspection.contracts import ABSENT, Contract
from mindspeed.engine.inspection.releases import release_file
from mindspeed.engine.planning.drift import FAILED, DriftRow, Tree, measure_drift, recorded_tree, source_tree
from mindspeed.engine.planning.targets import PatchTarget
from mindspeed.megatron import release_recording

NEW = "megatron.core.utils:nobody_patches_this_yet"
SCRIPT = "pretrain_gpt:forward_step"


def drift(target: str, tree: Tree) -> DriftRow:
    (row,) = measure_drift([PatchTarget("acme", "acme", target)], tree)
    return row


def wheel(root: Path) -> Path:
    """Megatron as megatron-core 0.17 and later install it: with the training loop, without the scripts beside it."""
    for part in ("core", "training"):
        (root / "megatron" / part).mkdir(parents=True)
        (root / "megatron" / part / "__init__.py").write_text("")
    core = root / "megatron" / "core"
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\nPRE_RELEASE = ''\n")
    (core / "utils.py").write_text("def nobody_patches_this_yet(x):\n    return x\n")
    return root


def test_a_target_without_a_row_in_a_release_is_not_recorded_there() -> None:
    row = drift(NEW, recorded_tree("0.14.0"))
    why = "the record of megatron-core 0.14.0 has no row for this target; mindspeed patches record --megatron PATH adds it"
    assert row == DriftRow("acme", NEW, "not recorded", why=why)
    assert row.verdict not in FAILED


def test_a_target_without_a_row_in_the_baseline_is_not_recorded_anywhere() -> None:
    why = "the record of megatron-core 0.16.1 has no row for this target; mindspeed patches record --megatron PATH adds it"
    found = Tree("0.14.0", lambda target: Contract("function", "(x)", "body"))
    assert drift(NEW, found) == DriftRow("acme", NEW, "not recorded", why=why)


def test_a_target_that_nobody_recorded_and_that_does_not_exist_is_gone() -> None:
    assert drift(NEW, Tree("0.16.1", lambda target: Contract(ABSENT, near=("megatron.core.utils:near",)))).verdict == "gone"


def test_a_script_that_the_distribution_lacks_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_recording, "release_file", lambda version, folder=tmp_path: release_file(version, folder))
    targets = [PatchTarget("acme", "acme", target) for target in (NEW, SCRIPT)]
    script = wheel(tmp_path / "wheel") / "pretrain_gpt.py"
    script.write_text("def forward_step(batch): ...\n")
    with source_tree(tmp_path / "wheel") as tree:
        recorded = release_recording.record_release(tree, targets, tmp_path).read_text()
    assert {name: row["signature"] for name, row in json.loads(recorded)["targets"].items()} == {NEW: "(x)", SCRIPT: "(batch)"}
    script.unlink()
    with source_tree(tmp_path / "wheel") as tree:
        assert drift(SCRIPT, tree) == DriftRow("acme", SCRIPT, "not recorded", why="no Megatron-LM in this tree")
        assert release_recording.record_release(tree, targets, tmp_path).read_text() == recorded
