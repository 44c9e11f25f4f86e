"""What a Megatron-LM command line asks for, read against the recorded arguments of Megatron-LM; nothing is imported."""

from dataclasses import replace
from shlex import split

import pytest

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.job import megatron_arguments as flags
from mindspeed.megatron_lm.argument_layers import declared_flags
from mindspeed.megatron_lm.given_arguments import given_arguments
from mindspeed.megatron_lm.training_plan import is_training_script, plan_training
from mindspeed.megatron_lm.training_request import OWN_FLAGS, read_command_line
from mindspeed.problems import ResolutionError
from tests.megatron_lm.checkout import ROOT

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 "
    "--transformer-impl local"
)


def read(line, environ=None, also=(), world_size=1):
    return read_command_line(split(line), environ or {}, "0.16.1", registry.catalog_for, also, world_size)


def problems_of(call, *arguments, **options):
    with pytest.raises(ResolutionError) as caught:
        call(*arguments, **options)
    return caught.value.problems


def notes_of(plan):
    """The notes of a plan but those on the contracts of Megatron's functions, which the stub does not keep, and on
    operators, of which it has references alone."""
    notes = [row.text for row in plan.rows if row.kind == "note" and row.feature != "megatron-hook-points"]
    return [
        text for text in notes if "has only a plain-torch reference" not in text and not text.startswith("megatron.training.")
    ]


def sources(plan, feature):
    planned = next(one for one in plan.features if one.name == feature)
    return {name: (value.value, value.source) for name, value in planned.settings.items() if value.source != "default"}


@pytest.mark.parametrize("version", recorded_releases("command_line"))
@pytest.mark.guards(8)
def test_no_flag_of_ours_is_one_of_megatrons(version):
    assert surface(version).by_option.keys().isdisjoint(OWN_FLAGS)


def test_our_flags_are_taken_out_and_all_others_stay_in_their_order():
    line = (
        "--lr 1e-3 --features a,b --set a.x=--1 --bf16 --set=b.y=2 --features=c --recompute-modules mlp moe --strict x --save p"
    )
    request = read(line + " --without d --optimization-level 1")
    assert request.rest == tuple(split("--lr 1e-3 --bf16 --recompute-modules mlp moe x --save p"))
    ours = request.command_line
    assert (ours.features, ours.without, ours.level, ours.strict) == (("a", "b", "c"), ("d",), 1, True)
    assert ours.settings == {"a": {"x": "--1"}, "b": {"y": 2}}


def test_an_unknown_flag_that_is_near_one_of_ours_is_left_for_megatron_to_report():
    line = "--feature rms-norm --optimisation-level 1"
    assert read(line).rest == tuple(split(line))


def test_every_value_of_megatrons_flags_is_read_as_its_parser_reads_it():
    line = "--no-bias-swiglu-fusion --recompute-modules core_attn mlp --lr 1e-3 --num-layers=8 --swiglu --my-own 3"
    given = given_arguments(split(line), surface("0.16.1"))
    assert {dest: (one.option, one.value) for dest, one in given.items()} == {
        "bias_swiglu_fusion": ("--no-bias-swiglu-fusion", False),
        "recompute_modules": ("--recompute-modules", ["core_attn", "mlp"]),
        "lr": ("--lr", 1e-3),
        "num_layers": ("--num-layers", 8),
        "swiglu": ("--swiglu", True),
    }


def test_a_line_that_megatron_will_refuse_is_left_to_it():
    assert given_arguments(["--num-layers", "four", "--swiglu"], surface("0.16.1")) == {}


def test_every_mistake_of_our_flags_is_reported_at_once():
    found = problems_of(read, "--set swiglu --features --bf16 --optimization-level 3 --mindspeed-config none.yaml --without")
    assert [problem.code for problem in found] == ["MS301", "MS301", "MS305", "MS301", "MS301"]
    assert found[0].message == "--features needs a value: Names of features, separated by commas"
    assert found[1].message == "--without needs a value: Names of features to remove, separated by commas"
    assert found[3].message == "'swiglu' does not have the form feature.field=value"
    assert str(found[4]) == (
        "MS301 optimization level 3 is not 0, 1 or 2\n  where: command line\n  fix: --optimization-level 2"
    )


def test_sizes_and_switches_of_megatron_are_the_features_of_the_plan(plan):
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    chunks = "--num-layers-per-virtual-pipeline-stage 1"
    made = plan(f"{SHAPE} {layout} {chunks} --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 100", 8)
    assert set(made.names) == {
        "tensor-parallel",
        "sequence-parallel",
        "pipeline-parallel",
        "virtual-pipeline",
        "data-parallel",
        "distributed-optimizer",
        "async-ddp",
    }
    assert sources(made, "tensor-parallel") == {"size": (2, "Megatron's --tensor-model-parallel-size")}
    assert sources(made, "virtual-pipeline") == {"size": (2, "Megatron's --num-layers-per-virtual-pipeline-stage")}
    assert sources(made, "async-ddp") == {"bucket_size": (100, "Megatron's --ddp-bucket-size")}
    why = {feature.name: feature.why[0].line for feature in made.features}
    assert why["sequence-parallel"] == "sequence-parallel: requested by Megatron's --sequence-parallel"
    assert made.world.known() == {
        "world_size": 8,
        "tp": 2,
        "pp": 2,
        "vpp": 2,
        "cp": 1,
        "ep": 1,
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "num_experts": 0,
        "grouped_experts": False,
        "transformer_engine_layers": False,
        "transformer_engine_experts": False,
        "router_topk": 2,
        "shared_expert_hidden_size": 0,
        "tied_embeddings": True,
        "seq_length": 32,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "linear_bias": True,
        "activation": "gelu",
        "rotary": False,
        "multi_latent_attention": False,
        "mtp_num_layers": 0,
        "dtype": "fp32",
        "platform": "cpu",
        "megatron": "0.16.1",
        "sequence_parallel": True,
        "dispatcher": "allgather",
        "optimizer": "adam",
        "distributed_optimizer": True,
    }


def test_a_llama_is_known_by_its_flags(plan):
    flags = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --bf16 --ffn-hidden-size 96"
    world = plan(f"{SHAPE} {flags} --features swiglu,rms-norm").world
    shape = (world.normalization, world.activation, world.gated_linear_unit, world.num_query_groups, world.dtype)
    assert shape == ("RMSNorm", "silu", True, 2, "bf16")
    assert world.ffn_hidden_size == 96


def test_recompute_flags_are_the_settings_of_recompute(plan):
    made = plan(f"{SHAPE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2")
    assert sources(made, "recompute") == {
        "granularity": ("full", "Megatron's --recompute-granularity"),
        "method": ("uniform", "Megatron's --recompute-method"),
        "num_layers": (2, "Megatron's --recompute-num-layers"),
    }
    modules = plan(f"{SHAPE} --recompute-activations --recompute-modules core_attn layernorm")
    assert sources(modules, "recompute")["modules"] == (["core_attn", "layernorm"], "Megatron's --recompute-modules")


def test_without_a_word_of_the_user_megatrons_default_dispatcher_holds(plan):
    experts = f"{SHAPE} --num-experts 4 --expert-model-parallel-size 2"
    assert sources(plan(experts, 2), "expert-parallel")["dispatcher"] == ("allgather", "Megatron's defaults")
    told = sources(plan(f"{experts} --set expert-parallel.dispatcher=alltoall", 2), "expert-parallel")
    assert told["dispatcher"] == ("alltoall", "command line")


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--moe-expert-capacity-factor 1.5 --moe-router-topk 4", "expert_capacity_factor", 1.5),
        ("--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", "padded_experts", True),
        ("--moe-latent-size 16", "latent_expert_size", 16),
        ("--overlap-moe-expert-parallel-comm", "overlapped_micro_batches", True),
        ("--fp8-format hybrid", "low_precision", True),
        ("--fp8-format hybrid", "low_precision_recipe", "delayed"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "low_precision_recipe", "mxfp8"),
        ("--moe-grouped-gemm --transformer-impl transformer_engine", "transformer_engine_experts", True),
        ("--moe-grouped-gemm --transformer-impl local", "transformer_engine_experts", False),
        ("--transformer-impl transformer_engine", "transformer_engine_experts", False),
        ("--cuda-graph-impl local", "cuda_graphs", True),
        ("--enable-cuda-graph", "cuda_graphs", True),
    ],
)
def test_flags_of_experts_are_known_to_the_plan(flags, field, value):
    layers = read(f"{SHAPE} --num-experts 4 {flags}").layers
    assert [layer.world[field] for layer in layers if field in layer.world] == [value]


def test_sequence_parallelism_on_one_tensor_rank_is_left_to_megatron_which_drops_it(plan):
    assert plan(f"{SHAPE} --sequence-parallel").names == ()


def test_the_two_command_lines_of_one_value_must_agree(plan):
    line = f"{SHAPE} --tensor-model-parallel-size 4 --set tensor-parallel.size=2 --recompute-granularity full"
    found = problems_of(plan, f"{line} --set recompute.granularity=selective", 4)
    assert [str(problem) for problem in found] == [
        (
            "MS303 Megatron's --tensor-model-parallel-size is 4, but --set tensor-parallel.size=2 sets another value\n"
            "  where: command line\n"
            "  fix: keep one of the two; both set the same value"
        ),
        (
            "MS303 Megatron's --recompute-granularity is full, but --set recompute.granularity=selective sets another "
            "value\n"
            "  where: command line\n"
            "  fix: keep one of the two; both set the same value"
        ),
    ]
    assert plan(f"{SHAPE} --tensor-model-parallel-size 4 --set tensor-parallel.size=4", 4).world.tp == 4


def test_options_of_mindspeed_run_must_agree_with_megatrons_flags():
    also = [Layer("command line", world={"tp": 2})]
    (problem,) = problems_of(read, "--tensor-model-parallel-size 4", also=also, world_size=4)
    assert problem.message == "Megatron's --tensor-model-parallel-size is 4, but --tp 2 sets another value"


@pytest.mark.guards(43)
def test_megatrons_flags_win_over_a_job_file_and_the_plan_shows_what_they_overrode(plan, tmp_path):
    (tmp_path / "job.yaml").write_text(
        "features: [recompute]\nworld: {num_layers: 2, tp: 4}\nlevel: 0\nsettings: {recompute: {granularity: full}}\n"
    )
    line = f"{SHAPE} --tensor-model-parallel-size 2 --recompute-granularity selective"
    made = plan(f"{line} --mindspeed-config {tmp_path}/job.yaml", 2)
    assert (made.level, made.world.tp, made.world.num_layers) == (0, 2, 4)
    granularity = next(one for one in made.features if one.name == "recompute").settings["granularity"]
    assert (granularity.value, granularity.overrode) == ("selective", ("job file: full",))
    two = problems_of(plan, f"{SHAPE} --mindspeed-config a.yaml --mindspeed-config b.yaml")
    assert two[0].message == "--mindspeed-config is given 2 times: a.yaml, b.yaml"


def test_a_mask_that_is_reset_keeps_documents_apart_and_positions_go_on_unless_they_are_reset_too(plan):
    for more, restart in (("", False), (" --reset-position-ids", True)):
        made = plan(f"{SHAPE} --reset-attention-mask{more}")
        arguments = {one.override.argument: one.override.value for one in made.overrides if "eod-reset" in one.owners}
        assert arguments == {
            "reset_attention_mask": True,
            "reset_position_ids": restart,
            "create_attention_mask_in_dataloader": False,
        }
    assert "eod-reset" not in plan(f"{SHAPE} --reset-position-ids").names


def test_a_mask_that_is_reset_is_refused_where_it_would_not_be_read(plan):
    line = f"{SHAPE} --reset-attention-mask --context-parallel-size 2 --features adaptive-cp"
    problem = problems_of(plan, line, 2)[1]
    assert problem.message == (
        "adaptive-cp does not support documents, which eod-reset needs, because "
        "attention must know where documents end. ring-attention, ulysses-attention, hybrid-attention and kv-allgather-cp "
        "have this capability"
    )


def test_environment_variables_and_the_level_count(plan):
    line = f"{SHAPE} --swiglu --normalization RMSNorm"
    assert set(plan(line, environ={"MINDSPEED_FEATURES": "rms-norm,swiglu"}).names) == {"rms-norm", "swiglu"}
    (problem,) = problems_of(plan, f"{line} --features swiglu --optimization-level 0")
    assert (problem.code, problem.fix_text) == ("MS207", "--optimization-level 1")


def test_the_cpu_sets_what_it_needs_and_each_is_a_row_of_the_plan(plan):
    overrides = {one.override.argument: (one.override.value, one.owners) for one in plan(SHAPE).overrides}
    platform = ("cpu-platform",)
    assert overrides == {
        "distributed_backend": ("gloo", platform),
        "transformer_impl": ("local", platform),
        "gradient_accumulation_fusion": (False, platform),
        "masked_softmax_fusion": (False, platform),
        "apply_rope_fusion": (False, platform),
        "dist_ckpt_optim_fully_reshardable": (True, platform),
        "persist_layer_norm": (False, platform),
    }


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        (
            "--no-gradient-accumulation-fusion",
            "matmul-add is requested (command line) and removed (Megatron's --no-gradient-accumulation-fusion)",
        ),
        (
            "--use-torch-fsdp2",
            "matmul-add: parameters are fully sharded over data-parallel ranks (FSDP), which matmul-add does not support",
        ),
    ],
)
def test_flags_without_a_buffer_for_gradients_take_matmul_add_out(plan, flag, reason):
    assert "matmul-add" not in plan(f"{SHAPE} {flag}").names
    assert "matmul-add" in plan(f"{SHAPE} --features matmul-add").names
    (problem,) = problems_of(plan, f"{SHAPE} --features matmul-add {flag}")
    assert problem.message == reason


@pytest.mark.guards(18)
def test_a_flag_that_contradicts_the_plan_is_a_problem_and_not_overridden(plan):
    found = problems_of(plan, f"{SHAPE} --transformer-impl local --features transformer-engine-layers")
    assert [str(problem) for problem in found] == [
        (
            "MS605 Megatron's --transformer-impl sets 'local', but transformer-engine-layers needs the value "
            "'transformer_engine': makes Megatron build its layer specs for Transformer Engine, in which this feature "
            "replaces the classes of Transformer Engine by local layers\n"
            "  where: Megatron's --transformer-impl\n"
            "  fix: remove --transformer-impl or transformer-engine-layers"
        ),
    ]


def test_layers_of_transformer_engine_bring_in_the_feature_that_has_them(plan):
    assert "transformer-engine-layers" in plan(f"{SHAPE} --transformer-impl transformer_engine").names
    assert "transformer-engine-layers" not in plan(SHAPE).names
    default = SHAPE.replace(" --transformer-impl local", "")
    (feature,) = plan(default).features
    assert feature.why[0].line == "transformer-engine-layers: layers are Transformer Engine's"
    assert plan(f"{default} --without transformer-engine-layers --features rms-norm --normalization RMSNorm").names == (
        "rms-norm",
    )


def test_what_only_a_real_transformer_engine_does_is_refused(plan):
    (problem,) = problems_of(plan, f"{SHAPE.replace('local', 'transformer_engine')} --fp8-format hybrid")
    assert problem.message == (
        "transformer-engine-layers: linear layers multiply by the recipe delayed, but transformer-engine-layers supports only "
        "mxfp8. Transformer Engine's original layers support the others"
    )


def test_the_layers_step_aside_where_an_engine_is_installed():
    environment = replace(made_up("npu", "0.16.1"), world_size=1, engine=True)
    _, made = plan_training(split("--num-layers 2"), {}, environment)
    assert "transformer-engine-layers" not in made.names
    rows = {(row.kind, row.feature): row.text for row in made.rows}
    assert (
        rows["left-out", "transformer-engine-layers"]
        == "Transformer Engine is installed, so its layers are used and transformer-engine-layers is not needed (with the "
        "setting replace=true, Megatron's local layers are used instead)"
    )
    _, made = plan_training(split("--num-layers 2 --set transformer-engine-layers.replace=true"), {}, environment)
    assert "transformer-engine-layers" in made.names


def test_a_feature_that_is_requested_and_that_a_flag_of_megatron_takes_out_is_a_problem(plan):
    (problem,) = problems_of(plan, f"{SHAPE} --swiglu --features swiglu --no-bias-swiglu-fusion")
    assert str(problem) == (
        "MS210 swiglu is requested (command line) and removed (Megatron's --no-bias-swiglu-fusion)\n"
        "  fix: remove --no-bias-swiglu-fusion or swiglu"
    )


def test_a_backend_that_the_platform_can_serve_stays_and_is_said(plan):
    made = plan(f"{SHAPE} --distributed-backend nccl")
    assert "distributed_backend" not in {one.override.argument for one in made.overrides}
    assert notes_of(made) == ["Megatron's --distributed-backend nccl is kept: the CPU platform creates gloo groups instead"]


def test_a_fix_names_megatrons_flags(plan):
    with pytest.raises(ResolutionError) as caught:
        plan(f"{SHAPE} --features swiglu --pipeline-model-parallel-size 3 --ffn-hidden-size 256", 3)
    fixes = {problem.features: caught.value.words(problem.fix) for problem in caught.value.problems}
    assert fixes["swiglu",] == "--swiglu, or remove swiglu"
    assert fixes["pipeline-parallel",] == "--pipeline-model-parallel-size 1"


def test_with_arguments_from_elsewhere_nothing_is_assumed(plan):
    from_file = plan("--yaml-cfg run.yaml --num-layers 8")
    assert not from_file.world.knows("num_layers")
    assert not from_file.world.knows("normalization")
    from_checkpoint = plan("--use-checkpoint-args --num-layers 8 --hidden-size 64 --num-query-groups 2")
    assert (from_checkpoint.world.num_layers, from_checkpoint.world.hidden_size) == (8, 64)
    assert not any(from_checkpoint.world.knows(name) for name in ("ffn_hidden_size", "num_query_groups", "dtype", "seq_length"))


def test_old_flags_are_asked_for_only_where_megatron_lacks_something(plan):
    made = plan(f"{SHAPE} --swiglu --normalization RMSNorm --use-fused-rmsnorm")
    assert made.names == ("rms-norm",)
    notes = notes_of(made)
    assert notes == ["--use-fused-rmsnorm switches on rms-norm; the new spelling is --features rms-norm"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.training import pretrain", True),
        ("def main():\n    import megatron.training.arguments", True),
        ("import mindspeed.megatron_adaptor", True),
        ("from mindspeed import megatron_adaptor", True),
        ("from megatron.core import parallel_state", False),
        ("import megatron.training_of_mine", False),
        ("not python", False),
    ],
)
def test_a_megatron_lm_script_is_known_by_its_imports(tmp_path, source, expected):
    path = tmp_path / "script.py"
    path.write_text(source)
    assert is_training_script(path) is expected


def test_the_guide_names_every_flag_that_becomes_a_feature_and_every_flag_of_ours():
    guide = (ROOT / "docs" / "megatron-lm.md").read_text(encoding="utf-8")
    known = surface("0.16.1")
    catalog = registry.catalog_for(())
    names = [flags.dests_of(size)[0] for size in catalog.owners if size != "dp"]
    names += [flag.dest for _, flag in declared_flags(catalog)]
    options = [known.by_dest[name][0].options[0] for name in names] + [*OWN_FLAGS]
    assert [option for option in options if f"`{option}" not in guide] == []


def test_a_feature_that_is_left_out_takes_megatrons_arguments_of_it_along(plan):
    line = f"{SHAPE} --recompute-granularity full --recompute-method=block --recompute-num-layers 4 --bf16"
    request = read(f"{line} --recompute-modules core_attn mlp --lr 1e-3 --without recompute")
    assert request.rest == tuple(split(f"{SHAPE} --bf16 --lr 1e-3"))
    assert [note.text for note in request.notes] == [
        "Megatron's --recompute-granularity is ignored: command line removes recompute",
        "Megatron's --recompute-method is ignored: command line removes recompute",
        "Megatron's --recompute-modules is ignored: command line removes recompute",
        "Megatron's --recompute-num-layers is ignored: command line removes recompute",
    ]
    assert "recompute" not in plan(f"{line} --without recompute").names
    (problem,) = problems_of(plan, f"{line} --features recompute --without recompute")
    assert problem.code == "MS210"


@pytest.mark.parametrize(
    ("feature", "size"),
    [("tensor-parallel", "--tensor-model-parallel-size"), ("virtual-pipeline", "--num-virtual-stages-per-pipeline-rank")],
)
def test_a_feature_that_is_left_out_takes_megatrons_argument_of_its_size_along(feature, size):
    request = read(f"{SHAPE} {size} 2 --without {feature}")
    assert request.rest == tuple(split(SHAPE))
    assert [note.text for note in request.notes] == [f"Megatron's {size} is ignored: command line removes {feature}"]


def test_an_option_of_mindspeed_run_leaves_megatrons_arguments_out_too():
    also = [Layer("command line", without=("recompute",))]
    assert read(f"{SHAPE} --recompute-activations", also=also).rest == tuple(split(SHAPE))


def test_an_abbreviated_option_is_named_with_its_full_spelling():
    assert [(note.kind, note.text) for note in read("--num-attention-h 4 --my-own 3 --num-layers 2").notes] == [
        (
            "warning",
            (
                "--num-attention-h is not an option of Megatron-LM, which accepts no abbreviations; similar options: "
                "--num-attention-heads"
            ),
        )
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--fp8-format hybrid",
            (
                "MS605 Megatron's --fp8-format sets 'hybrid', but the layers are local (transformer_impl): local layers "
                "ignore it and compute without fp8\n"
                "  where: Megatron's --fp8-format\n"
                "  fix: remove --fp8-format"
            ),
        ),
        (
            "--delay-wgrad-compute",
            (
                "MS605 Megatron's --delay-wgrad-compute sets True, but the layers are local (transformer_impl): only "
                "Transformer Engine's layers can delay weight gradients\n"
                "  where: Megatron's --delay-wgrad-compute\n"
                "  fix: remove --delay-wgrad-compute"
            ),
        ),
        (
            "--apply-layernorm-1p",
            (
                "MS605 Megatron's --apply-layernorm-1p sets True, but the layers are local (transformer_impl): the norm of "
                "local layers is torch's LayerNorm, which has no zero-centered weight\n"
                "  where: Megatron's --apply-layernorm-1p\n"
                "  fix: remove --apply-layernorm-1p"
            ),
        ),
    ],
)
def test_an_argument_that_local_layers_do_not_support_is_a_problem(plan, flags, problem):
    assert [str(found) for found in problems_of(plan, f"{SHAPE} {flags}")] == [problem]


def test_a_zero_centered_norm_is_fine_where_the_layers_are_rms_norms(plan):
    plan(f"{SHAPE} --apply-layernorm-1p --normalization RMSNorm --features rms-norm")


@pytest.mark.parametrize(
    ("value", "feature"), [("p2p", "ring-attention"), ("a2a", "ulysses-attention"), ("all_gather", "kv-allgather-cp")]
)
def test_megatrons_communication_type_names_the_algorithm(plan, value, feature):
    made = plan(f"{SHAPE} --context-parallel-size 2 --cp-comm-type {value}", 2)
    assert set(made.names) == {"context-parallel", feature}
    assert f"Megatron's --cp-comm-type {value} is {feature}" in notes_of(made)


def test_the_sizes_of_a_hierarchy_are_those_of_hybrid_attention(plan):
    line = f"{SHAPE} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    made = plan(line, 4)
    assert set(made.names) == {"context-parallel", "hybrid-attention"}
    degree = (2, "Megatron's --hierarchical-context-parallel-sizes")
    assert sources(made, "hybrid-attention") == {"ulysses_degree": degree}


def test_an_algorithm_that_is_requested_wins_over_the_communication_type(plan):
    line = f"{SHAPE} --context-parallel-size 2 --cp-comm-type p2p"
    made = plan(f"{line} --features ulysses-attention", 2)
    assert "ring-attention" not in made.names
    assert "Megatron's --cp-comm-type p2p is ignored, because ulysses-attention is requested" in notes_of(made)
    chosen = plan(f"{line} --set context-parallel.algorithm=auto", 2)
    assert "Megatron's --cp-comm-type p2p is ignored, because context-parallel.algorithm is requested" in notes_of(chosen)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("p2p a2a p2p a2a", "p2p a2a differs between layers, but all layers need the same value"),
        ("ring", "ring must be one of a2a, a2a+p2p, all_gather, p2p"),
    ],
)
def test_a_communication_type_that_no_feature_serves_is_a_problem(plan, values, text):
    (problem,) = problems_of(plan, f"{SHAPE} --context-parallel-size 2 --cp-comm-type {values}", 2)
    known = "a2a, a2a+p2p, all_gather, p2p"
    assert str(problem) == (
        f"MS605 Megatron's --cp-comm-type {text}\n  where: Megatron's --cp-comm-type\n  fix: use one of {known}"
    )


def test_without_a_spread_sequence_the_communication_type_says_nothing(plan):
    assert plan(f"{SHAPE} --cp-comm-type a2a").names == ()


def test_the_two_spellings_of_a_context_parallel_size_must_agree(plan):
    found = problems_of(plan, f"{SHAPE} --context-parallel-size 2 --set context-parallel.size=4 --features ring-attention", 4)
    assert found[0].message == ("Megatron's --context-parallel-size is 2, but --set context-parallel.size=4 sets another value")


def test_layers_on_the_npu_are_in_the_roles_of_an_engine_unless_one_is_declared():
    environment = replace(made_up("npu", "0.16.1"), world_size=1)

    def layers_of(line: str) -> list[object]:
        _, made = plan_training(split(line), {}, environment)
        return [planned.override.value for planned in made.overrides if planned.override.argument == "transformer_impl"]

    assert layers_of("--num-layers 2 --transformer-impl local") == ["local"]
    assert layers_of("--num-layers 2 --without transformer-engine-layers") == ["local"]
    assert layers_of("--num-layers 2") == ["transformer_engine"]
    assert layers_of("--num-layers 2 --set npu-platform.transformer_engine=true") == []
    assert layers_of("--num-layers 2 --transformer-impl transformer_engine") == ["transformer_engine"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--optimizer muon", "--optimizer muon needs Emerging Optimizers on every rank; its module emerging_optimizers"),
        ("--moe-enable-deepep", "--moe-enable-deepep needs DeepEP on every rank; its module deep_ep"),
        ("--save s3://a/b", "--save s3://a/b needs multi-storage-client on every rank; its module multistorageclient"),
        (
            "--non-persistent-ckpt-type local",
            "--non-persistent-ckpt-type local needs nvidia-resiliency-ext on every rank; its module nvidia_resiliency_ext",
        ),
        ("--use-megatron-fsdp", "--use-megatron-fsdp needs einops on every rank; its module einops"),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2 needs einops on every rank; its module einops",
        ),
        ("--optimizer adam --save runs/job --num-distributed-optimizer-instances 1", None),
    ],
)
def test_an_argument_whose_package_is_not_installed_is_a_row(words, text, monkeypatch):
    monkeypatch.setattr("mindspeed.megatron_lm.training_plan.find_spec", lambda name: None)
    _, plan = plan_training(split(f"{SHAPE} {words}"), {}, replace(made_up("npu", "0.16.1"), world_size=1))
    rows = [row.text for row in plan.rows if row.kind == "not-checked" and " on every rank; " in row.text]
    assert rows == [f"{text} is not installed here"] * (text is not None)
