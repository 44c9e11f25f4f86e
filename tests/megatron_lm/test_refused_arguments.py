"""Arguments of Megatron-LM that a feature cannot run with are refused where the command line is planned."""

from dataclasses import replace

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.features.transformer_engine_layers.interface import UNSUPPORTED
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.problems import ResolutionError

SHAPE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 "
    "--transformer-impl local"
)
PIPELINE = f"{SHAPE} --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
V = "--num-virtual-stages-per-pipeline-rank 2 --features zero-bubble --set zero-bubble.placement=v"
UNEVEN = "placement=v needs the same number of layers in every stage or a layout of the stages, but the job"

LISTS, AHEAD = ("nano-pipe", "zero-bubble"), ("recompute-in-advance", "recompute-in-bubble")
PARTS = ("norm-recompute", "activation-recompute", "swap-attention")
REFUSED = [
    ((*LISTS, *AHEAD, *PARTS), "--cuda-graph-impl local", "layers are captured as CUDA graphs, which {name} does not support"),
    ((*LISTS, *AHEAD, *PARTS), "--fp8-format hybrid", "linear layers compute in fp8 or fp4, which {name} does not support"),
    (
        (*LISTS, *AHEAD, *PARTS),
        "--overlap-moe-expert-parallel-comm",
        "Megatron overlaps expert all-to-alls with computation of another micro-batch (overlap_moe_expert_parallel_comm), "
        "which {name} does not support",
    ),
    (
        (*LISTS, *AHEAD, *PARTS),
        "--fine-grained-activation-offloading",
        "Megatron offloads activations of single modules to host memory, which {name} does not support",
    ),
    *(
        (
            (*LISTS, *AHEAD, *PARTS),
            argument,
            "parameters are fully sharded over data-parallel ranks (FSDP), which {name} does not support",
        )
        for argument in ("--use-megatron-fsdp", "--use-torch-fsdp2")
    ),
    (
        LISTS,
        "--use-ring-exchange-p2p",
        "stages send and receive at the same time (ring exchange), but {name} orders messages one by one",
    ),
    (
        LISTS,
        "--defer-embedding-wgrad-compute",
        "Megatron's schedule defers the weight gradient of the output layer (defer_embedding_wgrad_compute), but {name} "
        "replaces this schedule",
    ),
]


REFUSED_ON_CPU = {
    "--defer-embedding-wgrad-compute": (
        "MS304 cpu-platform: Megatron defers the weight gradient of the output layer (defer_embedding_wgrad_compute) only with "
        "gradient_accumulation_fusion, whose kernel needs CUDA | remove --defer-embedding-wgrad-compute",
    )
}
"""Problems of an argument on the CPU, with every feature and without."""


def refusals(plan, line):
    """``"CODE message | fix"`` of every problem of a command line for two processes."""
    try:
        plan(line, 2)
    except ResolutionError as error:
        return [f"{one.code} {one.message} | {error.words(one.fix)}" for one in error.problems]
    return []


@pytest.mark.parametrize(("names", "argument", "text"), REFUSED)
def test_an_argument_that_features_cannot_run_with_is_refused_with_its_name(plan, names, argument, text):
    for name in names:
        assert refusals(plan, f"{PIPELINE} {argument} --features {name}") == [
            *REFUSED_ON_CPU.get(argument, ()),
            f"MS304 {name}: {text.format(name=name)} | remove {argument.split()[0]}, or remove {name}",
        ]


def test_offloading_by_megatron_is_refused_beside_pipeline_stages(plan):
    assert refusals(plan, f"{PIPELINE} --cpu-offloading-num-layers 1") == [
        "MS304 cpu-platform: the offloading of activations needs Transformer Engine, which is not installed "
        "| remove --cpu-offloading-num-layers",
        "MS304 pipeline-parallel: Megatron offloads activations to host memory, which pipeline-parallel does not support "
        "| remove --cpu-offloading-num-layers, or --pipeline-model-parallel-size 1",
    ]


def test_layers_of_transformer_engine_are_refused_where_it_is_installed(plan):
    def plan_on_cuda(line, world_size):
        return plan_training(line.split(), {}, replace(made_up("cuda", "0.16.1"), world_size=world_size))[1]

    for name in (*LISTS, *PARTS):
        line = f"{PIPELINE.replace('impl local', 'impl transformer_engine')} --features {name}"
        assert refusals(plan_on_cuda, line) == [
            (
                f"MS304 {name}: layers are Transformer Engine's, but {name} supports only Megatron's local layers | "
                f"--transformer-impl local, or remove {name}"
            )
        ]
        assert len(refusals(plan, line)) == (name == "norm-recompute")


def test_options_that_only_a_real_transformer_engine_has_are_refused_before_the_start(plan):
    arguments = {dest: group[0] for dest, group in surface_or_nearest("0.16.1").by_dest.items() if group[0].options}
    words = {"symmetric_ar_type": " one_shot"}
    named = [arguments[name].options[0] + words.get(name, "") for name in UNSUPPORTED.keys() & arguments.keys() - {"fp4"}]
    assert {"--init-model-with-meta-device", "--symmetric-ar-type one_shot"} <= {*named}
    for option in named:
        (text,) = refusals(plan, f"{SHAPE.replace('impl local', 'impl transformer_engine')} {option}")
        assert text.startswith("MS304 transformer-engine-layers: ")
        assert text.endswith(f"replacements in transformer-engine-layers | remove {option.split()[0]}")


def test_features_that_need_norms_of_their_own_say_so(plan):
    line = PIPELINE.replace("impl local", "impl transformer_engine")
    assert refusals(plan, f"{line} --features norm-recompute") == [
        (
            "MS304 norm-recompute: norms are fused into the linear layers that follow them, but norm-recompute recomputes "
            "separate norms | --transformer-impl local, or remove norm-recompute"
        )
    ]
    asked = "--set swap-attention.modules=['core_attention','linear_qkv','linear_proj']"
    assert refusals(plan, f"{line} --features swap-attention {asked}") == [
        (
            "MS304 swap-attention: linear_qkv includes the norm, so its input cannot be offloaded: the residual "
            "connection needs it too | --set "
            "'swap-attention.modules=[core_attention,linear_proj]' (without linear_qkv), or --transformer-impl local"
        )
    ]
    assert refusals(plan, f"{line} --features swap-attention") == []


def test_recomputation_goes_on_where_other_passes_have_another_order(plan):
    for name in AHEAD:
        assert refusals(plan, f"{PIPELINE} --use-ring-exchange-p2p --features {name}") == []


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--decoder-first-pipeline-num-layers 2", "gives the first stage 2 layers"),
        ("--decoder-last-pipeline-num-layers 2", "gives the last stage 2 layers"),
        (
            "--num-layers 10 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "counts the embedding as a layer and counts the output layer as a layer",
        ),
    ],
)
def test_a_v_refuses_arguments_with_uneven_stages_and_a_loop_does_not(plan, argument, text):
    line = f"{PIPELINE} {argument} {V}"
    assert refusals(plan, line.removesuffix("v") + "loop") == []
    one = f", or remove {argument.split()[0]}" if argument.startswith("--decoder") else ""
    assert refusals(plan, line) == [f"MS304 zero-bubble: {UNEVEN} {text} | --set zero-bubble.placement=loop{one}"]


def test_without_the_features_and_with_values_that_mean_nothing_no_argument_is_refused(plan):
    arguments = [argument for _, argument, _ in REFUSED if "fp8" not in argument and argument not in REFUSED_ON_CPU]
    assert refusals(plan, " ".join((PIPELINE, *arguments))) == []
    nothing = "--cpu-offloading-num-layers 0 --cuda-graph-impl none --transformer-impl local"
    for name in (*LISTS, *AHEAD, *PARTS):
        assert refusals(plan, f"{PIPELINE} {nothing} --features {name}") == []


def test_a_setting_that_an_argument_gives_is_mended_by_the_argument(plan):
    line = f"{SHAPE} --recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    assert refusals(plan, line) == [
        "MS304 recompute: mla_up_proj is part of multi-latent attention, but the model does not use it "
        "| --recompute-modules core_attn"
    ]
    assert refusals(plan, line.replace(" mla_up_proj", "")) == []
    full = f"{SHAPE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (text,) = refusals(plan, f"{full} --recompute-modules core_attn")
    assert text.endswith("| remove --recompute-modules")
    assert refusals(plan, full) == []
