"""Megatron-LM's pretrain_gpt.py as it is, under ``mindspeed run``, and what stops it before or after its first step."""

from shlex import split

import pytest

from tests.megatron_lm.checkout import CPU

TP_PP = split("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-activations")


@pytest.mark.long
def test_without_a_line_in_the_script_it_trains_as_one_stock_process_does(checkout, initial, stock):
    flags = [*initial("llama"), *TP_PP, "--train-iters", "4", "--features", "swiglu"]
    run = checkout.launched(4, ["--features", "rms-norm", "--set", "pipeline-parallel.size=2"], *flags).ended_well()
    assert run.losses == pytest.approx(stock("llama").losses, rel=1e-5)
    reached = {one["name"] for one in run.report["features"] if any(p["state"].startswith("reached") for p in one["points"])}
    by_level = {"flash-attention", "matmul-add", "rotary-embedding"}  # where their operators are built
    assert reached - by_level == {"rms-norm", "swiglu", "tensor-parallel", "pipeline-parallel", "recompute"}
    assert run.log.count("features active, ") == 1


@pytest.mark.long
def test_what_a_feature_sets_reaches_megatrons_arguments_and_is_printed_by_it(checkout, initial):
    flags = [*initial("llama"), "--train-iters", "1", "--features", "recompute", "--set", "recompute.granularity=selective"]
    flags += ["--without", "matmul-add"]
    log = checkout.adapted(1, *flags).ended_well().log
    printed = dict(line.split(" .", 1) for line in map(str.strip, log.splitlines()) if " .." in line)
    ends = {
        name: printed[name].rsplit(" ", 1)[1] for name in ("recompute_granularity", "distributed_backend", "transformer_impl")
    }
    assert ends == {"recompute_granularity": "selective", "distributed_backend": "gloo", "transformer_impl": "local"}
    assert printed["gradient_accumulation_fusion"].endswith(" False")


@pytest.mark.long
def test_flags_that_say_what_the_platform_says_are_no_contradiction(checkout, initial):
    assert checkout.adapted(1, *initial("llama"), *CPU, "--train-iters", "1").ended_well().steps


@pytest.mark.long
def test_a_plan_that_another_file_contradicts_stops_before_the_model_is_built(checkout, initial):
    flags = [*initial("llama"), "--train-iters", "1", "--use-checkpoint-args"]
    (checkout.folder / "job.yaml").write_text("world: {ffn_hidden_size: 128}\n")
    without_size = [flag for flag in flags if flag not in ("--ffn-hidden-size", "96")]
    run = checkout.adapted(1, *without_size, "--mindspeed-config", "job.yaml")
    assert run.status != 0
    assert "MS306 the plan was made for ffn_hidden_size=128, but Megatron's argument ffn_hidden_size gives 96\n" in run.log
    assert "Traceback" not in run.log.partition("torch/distributed/elastic")[0]
    assert "building GPT model" not in run.log
