"""The plan's arguments in Megatron-LM's parsed ones: what a stub of its parser and `put_arguments` make of them."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride
from mindspeed.job.megatron_arguments import put_launch_order, world_of
from mindspeed.megatron import training_hook_wrappers
from mindspeed.megatron.parsed_arguments import problems_of_job
from mindspeed.megatron.training_hook_wrappers import (
    put_arguments,
    put_platform_values,
    validate_args,
    validate_args_for_platform,
)
from mindspeed.megatron_lm.given_arguments import compared_arguments
from mindspeed.plugins import ArgOverride, MindSpeedError, World
from mindspeed.registry import catalog
from tests.megatron_lm import stub
from tests.megatron_lm.checkout import ROOT

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 "
    "--transformer-impl local"
)


def differences(session, args):
    """Return what the validated arguments have otherwise than the plan."""
    return problems_of_job(world_of(vars(args)), session.plan, session.manager.features)


def active(world=None, **overrides):
    planned = [
        PlannedOverride(("some-feature",), ArgOverride(name, value, "it needs that")) for name, value in overrides.items()
    ]
    plan = ActivationPlan((), World(world or {}), overrides=tuple(planned), environment={"megatron": "0.16.1"})
    return SimpleNamespace(plan=plan, proof=SimpleNamespace(taken={}), manager=SimpleNamespace(features=()))


def parsed(**values):
    """Arguments as the parser leaves them: every default, and these values."""
    return Namespace(**{name: rows[0].default for name, rows in surface("0.16.1").by_dest.items()} | values)


def test_the_plans_values_go_where_megatron_lm_takes_them_under_its_own_names():
    args = parsed(swiglu=True, num_layers=4)
    session = active(
        sequence_parallel=True,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        grad_reduce_in_fp32=True,
        virtual_pipeline_model_parallel_size=2,
        recompute_modules=("mlp",),
        batch_p2p_comm=False,
    )
    put_arguments(session, args)
    assert (args.sequence_parallel, args.no_persist_layer_norm, args.accumulate_allreduce_grads_in_fp32) == (True, True, True)
    assert (args.bias_swiglu_fusion, args.num_virtual_stages_per_pipeline_rank, args.recompute_modules) == (True, 2, ["mlp"])
    assert "batch_p2p_comm" not in session.proof.taken
    assert session.proof.taken["sequence_parallel"] == {"Megatron-LM": False}


def test_an_argument_that_the_plan_sets_contradicts_no_field_of_it():
    args = parsed(moe_token_dispatcher_type="alltoall")
    (problem,) = differences(active({"dispatcher": "allgather"}), args)
    assert "the plan was made for dispatcher=allgather" in problem.message
    assert differences(active({"dispatcher": "allgather"}, moe_token_dispatcher_type="alltoall"), args) == []


@pytest.mark.parametrize(
    ("platform", "fsdp", "environment", "expected"),
    [
        ("cpu", False, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("cpu", False, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        ("cpu", True, {}, {}),
        ("cuda", False, {}, {}),
    ],
)
def test_the_variable_that_megatron_demands_is_set_where_it_has_no_meaning(platform, fsdp, environment, expected):
    put_launch_order(platform, {"use_torch_fsdp2": fsdp}, environment)
    assert environment == expected


def test_the_platform_alone_sets_the_variable_that_megatron_demands(monkeypatch):
    session = active({"platform": "cpu"})
    session.manager = SimpleNamespace(call=lambda hook: [])
    monkeypatch.setattr(training_hook_wrappers.session, "current", lambda: session)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # so that it is as before when the test is over
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    seen = validate_args_for_platform(lambda args: os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    assert seen(parsed()) == "1"


def test_an_argument_that_another_feature_sets_is_left_to_it_by_the_platform(monkeypatch):
    session = active(transformer_impl="transformer_engine")
    session.plan = replace(session.plan, base=(SimpleNamespace(name="cpu-platform"),))
    values = {"transformer_impl": "local", "distributed_backend": "gloo"}
    overrides = [ArgOverride(name, value, "it needs that") for name, value in values.items()]
    session.manager = SimpleNamespace(call=lambda hook: [("cpu-platform", overrides)])
    monkeypatch.setattr(training_hook_wrappers.session, "current", lambda: session)
    args = parsed()
    put_platform_values(args)
    assert (args.transformer_impl, args.distributed_backend) == ("transformer_engine", "gloo")


@pytest.mark.parametrize("argument", ["fp8", "fp4", "layernorm_zero_centered_gamma"])
def test_an_argument_of_a_file_that_local_layers_do_not_support_is_a_problem(monkeypatch, argument):
    monkeypatch.setattr(training_hook_wrappers.session, "current", lambda: active())
    validate = validate_args(lambda args: args)
    with pytest.raises(MindSpeedError) as caught:
        validate(parsed(transformer_impl="local", **{argument: "hybrid"}))
    assert [problem.code for problem in caught.value.problems] == ["MS605"]
    assert caught.value.problems[0].where == f"Megatron's argument {argument}"


def test_chunks_that_are_given_by_their_layers_stay_so():
    args = parsed(num_layers_per_virtual_pipeline_stage=1)
    put_arguments(active(virtual_pipeline_model_parallel_size=2), args)
    assert args.num_virtual_stages_per_pipeline_rank is None


def test_an_argument_that_a_file_set_otherwise_is_a_problem():
    args = parsed(recompute_granularity="full", distributed_backend="nccl")
    with pytest.raises(MindSpeedError) as caught:
        put_arguments(active(recompute_granularity="selective", distributed_backend="gloo"), args)
    assert str(caught.value) == (
        "MS605 Megatron's argument recompute_granularity sets 'full', but some-feature needs the value 'selective': it "
        "needs that\n"
        "  where: Megatron's argument recompute_granularity\n"
        "  fix: change the value where Megatron reads it, or remove some-feature"
    )
    assert args.distributed_backend == "gloo"


def test_a_size_that_megatron_makes_another_one_is_a_problem():
    args = parsed(num_layers=8, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=2, bf16=True)
    assert differences(active({"num_layers": 8, "tp": 2, "dtype": "bf16", "num_query_groups": 4}), args) == []
    found = differences(active({"num_layers": 4, "tp": 2, "dtype": "fp32", "vpp": 2}), args)
    assert [problem.message for problem in found] == [
        "the plan was made for vpp=2, but Megatron's argument num_virtual_stages_per_pipeline_rank gives 1",
        "the plan was made for num_layers=4, but Megatron's argument num_layers gives 8",
        "the plan was made for dtype=fp32, but Megatron's argument bf16 gives bf16",
    ]
    assert found[1].fix_text == (
        "give --num-layers on the command line, because mindspeed does not read values that a script sets, or change "
        "num_layers in the plan"
    )


@pytest.mark.parametrize("count", ["--n-shared-experts 2", "--set moe-shared-experts.count=2 --features moe-shared-experts"])
def test_a_size_that_a_feature_makes_of_others_is_no_difference(plan, count):
    line = "--num-experts 4 --moe-ffn-hidden-size 96 --disable-bias-linear --transformer-impl local"
    planned = plan(f"{SHAPE} {line} {count}")
    assert planned.world.shared_expert_hidden_size == 192
    features = [catalog().feature(feature.name) for feature in planned.features]
    made = [of(of.Args(**feature.args), planned.world) for of, feature in zip(features, planned.features, strict=True)]
    session = SimpleNamespace(plan=planned, manager=SimpleNamespace(features=made))
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "micro_batch_size": 1}
    sizes |= {"global_batch_size": 4, "num_experts": 4, "add_bias_linear": False, "transformer_impl": "local"}
    args = parsed(**sizes, moe_ffn_hidden_size=96)
    assert differences(session, args) == []
    args.moe_ffn_hidden_size = 48
    assert [problem.message for problem in differences(session, args)] == [
        "the plan was made for moe_ffn_hidden_size=96, but Megatron's argument moe_ffn_hidden_size gives 48",
        (
            "the plan was made for shared_expert_hidden_size=192, but Megatron's argument "
            "moe_shared_expert_intermediate_size gives 96"
        ),
    ]


def test_sizes_that_follow_from_others_follow_as_in_megatron():
    llama = world_of({"hidden_size": 1024, "swiglu": True, "num_attention_heads": 8, "num_query_groups": 1})
    assert (llama["ffn_hidden_size"][0], llama["num_query_groups"][0]) == (2688, 8)
    assert world_of({"pipeline_model_parallel_layout": "Et|L"})["vpp"][0] == 2
    layout = {"pipeline_model_parallel_layout": "Ettt|(tt|)*2,tL", "pipeline_model_parallel_size": 2}
    assert world_of(layout)["vpp"][0] == 2
    apart = [world_of({"pipeline_model_parallel_layout": text})["mtp_standalone"][0] for text in ("Et|(t|)*2m|L", "Et|mL")]
    assert apart == [True, False]
    assert (
        world_of({"num_layers": 8, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2})["vpp"][0]
        == 2
    )


@pytest.fixture
def run(tmp_path):
    """Run the script of the stub: ``run(flags)`` with the line in it, ``run(flags, under=[...])`` under a launcher."""
    root = stub.build(tmp_path)
    names = ["tensor_model_parallel_size", "sequence_parallel", "recompute_granularity", "transformer_impl", "my_own_flag"]

    def start(flags, line="first", under=None, **environment):
        path = stub.script(root, names, line)
        command = [sys.executable, *(["-m", "mindspeed", "run", *under, "--"] if under is not None else []), str(path)]
        search = {"PYTHONPATH": str(ROOT), "MINDSPEED_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "MINDSPEED_OPS": "reference"}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MINDSPEED_", "MEGATRON_"))}
        done = subprocess.run(
            [*command, *SHAPE.split(), *flags.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**inherited, **search, **environment},
        )
        printed = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ARGS ", "ARGV ")))
        return done, {name: json.loads(text) for name, text in printed.items()}

    return start


@pytest.mark.parametrize("line", ["last", pytest.param("first", marks=pytest.mark.long)])
@pytest.mark.guards(28, processes=True)
def test_the_one_line_works_before_and_after_megatrons_imports(run, line, tmp_path):
    flags = "--features recompute --recompute-granularity selective --my-own-flag mine --save checkpoints"
    done, printed = run(flags, line)
    assert done.returncode == 0, done.stderr
    assert printed["ARGS"] == {
        "my_own_flag": "mine",
        "recompute_granularity": "selective",
        "sequence_parallel": False,
        "tensor_model_parallel_size": 1,
        "transformer_impl": "local",
    }
    assert "--features" not in printed["ARGV"]
    assert len([text for text in done.stderr.splitlines() if text.startswith("mindspeed: recompute; ")]) == 1
    report = json.loads((tmp_path / "checkpoints" / "mindspeed-report.json").read_text())
    assert [feature["name"] for feature in report["features"]] == ["recompute"]


@pytest.mark.long
@pytest.mark.guards(8, processes=True)
def test_a_feature_that_only_mindspeed_was_told_reaches_megatrons_arguments(run):
    done, printed = run("--set recompute.granularity=selective", under=["--features", "recompute"], line="")
    assert done.returncode == 0, done.stderr
    assert printed["ARGS"]["recompute_granularity"] == "selective"
    assert printed["ARGV"] == SHAPE.split()


@pytest.mark.long
def test_under_mindspeed_run_the_line_does_nothing_again(run):
    done, printed = run("--recompute-activations", under=["--features", "recompute"])
    assert done.returncode == 0, done.stderr
    assert printed["ARGV"] == [*SHAPE.split(), "--recompute-activations"]
    assert done.stderr.count("sites patched") == 1, "the line of mindspeed run"


@pytest.mark.long
@pytest.mark.guards(8, processes=True)
def test_a_megatron_that_parses_and_validates_in_one_function_gets_the_same(run, tmp_path):
    training = tmp_path / "megatron" / "training"
    (training / "arguments.py").write_text(stub.LATER_ARGUMENTS)
    (training / "initialize.py").write_text(stub.LATER_INITIALIZE)
    done, printed = run("--features recompute --my-own-flag mine")
    assert done.returncode == 0, done.stderr
    assert (printed["ARGS"]["recompute_granularity"], printed["ARGS"]["my_own_flag"]) == ("selective", "mine")


def test_problems_are_shown_as_problems_and_not_as_a_traceback(run):
    done, printed = run("--features swigl --tensor-model-parallel-size 2 --set tensor-parallel.size=4")
    assert (done.returncode, printed) == (1, {})
    assert done.stderr == (
        "MS303 Megatron's --tensor-model-parallel-size is 2, but --set tensor-parallel.size=4 sets another value\n"
        "  where: command line\n"
        "  fix: keep one of the two; both set the same value\n"
    )


@pytest.mark.long
def test_without_a_feature_no_report_is_left_behind(run, tmp_path):
    done, _ = run("--my-own-flag mine")
    assert done.returncode == 0, done.stderr
    assert "mindspeed: no features; " in done.stderr
    assert not (tmp_path / "mindspeed-report.json").exists()


@pytest.mark.long
def test_megatrons_parser_reports_what_neither_side_knows(run):
    done, _ = run("--feature swiglu")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "pretrain: error: unrecognized arguments: --feature swiglu"


@pytest.mark.long
def test_the_platforms_values_reach_whoever_parses_megatron_lms_arguments(tmp_path):
    """A process without a command line of Megatron-LM, as pytest is: its plan is the platform alone."""
    root = stub.build(tmp_path)
    code = (
        "import sys, mindspeed; mindspeed.activate(mindspeed.plan(platform='cpu'))\n"
        "sys.argv[1:] = ['--position-embedding-type', 'rope']\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "args = parse_args()\n"
        "print(args.apply_rope_fusion, args.no_persist_layer_norm, args.distributed_backend, args.transformer_impl)\n"
        "args.apply_rope_fusion, args.distributed_backend = True, 'nccl'\n"
        "args = validate_args(args)\n"
        "print(args.apply_rope_fusion, args.distributed_backend)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["False True gloo local", "False gloo"], done.stderr


def test_arguments_that_ranks_compare_have_no_paths_but_the_content_of_the_data(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_bytes(b"content")
    words = ["--lr", "0.001", "--save", "/checkpoints", "--local-rank", "3", "--own", "5"]
    words += ["--data-path", "0.3", str(tmp_path / "text")]
    facts = compared_arguments(words, "0.16.1")
    assert facts["option lr"] == "0.001"
    assert facts["data 1"].startswith("7 bytes, ")
    assert facts["option others"] == "--own 5"
    assert facts.keys() == {"option lr", "data 1", "option others"}
