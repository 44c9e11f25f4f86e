"""Megatron-LM's pretrain_gpt.py with the one import line: every layout, operator and old flag, against one stock process."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from shlex import split

import pytest

from tests.megatron_lm.checkout import SHARED, Checkout, Run
from tests.megatron_lm.conftest import MODELS

pytestmark = pytest.mark.long

TP = "--tensor-model-parallel-size 2"
TP_SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
DP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EP = "--expert-model-parallel-size 2"
RING = "--context-parallel-size 2 --features ring-attention"
BOTH = "--features rms-norm,swiglu"


@dataclass(frozen=True, slots=True)
class Row:
    """A model, processes and their flags; what stock is told too; features that are reached; what is held to how closely."""

    model: str
    nproc: int
    flags: str
    reached: str = ""
    told: str = ""
    steps: int = 4
    bound: float = 1e-5


def ten_steps(model: str, nproc: int, flags: str, told: str = "") -> Row:
    return Row(model, nproc, flags, told=told, steps=10, bound=5e-6)


LAYOUTS = {
    "one": Row("llama", 1, BOTH, "rms-norm swiglu"),
    "tp2-sp": Row("llama", 2, f"{TP_SP} {BOTH}", "tensor-parallel sequence-parallel rms-norm swiglu"),
    "pp2-vpp2": Row("llama", 2, f"{VPP} {BOTH}", "pipeline-parallel virtual-pipeline rms-norm swiglu"),
    "tp2-pp2": Row("llama", 4, f"{TP} {PP} {BOTH}", "tensor-parallel pipeline-parallel rms-norm swiglu"),
    "dp2": Row("llama", 2, f"{DP} {BOTH}", "distributed-optimizer async-ddp async-param-gather rms-norm swiglu"),
    "ep2": Row("moe", 2, f"{EP} {BOTH}", "expert-parallel rms-norm swiglu"),
    "ep2-alltoall": Row("moe", 2, f"{EP} --moe-token-dispatcher-type alltoall {BOTH}", "expert-parallel rms-norm swiglu"),
    "ten steps, one process": ten_steps("llama", 1, ""),
    "ten steps, tp2 with sequence parallelism": ten_steps("llama", 2, TP_SP),
    "ten steps, pp2": ten_steps("llama", 2, PP),
    "ten steps, ring cp2": ten_steps("llama", 2, RING),
    "ten steps, ep2": ten_steps("moe", 2, EP),
    "ten steps, dp2 with overlaps": ten_steps("llama", 2, DP),
}
GRID = "--tensor-model-parallel-size 4 --features tensor-parallel-2d --set tensor-parallel-2d.x=2 --set tensor-parallel-2d.y=2"
COC = f"{TP_SP} --features coc --set coc.parts=2"
LINEAR = {
    "coc": Row("llama", 4, COC, "coc"),
    "coc, multi-token prediction": Row("further", 4, COC, "coc"),
    "mc2": Row("llama", 4, "--tensor-model-parallel-size 4 --features mc2", "mc2"),
    "tensor-parallel-2d": Row("llama", 4, GRID, "tensor-parallel-2d"),
    "tensor-parallel-2d, multi-token prediction": Row("further", 4, GRID, "tensor-parallel-2d"),
    "old flags of a grid": Row(
        "llama",
        4,
        "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2 --enable-overlap-ag-with-matmul",
        "tensor-parallel-2d",
        told="--seq-length 256 --max-position-embeddings 256",  # eight chunks of eight tokens
    ),
}
EXPERTS = f"--tensor-model-parallel-size 1 {EP}"
SENT = "--moe-token-dispatcher-type alltoall"
FUSED = "--features grouped-matmul-add,matmul-add"
OPERATORS = {
    "matmul-add": Row("llama", 1, "--features matmul-add", "matmul-add"),
    "matmul-add, tensor ranks": Row("llama", 2, f"{TP_SP} --features matmul-add", "matmul-add"),
    "matmul-add, buckets": Row("llama", 2, "--overlap-grad-reduce --features matmul-add", "matmul-add"),
    "permuted tokens": Row("moe", 1, "--moe-permute-fusion", "moe-token-permute"),
    "permuted tokens, two ranks": Row("moe", 2, f"{EXPERTS} --moe-permute-fusion", "moe-token-permute"),
    "permuted tokens, sent": Row("moe", 2, f"{EXPERTS} {SENT} --moe-permute-fusion", "moe-token-permute"),
    "grouped experts": Row("moe", 1, f"--moe-grouped-gemm {FUSED}", "grouped-matmul-add matmul-add"),
    "grouped experts, two ranks": Row("moe", 2, f"{EXPERTS} --moe-grouped-gemm {FUSED}", "grouped-matmul-add matmul-add"),
}
GROUPED = f"{EP} --moe-grouped-gemm"
ALLTOALL = f"{GROUPED} {SENT} --moe-permutation-async-comm"
ALLGATHER = f"{GROUPED} --moe-token-dispatcher-type allgather --moe-permutation-async-comm"
OLD_FLAGS = {
    "moe-grouped-gemm": GROUPED,
    "moe-alltoall-dispatcher": ALLTOALL,
    "moe-allgather-dispatcher": ALLGATHER,
    "moe-alltoall-overlap": f"{ALLTOALL} --moe-alltoall-overlap-comm",
    "moe-allgather-overlap": f"{ALLGATHER} --moe-allgather-overlap-comm",
    "moe-zero-memory": f"{ALLTOALL} --moe-alltoall-overlap-comm --moe-zero-memory level1 --moe-zero-memory-num-layers 2",
    "moe-adaptive-recompute": f"{GROUPED} {SENT} --moe-adaptive-recompute-activation",
    "moe-tp-extend-ep": (
        f"{TP_SP} --expert-model-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall_seq "
        "--moe-permutation-async-comm --moe-tp-extend-ep"
    ),
}
ENDS = "--reset-position-ids --reset-attention-mask"
DOCUMENTS = {
    "one": (1, ""),
    "tensor": (2, TP_SP),
    "ring": (2, RING),
    "Ulysses": (2, "--context-parallel-size 2 --features ulysses-attention"),
    "stages in between": (4, "--pipeline-model-parallel-size 4"),
    "interleaved": (2, VPP),
    "tensor and stages": (4, f"{TP} {PP}"),
    "ring and stages": (4, f"{RING} {PP}"),
    "ring and recompute": (2, f"{RING} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}
ROWS = {
    **LINEAR,
    **OPERATORS,
    **{f"old flags of {name}": Row("moe", 2, flags) for name, flags in OLD_FLAGS.items()},
    **{f"documents, {name}": Row("gpt", nproc, flags, told=ENDS) for name, (nproc, flags) in DOCUMENTS.items()},
    "documents, rotary positions go on": Row("llama", 2, RING, told="--reset-attention-mask"),
}


def reached(run: Run) -> set[str]:
    return {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}


def held(checkout: Checkout, initial: Callable[[str], list[str]], stock: Callable[..., Run], row: Row) -> Run:
    """Train the row, hold its losses and gradient norms to stock's, and return the run."""
    told = split(row.told) + ([] if row.steps == 4 else split(f"--train-iters {row.steps} --lr-decay-iters {2 * row.steps}"))
    run = checkout.adapted(row.nproc, *initial(row.model), "--train-iters", "4", *split(row.flags), *told).ended_well()
    alone = stock(row.model, *told)
    assert run.losses == pytest.approx(alone.losses, rel=row.bound)
    norms = [[float(norm) for _, norm in one.steps.values()] for one in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], abs=1.1e-3), "as far as they are printed"
    assert len(set(run.losses)) == row.steps, "the weights change"
    assert reached(run) >= {*row.reached.split()}
    assert run.report["problems"] == []
    return run


@pytest.mark.cover
@pytest.mark.guards(16, 48, processes=True)
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in LAYOUTS.items()])
def test_a_layout_trains_as_one_stock_process_does_and_every_feature_is_reached(checkout, initial, stock, row):
    held(checkout, initial, stock, row)


@pytest.mark.cover(of=("row",))
@pytest.mark.parametrize(("case", "row"), [pytest.param(name, row, id=name) for name, row in ROWS.items()])
def test_it_trains_as_one_stock_process_from_the_checkpoint_of_one_process(warm, initial, stock, case, row):
    run = held(warm, initial, stock, row)
    assert not case.startswith("old flags of moe") or case.split()[-1] in {row["name"] for row in run.report["features"]}


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_documents_matter(stock, model):
    told = split(ENDS)
    assert stock(model).losses != pytest.approx(stock(model, *told).losses, rel=1e-5)


@pytest.mark.parametrize("overlap", ["", "--moe-alltoall-overlap-comm"], ids=["alone", "hiding transfers"])
def test_the_old_flags_of_shared_experts_train_as_stock(warm, initial, stock, overlap):
    given = initial("shared")
    start = given.index(SHARED[0])
    flags = [*given[:start], *given[start + len(SHARED) :], "--train-iters", "4"]
    old = f"{ALLTOALL} --n-shared-experts 1 --shared-expert-gate {overlap}"
    run = warm.adapted(2, *flags, *split(old)).ended_well()
    assert "moe-shared-experts" in {row["name"] for row in run.report["features"]}
    assert run.losses == pytest.approx(stock("shared").losses, rel=1e-5)
    assert run.report["problems"] == []


@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2-vpp2", "tp2-pp2", "dp2", "ep2"])
def test_level_0_prints_the_digits_of_the_platform_alone(warm, initial, layout):
    row = LAYOUTS[layout]
    flags = [*initial(row.model), *split(row.flags.removesuffix(BOTH)), "--train-iters", "3"]
    alone = warm.stock(row.nproc, *flags).ended_well()
    level = warm.adapted(row.nproc, *flags, "--optimization-level", "0").ended_well()
    assert level.steps == alone.steps
    assert len(level.steps) == 3
    if expected := {*row.reached.split()} - {"rms-norm", "swiglu"}:  # a plan without features writes no report in a step
        assert {one["name"] for one in level.report["features"]} >= expected


@pytest.mark.cover
@pytest.mark.parametrize("layout", ["", TP_SP, f"{PP} --bf16"], ids=["one", "tp2-sp", "pp2, bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_feature_of_level_1_acts_beside_default_layers(warm, model, layout):
    flags = [*MODELS[model], *split(layout), "--train-iters", "2"]
    run = warm.adapted(2 if layout else 1, *flags).ended_well()
    assert "transformer-engine-layers" in {one["name"] for one in run.report["features"]}
    assert run.report["problems"] == []
    assert run.losses[0] == pytest.approx(warm.stock(2 if layout else 1, *flags).ended_well().losses[0], rel=1e-2)


def test_bf16_and_evaluation_go_as_in_a_stock_process(warm, initial):
    flags = [*initial("llama"), *split("--train-iters 3 --bf16 --eval-iters 2 --eval-interval 2")]
    alone = warm.stock(1, *flags).ended_well()
    run = warm.adapted(2, *flags, *split(f"{DP} {BOTH}")).ended_well()
    assert run.losses == pytest.approx(alone.losses, rel=1e-2)
    assert evaluated(run) == pytest.approx(evaluated(alone), rel=1e-2)
    assert len(evaluated(run)) == 3, "after step 2, at the end, and on the test set"
    assert run.report["problems"] == []


def evaluated(run):
    """The losses of all evaluations, as printed."""
    return [float(loss) for loss in re.findall(r"validation loss at iteration .* lm loss value: (\S+) ", run.log)]
