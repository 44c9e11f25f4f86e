"""Megatron-LM's `torch` checkpoints with gloo-free-checkpoint: those with gloo, and resumed by either run."""

from shlex import split

import pytest
import torch

from tests.features.gloo_free_checkpoint.jobs import assert_same
from tests.megatron_lm.checkout import LLAMA

JOB = [*LLAMA, *split("--train-iters 4 --ckpt-format torch --use-distributed-optimizer")]
FREE = split("--features gloo-free-checkpoint --set")
SLICE = "gloo-free-checkpoint.slice"
MADE = "made a group with backend gloo"
RECORDER = f"""
import torch
made = torch.distributed.new_group

def recorded(*args, **kwargs):
    if kwargs.get("backend") == "gloo":
        print("{MADE}:", kwargs.get("group_desc"), flush=True)
    return made(*args, **kwargs)

torch.distributed.new_group = recorded
"""


@pytest.fixture
def recording(checkout, monkeypatch):
    """The checkout, whose script prints every group that is made with gloo by name."""
    script = checkout.script_with_line().read_text().replace("\nimport torch\n", RECORDER, 1)
    target = checkout.folder / "recording.py"
    target.write_text(script)
    monkeypatch.setattr(checkout, "script_with_line", lambda: target)
    return checkout


@pytest.mark.long
def test_a_run_without_gloo_writes_the_files_of_gloo_and_either_run_resumes_the_other(recording):
    folders = {name: recording.folder / name for name in ("gloo", "free")}
    whole = recording.adapted(4, *JOB, "--save", str(folders["gloo"]), "--save-interval", "2").ended_well()
    assert MADE in whole.log
    saving = [*FREE, f"{SLICE}=1000", "--save", str(folders["free"]), "--save-interval", "2", "--exit-interval", "2"]
    saved = recording.adapted(4, *JOB, *saving).ended_well()
    assert MADE not in saved.log
    assert saved.steps == {step: whole.steps[step] for step in (1, 2)}

    files = {name: sorted((folder / "iter_0000002").rglob("*.pt")) for name, folder in folders.items()}
    names = {name: [str(file.relative_to(folders[name])) for file in found] for name, found in files.items()}
    assert names["free"] == names["gloo"]
    assert any(name.endswith("distrib_optim.pt") for name in names["gloo"])
    for one, other in zip(files["gloo"], files["free"], strict=True):
        assert_same(torch.load(one, weights_only=False), torch.load(other, weights_only=False))

    (folders["gloo"] / "latest_checkpointed_iteration.txt").write_text("2")
    with_gloo = recording.adapted(4, *JOB, "--load", str(folders["free"])).ended_well()
    without = recording.adapted(4, *JOB, *FREE, f"{SLICE}=1000000", "--load", str(folders["gloo"])).ended_well()
    assert MADE not in without.log
    assert with_gloo.steps == without.steps
    assert with_gloo.steps[3] == whole.steps[3]
