import pytest

from tests.features.resolving import ask, not_checked, overrides, refusals

OFFLOADED = "Megatron offloads activations to host memory, which "
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


def refused(settings, **world):
    return refusals("recompute", settings={"recompute": settings}, **world)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"modules": ["core_attn", "mlp"]},
        FULL,
        FULL | {"num_layers": 4},
        FULL | {"method": "block", "num_layers": 5},
    ],
)
def test_what_megatron_takes_is_accepted(settings):
    assert refused(settings) == []


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"granularity": "full"},
            "granularity=full needs method and num_layers | --set recompute.method=uniform and --set recompute.num_layers=1",
        ),
        ({"granularity": "full", "num_layers": 1}, "granularity=full needs method | --set recompute.method=uniform"),
        ({"granularity": "full", "method": "block"}, "granularity=full needs num_layers | --set recompute.num_layers=1"),
        (
            FULL | {"modules": ["mlp"]},
            "granularity=selective takes modules, but granularity is full "
            "| remove the setting recompute.modules, or --set recompute.granularity=selective",
        ),
        (
            {"method": "block", "num_layers": 1},
            "granularity=full takes method and num_layers, but granularity is selective "
            "| remove the setting recompute.method and remove the setting recompute.num_layers, "
            "or --set recompute.granularity=full",
        ),
        (
            {"distribute": True},
            "granularity=full takes distribute, but granularity is selective "
            "| remove the setting recompute.distribute, or --set recompute.granularity=full",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings, refusal):
    assert refused(settings) == [f"MS301 recompute: {refusal}"]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            FULL | {"distribute": True},
            "saved inputs are distributed over tensor-parallel ranks, but tp is 1 "
            "| --set recompute.distribute=false, or --tp 2 or more",
        ),
        (
            FULL | {"num_layers": 3},
            "groups of 3 layers do not fill every model chunk: they have (8,) layers | --set recompute.num_layers=1",
        ),
        (
            {"modules": ["core_attn", "moe"]},
            "moe and shared_experts are modules of a MoE model, but the model is dense "
            "| --set recompute.modules=VALUE (without moe and shared_experts), or --num-experts N",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_job_is_refused(settings, refusal):
    assert refused(settings) == [f"MS304 recompute: {refusal}"]


def test_groups_fill_the_chunks_of_a_virtual_pipeline():
    assert refused(FULL | {"num_layers": 2}, world_size=2, pp=2, vpp=2) == []
    assert refused(FULL | {"num_layers": 4}, world_size=2, pp=2, vpp=2) == [
        "MS304 recompute: groups of 4 layers do not fill every model chunk: they have (2, 2, 2, 2) layers "
        "| --set recompute.num_layers=1"
    ]


def test_more_layers_than_a_chunk_has_are_all_of_them():
    settings = {"recompute": FULL | {"method": "block", "num_layers": 9}}
    resolution = ask("recompute", settings=settings, world_size=1, num_layers=8)
    assert resolution.problems == []
    assert [row.text for row in resolution.rows if row.kind == "warning"] == [
        "num_layers=9 is more than a model chunk has, which is 8 layers / (pp x vpp = 1 x 1): every layer is recomputed"
    ]


def test_experts_can_be_recomputed_in_a_moe_model():
    assert refused({"modules": ["moe"]}, num_experts=4) == []


def test_saved_inputs_are_distributed_by_tensor_or_by_sequence_parallelism():
    settings = {"recompute": FULL | {"distribute": True}}
    assert refusals("recompute", settings=settings, tp=2) == []
    assert refusals("recompute", "sequence-parallel", settings=settings, tp=2) == [
        "MS202 recompute and sequence-parallel exclude each other, because the saved inputs are already a share of the "
        "sequence; set recompute.distribute=false | remove recompute or sequence-parallel"
    ]


def test_an_unknown_model_is_not_checked():
    assert not_checked("recompute", settings={"recompute": FULL}) == [
        "'groups of 1 layers do not fill every model chunk: they have ? layers' depends on num_layers; give --num-layers"
    ]


@pytest.mark.parametrize(
    ("settings", "job", "refusal"),
    [
        ({}, {"cpu_offloading": True}, f"{OFFLOADED}recompute does not support | --no-cpu-offloading, or remove recompute"),
        (
            FULL,
            {"overlapped_micro_batches": True},
            "Megatron overlaps expert all-to-alls with another micro-batch, which recompute does not support "
            "| --no-overlapped-micro-batches, or remove recompute",
        ),
    ],
)
def test_what_megatron_refuses_later_is_refused_when_the_plan_is_made(settings, job, refusal):
    assert refused(settings, **job) == [f"MS304 recompute: {refusal}"]


def test_modules_are_recomputed_beside_another_micro_batch():
    assert refused({}, overlapped_micro_batches=True) == []


def test_settings_reach_megatron_only_when_given():
    assert overrides("recompute") == {"recompute_granularity": "selective"}
    assert overrides("recompute", modules=["core_attn", "mlp"]) == {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp"),
    }
    assert overrides("recompute", **FULL, distribute=True) == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "distribute_saved_activations": True,
    }


@pytest.mark.parametrize(("settings", "slots"), [(FULL, ("recompute-policy",)), ({}, ())])
def test_only_full_recompute_is_the_policy_of_the_job(settings, slots):
    resolution = ask("recompute", settings={"recompute": settings}, world_size=1)
    assert {feature.name: feature.slots for feature in resolution.features}["recompute"] == slots


LATENT = {"num_experts": 4, "grouped_experts": True, "multi_latent_attention": True}


def test_modules_without_output_fit_the_model():
    modules = {"modules": ["layernorm", "moe_act", "mla_up_proj"]}
    assert refused(modules, **LATENT) == []
    assert refused(modules, multi_latent_attention=False) == [
        "MS304 recompute: moe_act is the activation of grouped experts, but the model has none "
        "| --set recompute.modules=VALUE (without moe_act), or add activation-recompute to the features",
        "MS304 recompute: mla_up_proj is a part of multi-latent attention, but the model has none "
        "| --set recompute.modules=VALUE (without mla_up_proj)",
    ]


@pytest.mark.parametrize("feature", ["norm-recompute", "activation-recompute", "swap-attention"])
def test_a_feature_goes_on_beside_other_recomputation(feature):
    for settings in (FULL | {"method": "block"}, {"modules": ["layernorm"]}):
        assert refusals("recompute", feature, settings={"recompute": settings}) == []
