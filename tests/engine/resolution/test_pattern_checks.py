"""A pattern of a hybrid model that does not fit the job: each problem quotes it, with a mark under the place."""

import pytest

import mindspeed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import ResolutionError

TWO = {"pp": 2, "world_size": 2}


def refusals(pattern, platform="cpu", **world):
    values = {"world_size": 1, "num_experts": 0, "hybrid_layer_pattern": pattern} | world
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(world=values, environment=made_up(platform, "0.19.1"))
    return [problem.text() for problem in error.value.problems]


@pytest.mark.parametrize(
    ("pattern", "world", "text"),
    [
        (
            "*-X-",
            {},
            (
                "MS301 'X' is not a layer of Megatron; the layers are * + D - E M G\n"
                "    *-X-\n"
                "      ^\n"
                "  fix: correct the pattern"
            ),
        ),
        ("/*-", {}, "MS301 the pattern contains no layer of the decoder\n    /*-\n    ^\n  fix: correct the pattern"),
        (
            "*-/*-|*-",
            {},
            "MS301 multi-token prediction is not split into segments\n    *-/*-|*-\n         ^\n  fix: correct the pattern",
        ),
        (
            "*-/*-/*E",
            {"num_experts": 4},
            "MS301 each depth of multi-token prediction must have the same layers, '*-'\n    *-/*-/*E\n          ^\n"
            "  fix: correct the pattern",
        ),
        (
            "*-+-",
            {},
            "MS301 a model cannot have two kinds of attention, * and +\n    *-+-\n      ^\n  fix: correct the pattern",
        ),
        (
            "*-*-*-",
            TWO | {"num_layers": 3},
            "MS302 num_layers is 3, but the pattern has 6 layers\n    *-*-*-\n       ^\n  fix: remove --num-layers",
        ),
        (
            "*-|*-*-",
            TWO | {"num_layers": 4},
            "MS302 num_layers is 4, but the pattern has 6 layers\n    *-|*-*-\n         ^\n  fix: remove --num-layers",
        ),
        (
            "*-|*-",
            {},
            "MS302 the pattern has 2 segments, but there is only one pipeline stage\n    *-|*-\n      ^\n"
            "  fix: remove |, or --pp 2",
        ),
        (
            "*-/*E",
            {},
            "MS302 a layer has experts (E), but num_experts is 0\n    *-/*E\n        ^\n  fix: --num-experts N",
        ),
        (
            "*-G-",
            {},
            "MS302 G is a gated delta net, whose kernels (flash-linear-attention) are available only on cuda, but the platform "
            "is cpu\n    *-G-\n      ^\n  fix: remove G; this platform supports * + D - E",
        ),
        (
            "*-*-*-",
            {"num_layers": 3},
            ("MS302 num_layers is 3, but the pattern has 6 layers\n    *-*-*-\n       ^\n  fix: remove --num-layers"),
        ),
        (
            "*-*-*",
            TWO,
            "MS302 5 layers are not divisible by 2 pipeline stages\n    *-*-*\n      ^\n"
            "  fix: separate the layers of stages with |, or --pp 1",
        ),
        (
            "*-|*-|*-",
            TWO,
            "MS302 3 segments are not divisible by 2 pipeline stages\n    *-|*-|*-\n          ^\n"
            "  fix: --pp N (a divisor of 3)",
        ),
        (
            "*-|*-|*-|*-",
            TWO | {"vpp": 1},
            ("MS302 4 segments on 2 pipeline stages give vpp=2, but vpp is 1\n    *-|*-|*-|*-\n          ^\n  fix: --vpp 2"),
        ),
        (
            "*-*-*-*-",
            TWO | {"vpp": 2, "global_batch_size": 4, "micro_batch_size": 1},
            (
                "MS302 vpp is 2, but the pattern has no segments for 4 model chunks\n"
                "    *-*-*-*-\n"
                "      ^\n"
                "  fix: separate the layers of stages with |, or remove --vpp"
            ),
        ),
        (
            "*-|*-",
            TWO | {"loss_is_layer": True},
            (
                "MS302 loss_is_layer is set, but only the pattern assigns layers to pipeline stages\n"
                "    *-|*-\n"
                "      ^\n"
                "  fix: remove --loss-is-layer"
            ),
        ),
        (
            "*-*E",
            {},
            ("MS302 a layer has experts (E), but num_experts is 0\n    *-*E\n       ^\n  fix: --num-experts N"),
        ),
        (
            "*-",
            {"num_experts": 4},
            (
                "MS302 num_experts is 4, but no layer of the pattern has experts (E)\n"
                "    *-\n"
                "     ^\n"
                "  fix: write E for -, or remove --num-experts"
            ),
        ),
        (
            "*-",
            {"mtp_num_layers": 1},
            ("MS302 mtp_num_layers is 1, but the number of depths after / is 0\n    *-\n      ^\n  fix: --mtp-num-layers 0"),
        ),
        (
            "*-/*-",
            {"mtp_num_layers": 2},
            ("MS302 mtp_num_layers is 2, but the number of depths after / is 1\n    *-/*-\n      ^\n  fix: --mtp-num-layers 1"),
        ),
        (
            "*-",
            {"multi_latent_attention": True},
            (
                "MS302 attention is multi-latent, but * is attention with separate keys\n"
                "    *-\n"
                "    ^\n"
                "  fix: write + for *, or remove --multi-latent-attention"
            ),
        ),
        (
            "*-M-",
            {},
            (
                "MS302 M is Mamba, whose kernels (mamba_ssm) are available only on cuda, but the platform is cpu\n"
                "    *-M-\n"
                "      ^\n"
                "  fix: remove M; this platform supports * + D - E"
            ),
        ),
        (
            "*-|*-",
            TWO | {"first_stage_layers": 2},
            "MS302 segments and first_stage_layers both assign layers to pipeline stages\n    *-|*-\n      ^\n"
            "  fix: remove --first-stage-layers",
        ),
        *(
            (
                "*-*-",
                TWO | {field: True},
                f"MS302 {field} is set, but only the pattern assigns layers to pipeline stages\n    *-*-\n      ^\n"
                f"  fix: remove --{field.replace('_', '-')}",
            )
            for field in ("pipeline_layout", "embedding_is_layer", "loss_is_layer")
        ),
        (
            "*-*-",
            {"loss_is_layer": True},
            "MS302 loss_is_layer is set, but only the pattern assigns layers to pipeline stages\n    *-*-\n    ^\n"
            "  fix: remove --loss-is-layer",
        ),
        (
            "*-*-",
            TWO | {"first_stage_layers": 1, "last_stage_layers": 2},
            "MS302 the first and the last stage have 3 layers, but the pattern has 4 layers\n    *-*-\n       ^\n"
            "  fix: remove --first-stage-layers, or remove --last-stage-layers",
        ),
        (
            "*-*-*-",
            {"pp": 3, "world_size": 3, "first_stage_layers": 1},
            "MS302 5 layers are not divisible by 2 pipeline stages\n    *-*-*-\n     ^\n"
            "  fix: separate the layers of stages with |, or --pp 1",
        ),
        (
            "*E*E",
            {"num_experts": 4, "moe_layers": 1},
            "MS302 moe_layers is 1, but the pattern has 2 layers with experts (E)\n    *E*E\n       ^\n"
            "  fix: remove moe_layers, which the pattern gives",
        ),
        (
            "*-*-",
            {"moe_layers": 1},
            "MS302 moe_layers is 1, but the pattern has 0 layers with experts (E)\n    *-*-\n       ^\n"
            "  fix: remove moe_layers, which the pattern gives",
        ),
        (
            "*-",
            {"transformer_engine_layers": False},
            "MS302 transformer_engine_layers is False, but the layers of a HybridModel are always Transformer Engine's\n"
            "    *-\n    ^\n  fix: --transformer-engine-layers",
        ),
        (
            "-+",
            {"multi_latent_attention": False},
            "MS302 multi_latent_attention is False, but + is multi-latent attention\n    -+\n     ^\n"
            "  fix: --multi-latent-attention",
        ),
    ],
)
def test_a_pattern_that_does_not_fit_is_quoted_with_a_mark(pattern, world, text):
    assert refusals(pattern, **world) == [text]


def test_every_character_that_is_no_layer_is_marked():
    assert refusals("a-*e") == [
        f"MS301 {layer!r} is not a layer of Megatron; the layers are * + D - E M G\n    a-*e\n    {mark}\n"
        "  fix: correct the pattern"
        for layer, mark in (("a", "^"), ("e", "   ^"))
    ]


def test_a_pattern_that_fits_says_its_layers_and_chunks():
    world = TWO | {"hybrid_layer_pattern": "*-|*E|*-|*E", "num_experts": 4, "global_batch_size": 4, "micro_batch_size": 1}
    plan = mindspeed.plan(world=world, environment=made_up("cuda", "0.19.1"))
    known = plan.world
    assert (known.num_layers, known.vpp, known.moe_layers, known.layers_per_chunk) == (8, 2, 2, (2, 2, 2, 2))
    assert {"pipeline-parallel", "virtual-pipeline"} <= set(plan.names)


def test_mamba_is_accepted_where_its_kernels_run():
    plan = mindspeed.plan(world={"world_size": 1, "hybrid_layer_pattern": "M-*-"}, environment=made_up("cuda", "0.19.1"))
    assert plan.world.num_layers == 4


def test_features_that_deal_out_layers_refuse_a_pattern():
    world = TWO | {"hybrid_layer_pattern": "*-|*-"}
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(["noop-layers"], world=world, environment=made_up("cpu", "0.19.1"))
    assert [problem.message for problem in error.value.problems] == [
        "noop-layers: the pattern of a hybrid model already assigns layers to pipeline stages"
    ]


@pytest.mark.parametrize(
    ("feature", "fix"),
    [
        ("norm-recompute", "remove norm-recompute"),
        ("swap-attention", "--set 'swap-attention.modules=[core_attention,linear_proj]' (without linear_qkv)"),
    ],
)
def test_a_fix_gives_no_field_another_value_than_the_pattern(feature, fix):
    settings = {"swap-attention": {"modules": ["core_attention", "linear_qkv", "linear_proj"]}}
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(
            [feature], settings=settings, world=TWO | {"hybrid_layer_pattern": "*-|*-"}, environment=made_up("cpu", "0.19.1")
        )
    assert [problem.fix_text for problem in error.value.problems] == [fix]


@pytest.mark.parametrize(
    ("megatron", "warnings"),
    [
        ("0.16.1", ["0.16.1; features are not tested on it"]),
        ("0.18.2", ["0.18.2; features are not tested on it"]),
        ("0.19.0", []),
    ],
)
def test_a_megatron_before_hybrid_models_has_a_warning(megatron, warnings):
    world = {"world_size": 1, "num_experts": 0, "hybrid_layer_pattern": "*-"}
    plan = mindspeed.plan(world=world, environment=made_up("cuda", megatron))
    text = "HybridModel is supported with megatron-core >=0.19, but the version is "
    found = [row.text for row in plan.rows if (row.kind, row.feature) == ("warning", "HybridModel")]
    assert found == [text + warning for warning in warnings]


def test_a_megatron_whose_pattern_has_no_segments_splits_layers_otherwise():
    world = TWO | {"num_experts": 0, "hybrid_layer_pattern": "*-*", "loss_is_layer": True}
    assert mindspeed.plan(world=world, environment=made_up("cuda", "0.16.1")).world.layers_per_chunk == (2, 1)
