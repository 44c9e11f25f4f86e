"""Megatron-LM's pretrain_gpt.py with each feature of pipelines: one stock process's losses, and a checkpoint for any layout."""

from shlex import split

import pytest

from tests.megatron_lm.checkout import LLAMA, LOCAL

PP = split("--pipeline-model-parallel-size 2")
VPP = [*PP, *split("--num-virtual-stages-per-pipeline-rank 2")]
TP = split("--tensor-model-parallel-size 2")

FEATURES = {
    "nano-pipe": (2, VPP, "nano-pipe.swap=true"),
    "zero-bubble": (2, VPP, "zero-bubble.costs=measured"),
    "zero-bubble-v": (2, VPP, "zero-bubble.placement=v"),
    "zero-bubble-later": (2, PP, "zero-bubble.post_validation=true"),
    "zero-bubble-v-tp": (4, [*VPP, *TP], "zero-bubble.placement=v"),
    "recompute-in-advance": (2, PP, "recompute-in-advance.granularity=selective"),
    "recompute-in-bubble": (2, VPP, "recompute-in-bubble.limit=2"),
    "noop-layers": (2, PP, "noop-layers.layers=0,5"),
    "dynamic-shapes": (2, PP, ""),
    "nano-pipe-tp": (4, [*VPP, *TP], "nano-pipe.output_layer=true"),
    "zero-bubble-tp": (4, [*PP, *TP], "zero-bubble.recompute=all"),
    "recompute-in-advance-tp": (4, [*VPP, *TP], ""),
    "recompute-in-bubble-tp": (4, [*PP, *TP], "recompute-in-bubble.limit=1"),
    "noop-layers-tp": (4, [*PP, *TP], "noop-layers.layers=0,5"),
    "dynamic-shapes-tp": (4, [*PP, *TP], ""),
}

NAMES = ("nano-pipe", "zero-bubble", "recompute-in-advance", "recompute-in-bubble", "noop-layers", "dynamic-shapes")
TENSOR = pytest.mark.exhaustive("tests/features/*/test_parity.py has each of them beside tensor ranks")


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, marks=TENSOR) if case.endswith("-tp") else case for case in FEATURES])
@pytest.mark.guards(48, processes=True)
def test_a_pipeline_trains_as_one_stock_process_and_another_layout_resumes_it(warm, initial, stock, case):
    nproc, layout, setting = FEATURES[case]
    name = next(name for name in NAMES if case.startswith(name))
    folder = warm.folder / "checkpoints"
    asked = ["--features", name, *(["--set", setting] if setting else [])]
    saving = split(f"--train-iters 4 --save {folder} --save-interval 2")
    run = warm.adapted(nproc, *initial("llama"), *layout, *asked, *saving).ended_well()
    assert run.losses == pytest.approx(stock("llama").losses, rel=1e-5)
    assert run.report["problems"] == []
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    rest = warm.adapted(1, *LLAMA, *LOCAL, *split(f"--train-iters 4 --load {folder}")).ended_well()
    assert list(rest.steps) == [3, 4]
    assert float(rest.steps[3][0]) == pytest.approx(run.losses[2], rel=1e-5)
