"""A run of Megatron-LM that is saved by one release and resumed by another, with our features on both sides."""

import os
from pathlib import Path
from shlex import split

import pytest

from tests.megatron_lm.checkout import LLAMA, Checkout, minor_version, path

VARIABLE = "MINDSPEED_MEGATRONS"
FEATURES = split("--features rms-norm,swiglu")
LAYOUTS = {
    "one process": (1, []),
    "dp2 with the distributed optimizer": (
        2,
        split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ),
}
pytestmark = pytest.mark.long


def newest() -> Path:
    """The newest checkout of a release that keeps no common.pt; skips the test without one, or without an older one."""
    if minor_version(path()) >= 19:
        pytest.skip("MEGATRON_LM_PATH names no checkout before 0.19")
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    roots = [root for folder in folders for root in folder.iterdir() if (root / "pretrain_gpt.py").is_file()]
    found = sorted((minor_version(root), root) for root in roots)
    if not found or found[-1][0] < 19:
        pytest.skip(f"{VARIABLE} names no folder with a checkout of 0.19 or newer")
    return min(root for minor, root in found if minor == 19) if any(minor == 19 for minor, _ in found) else found[-1][1]


def resume_at(folder: Path, iteration: int) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_an_older_release_goes_on_as_stock_goes_on_with_it(tmp_path: Path, layout: str) -> None:
    root = newest()
    nproc, flags = LAYOUTS[layout]
    saved, folder = tmp_path / "checkpoints", tmp_path / "old"
    folder.mkdir()
    model = [*LLAMA, "--train-iters", "4", *flags]
    old = Checkout(folder).adapted(nproc, *model, *FEATURES, "--save", str(saved), "--save-interval", "2").ended_well()
    assert list(old.steps) == [1, 2, 3, 4]
    resume_at(saved, 2)
    new = Checkout(tmp_path, root)
    run = new.adapted(nproc, *model, *FEATURES, "--load", str(saved)).ended_well()
    stock = new.stock(nproc, *model, "--load", str(saved)).ended_well()
    assert list(run.steps) == list(stock.steps) == [3, 4]
    assert run.losses == pytest.approx(stock.losses, rel=5e-6)
    assert [float(norm) for _, norm in run.steps.values()] == pytest.approx(
        [float(norm) for _, norm in stock.steps.values()], abs=1.1e-3
    )
    assert run.losses[0] < old.losses[0] - 0.05, "the weights are those of the checkpoint"
    assert run.report["problems"] == []


def test_a_checkpoint_that_only_newer_releases_read_is_refused_with_its_format(tmp_path: Path) -> None:
    root, saved, folder = newest(), tmp_path / "checkpoints", tmp_path / "new"
    folder.mkdir()
    model = [*LLAMA, "--train-iters", "2", *FEATURES]
    Checkout(folder, root).adapted(1, *model, "--save", str(saved), "--save-interval", "2").ended_well()
    refused = Checkout(tmp_path).adapted(1, *model, "--load", str(saved))
    assert refused.status != 0
    assert (
        "MS602 the checkpoint uses the torch_dist format of megatron-core 0.19 and newer, without common.pt, "
        "which megatron-core "
    ) in refused.log
    assert "fix: resume it with megatron-core 0.19 or newer, which reads both formats" in refused.log
