"""A pattern of a hybrid model that does not fit the job: each problem quotes it, with a mark under the place."""

import pytest

import mindspeed
from mindspeed.engine.resolution.environment import made_up
from mindspeed.plugins.problems import ResolutionError

TWO = {"pp": 2, "world_size": 2}


def refusals(pattern, platform="cpu", **world):
    values = {"world_size": 1, "num_experts": 0, "hybrid_layer_pattern": pattern} | world
    with pytest.raises(ResolutionError) as error:
        mindspeed.plan(world=values, environment=made_up(platform, "0.19.1"))
    return [problem.text() for problem in error.value.problems if problem.code in ("MS301", "MS302")]


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
            (
                "MS302 4 segments give 2 model chunks on each of 2 pipeline stages, but vpp is 1\n"
                "    *-|*-|*-|*-\n"
                "          ^\n"
                "  fix: --vpp 2"
            ),
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
                "MS302 segments and loss_is_layer both assign layers to pipeline stages\n"
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
            ("MS302 mtp_num_layers is 1, but the pattern has 0 depths after /\n    *-\n      ^\n  fix: --mtp-num-layers 0"),
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
                "MS302 M is Mamba, whose kernels (mamba_ssm) available only on cuda, but the platform is cpu\n"
                "    *-M-\n"
                "      ^\n"
                "  fix: remove M; this platform supports * + D - E"
            ),
        ),
    ],
)
def test_a_pattern_that_does_not_fit_is_quoted_with_a_mark(pattern, world, text):
    assert refusals(pattern, **world) == [text]


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
