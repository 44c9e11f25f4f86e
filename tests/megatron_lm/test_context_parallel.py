"""Megatron-LM's pretrain_gpt.py with every sequence spread over ranks, against stock in one process that has it whole."""

import re
from shlex import split

import pytest

from tests.megatron_lm.checkout import Checkout

pytestmark = pytest.mark.long

PER_TOKEN = "--calculate-per-token-loss"
EOD = "--eod-mask-loss"
ALGORITHMS = {
    "ring-attention": (2, []),
    "ulysses-attention": (2, []),
    "kv-allgather-cp": (2, []),
    "adaptive-cp": (2, []),
    "auto": (2, split("--set context-parallel.algorithm=auto")),
    "ring-attention of 4": (4, []),
    "double ring of 4": (4, split("--set ring-attention.window=2")),
    "ulysses-attention of 4": (4, []),
    "kv-allgather-cp of 4": (4, []),
    "adaptive-cp of 4": (4, []),
    "auto of 4": (4, split("--set context-parallel.algorithm=auto")),
    "hybrid-attention of 4": (4, split("--set hybrid-attention.ulysses_degree=2")),
}
PARITY = "tests/features/context_parallel/test_parity.py has every algorithm"
OF_FOUR = pytest.mark.exhaustive(f"{PARITY} on four ranks")
OTHERS_OF_FOUR = ("ring-attention of 4", "ulysses-attention of 4", "kv-allgather-cp of 4", "adaptive-cp of 4")
LATENT = pytest.mark.exhaustive(f"{PARITY} with latent attention")


def flags_of(name: str) -> tuple[int, list[str]]:
    """The number of processes, and the flags."""
    nproc, more = ALGORITHMS[name]
    feature = {"double": "ring-attention", "auto": "context-parallel"}.get(first := name.partition(" ")[0], first)
    return nproc, ["--context-parallel-size", str(nproc), "--features", feature, *more]


def assert_alike(run, alone, count=4):
    """Losses to 1e-5, and gradient norms as far as they are printed."""
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    norms = [[float(norm) for _, norm in one.steps.values()] for one in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], abs=1.1e-3)
    assert len(set(run.losses)) == count, "the weights change"
    assert run.report["problems"] == []


@pytest.mark.cover(1, because="the mask of the loss does not know of the algorithm")
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "eod-mask-loss"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_FOUR) if name in OTHERS_OF_FOUR else name for name in ALGORITHMS])
def test_every_algorithm_trains_as_one_process_does(warm, initial, stock, name, masked):
    eod = [EOD] if masked else []
    nproc, flags = flags_of(name)
    run = warm.adapted(nproc, *initial("llama"), "--train-iters", "4", *flags, *eod).ended_well()
    assert_alike(run, stock("llama", *eod))
    reached = {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}
    assert reached >= {"context-parallel", flags[3]}


@pytest.mark.parametrize("model", ["llama", "further"])
def test_a_loss_per_token_is_that_of_one_process(warm, initial, stock, model):
    told = [PER_TOKEN, EOD]
    run = warm.adapted(2, *initial(model), "--train-iters", "4", *flags_of("ring-attention")[1], *told).ended_well()
    assert_alike(run, stock(model, *told))


def test_the_end_of_a_document_does_not_count_in_the_loss(stock):
    assert stock("llama").losses != pytest.approx(stock("llama", EOD).losses, rel=1e-5)


@pytest.mark.parametrize("name", ["ring-attention", "ulysses-attention", "hybrid-attention of 4"])
def test_learned_positions_go_with_their_tokens(warm, initial, stock, name):
    nproc, flags = flags_of(name)
    run = warm.adapted(nproc, *initial("gpt"), "--train-iters", "4", *flags).ended_well()
    assert_alike(run, stock("gpt"))


@pytest.mark.parametrize(
    "name",
    [
        "ring-attention",
        *(pytest.param(name, marks=LATENT) for name in ("ulysses-attention", "kv-allgather-cp", "adaptive-cp")),
        "hybrid-attention of 4",
    ],
)
def test_multi_latent_attention_does_it(warm, initial, stock, name):
    nproc, flags = flags_of(name)
    run = warm.adapted(nproc, *initial("latent"), "--train-iters", "4", *flags).ended_well()
    assert_alike(run, stock("latent"))


@pytest.mark.cover(1, because="tests/features/context_parallel/test_parity.py has every algorithm beside every layout")
@pytest.mark.parametrize("name", ["ring-attention", "ulysses-attention"])
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
    ids=["tp2", "pp2", "dp2"],
)
def test_shares_go_beside_other_layouts(warm, initial, stock, name, layout):
    _, flags = flags_of(name)
    run = warm.adapted(4, *initial("llama"), "--train-iters", "4", *flags, *split(layout), EOD).ended_well()
    assert_alike(run, stock("llama", EOD))


def test_ulysses_takes_a_length_that_a_zigzag_does_not(warm, initial, stock):
    """Megatron-LM itself asks for a multiple of 2 x cp, whatever the algorithm."""
    length = ["--seq-length", "30"]
    _, flags = flags_of("ulysses-attention")
    run = warm.adapted(2, *initial("llama"), "--train-iters", "4", *flags, *length).ended_well()
    assert_alike(run, stock("llama", *length))


def test_no_mask_of_the_square_of_the_length_is_made(warm, initial):
    _, flags = flags_of("ring-attention")
    run = warm.adapted(2, *initial("llama"), "--train-iters", "1", *flags).ended_well()
    assert re.search(r"create_attention_mask_in_dataloader \.+ False", run.log)


def test_further_tokens_are_predicted_across_the_borders_of_a_zigzag(warm, initial, stock):
    _, flags = flags_of("ring-attention")
    run = warm.adapted(2, *initial("further"), "--train-iters", "4", *flags).ended_well()
    assert_alike(run, stock("further"))


def test_further_tokens_elsewhere_are_refused_before_anything_starts(checkout: Checkout):
    run = checkout.launched(2, [], *flags_of("ulysses-attention")[1], "--mtp-num-layers", "1", "--train-iters", "1")
    assert run.status == 1
    sentence = "multi-token prediction expects tokens in Megatron's zig-zag order, which ulysses-attention does not use"
    assert f"MS304 ulysses-attention: {sentence}\n" in run.log
    assert "fix: use a context-parallel feature with ring attention or all-gather (mindspeed features list " in run.log
