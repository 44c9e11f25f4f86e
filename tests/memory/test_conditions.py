"""What the features of memory need: of the job, when a plan is made, and of a model or an optimizer that exists."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.engine.runtime import session
from mindspeed.job.config import world_of_config
from mindspeed.job.hybrid_pattern import pattern_of
from mindspeed.megatron.hook_wrappers import get_megatron_optimizer
from mindspeed.memory.model_layers import unsuited_optimizers
from mindspeed.plugins import MindSpeedError, World
from mindspeed.plugins.conditions import conditions, failure
from tests.features.resolving import CATALOG, MODEL, active, ask, refusals

NORM, ACTIVATION, SWAP, ADAPTIVE = "norm-recompute", "activation-recompute", "swap-attention", "adaptive-recompute"
REUSE, HOST = "reuse-fp32-param", "swap-optimizer"
SETTINGS: dict[str, dict[str, Any]] = {ADAPTIVE: {"budget_mb": 1000}}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = UNIFORM | {"recompute_method": "block"}
FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}
PARTS = {"modules": ("core_attention", "linear_proj")}
SELECTIVE = {"recompute_granularity": "selective"}

NOTHING_LEFT = "every layer is recomputed as a whole, so {} has nothing to do"
MUON = "the optimizer muon does not update each element independently, which {name} needs | --optimizer adam, or remove {name}"
MLP_TAKEN = (
    "recompute_modules contains mlp, which already recomputes the activation function | remove --recompute-modules, or remove "
    "{name}"
)
ATTENTION_TAKEN = (
    "recompute_modules contains core_attn, which then keeps no activations to offload | remove --recompute-modules, or remove "
    "{name}"
)
LAST_ATTENTION = (
    "no attention layer can be offloaded: the last one keeps its activations on the device, and the model has no other | "
    "remove {name}"
)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        NORM,
        BLOCK | {"recompute_num_layers": 6},
        (
            "--recompute-method block recomputes layers as a whole, and leaves 2 of the 8 layers of a model chunk. {name} "
            "works only in layers that are left, and needs at least 3 of them | --recompute-num-layers "
            "5 (or less), or remove {name}"
        ),
    ),
    *((name, {"dtype": "bf16", "optimizer": "muon"}, MUON) for name in (REUSE, HOST)),
    *(
        (
            REUSE,
            {"dtype": dtype},
            f"weights are {dtype}, but {REUSE} supports only bf16 weights with a 16-bit residual | "
            f"--dtype bf16, or remove {REUSE}",
        )
        for dtype in ("fp32", "fp16")
    ),
    (
        ACTIVATION,
        SELECTIVE | {"recompute_modules": ("mlp",)},
        MLP_TAKEN,
    ),
    (
        SWAP,
        SELECTIVE,
        ATTENTION_TAKEN,
    ),
    (
        SWAP,
        {"num_layers": 1},
        LAST_ATTENTION,
    ),
]


@pytest.mark.parametrize(("name", "job", "text"), REFUSED)
def test_a_job_that_does_not_fit_is_refused_when_the_plan_is_made(name: str, job: dict[str, Any], text: str) -> None:
    settings = {NORM: {"num_layers": 3}} if name == NORM else {}
    assert refusals(name, settings=settings, **job) == [f"MS304 {name}: {text.format(name=name)}"]


def notes(*names: str, settings: dict[str, dict[str, Any]] | None = None, **job: Any) -> list[str]:
    """Return the notes of the plan of a request that must be fine about its first feature."""
    resolution = ask(*names, settings=settings, **job)
    assert resolution.problems == []
    return [row.text for row in resolution.rows if row.kind == "note" and row.feature == names[0]]


@pytest.mark.parametrize("job", [UNIFORM, BLOCK | {"recompute_num_layers": 8}])
@pytest.mark.parametrize("name", [NORM, ACTIVATION, SWAP, ADAPTIVE])
def test_a_feature_for_which_full_recomputation_leaves_nothing_says_so(name: str, job: dict[str, Any]) -> None:
    assert NOTHING_LEFT.format(name) in notes(name, settings=SETTINGS, **job)


def test_main_weights_that_the_optimizer_manages_leave_nothing_to_do() -> None:
    text = "the precision-aware optimizer already manages main weights, so reuse-fp32-param has nothing to do"
    job = {"dtype": "bf16", "precision_aware_optimizer": True, "engine_installed": True}
    assert text in notes(REUSE, **job)


EXPERTS = {"num_experts": 4, "router_topk": 2, "grouped_experts": True}


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            {},
            (
                "grouped experts compute their activation inside the grouped product, and the model has no other MLP, so "
                "activation-recompute has nothing to do"
            ),
        ),
        ({"moe_layers": 6}, "grouped experts keep their activation; only dense layers and shared experts recompute it"),
        (
            {"shared_expert_hidden_size": 64},
            "grouped experts keep their activation; only dense layers and shared experts recompute it",
        ),
    ],
)
def test_grouped_experts_keep_their_activation_and_the_plan_says_so(job: dict[str, Any], text: str) -> None:
    assert text in notes(ACTIVATION, "moe-grouped-gemm", **EXPERTS | job)


@pytest.mark.parametrize(
    ("job", "owners"),
    [
        ({"num_experts": 4}, {"mlp", "experts"}),
        (EXPERTS, {"mlp"}),
        (EXPERTS | {"shared_expert_hidden_size": 64}, {"mlp", "shared experts"}),
        (EXPERTS | {"shared_expert_hidden_size": 64, "shared_expert_overlap": True}, {"mlp"}),
    ],
)
def test_the_tensors_that_are_not_kept_are_those_of_parts_that_recompute(job: dict[str, Any], owners: set[str]) -> None:
    feature = CATALOG.feature(ACTIVATION)
    names = feature(feature.Args(), World(MODEL | job)).recomputed_tensors()
    assert {name.partition(":")[0] for name in names} == owners


@pytest.mark.parametrize(
    ("other", "settings"),
    [("recompute", FULL), ("recompute-in-advance", {}), ("recompute-in-bubble", {}), ("zero-bubble", {"recompute": "all"})],
)
@pytest.mark.parametrize("name", [NORM, ACTIVATION, SWAP])
def test_another_feature_may_leave_nothing(name: str, other: str, settings: dict[str, Any]) -> None:
    assert NOTHING_LEFT.format(name) in notes(name, other, settings={other: settings}, pp=2)


@pytest.mark.parametrize(
    "job", [BLOCK, SELECTIVE | {"recompute_modules": ("moe",)}, {"dtype": "bf16", "optimizer": "sgd"}, {"cuda_graphs": False}]
)
@pytest.mark.parametrize("name", [NORM, ACTIVATION, SWAP, ADAPTIVE, HOST])
def test_other_jobs_are_accepted(name: str, job: dict[str, Any]) -> None:
    assert name in active(name, settings=SETTINGS if name == ADAPTIVE else {}, **job)


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        (NORM, {"enable_cuda_graph": True}, ["no_cuda_graphs"]),
        (NORM, {"cuda_graph_impl": "local"}, ["no_cuda_graphs"]),
        (ACTIVATION, {"fp8": "e4m3", "fp4": None}, ["no_low_precision"]),
        (SWAP, {"fp8": None, "fp4": "e2m1"}, ["no_low_precision"]),
        (ADAPTIVE, {"overlap_moe_expert_parallel_comm": True}, ["no_overlapped_micro_batches"]),
        (ADAPTIVE, {"moe_shared_expert_overlap": True}, ["no_shared_expert_overlap"]),
        (REUSE, {"fp8": "e4m3", "fp8_param": True}, ["no_low_precision_weights"]),
        (HOST, {"fp8": "e4m3", "fp8_param": False}, []),
        (HOST, {"optimizer": "muon"}, ["optimizer_is_elementwise"]),
        (HOST, {"use_precision_aware_optimizer": True}, ["no_precision_aware_optimizer"]),
        (HOST, {"optimizer_cpu_offload": True}, ["no_offloaded_optimizer"]),
    ],
)
def test_a_configuration_that_is_built_gets_the_same_answer(name: str, config: dict[str, Any], found: list[str]) -> None:
    feature = CATALOG.feature(name)
    args = feature.Args(**SETTINGS.get(name, {}))
    job = World(MODEL | {"dtype": "bf16", **world_of_config(SimpleNamespace(**config))})
    failures = [failure(one, name, args, job) for one in conditions(feature.spec.constraints)]
    assert [one.condition.name for one in failures if one is not None] == found


@pytest.mark.parametrize(
    ("names", "other", "settings", "text"),
    [
        ((ACTIVATION,), "recompute", {"modules": ["mlp"]}, MLP_TAKEN),
        ((SWAP,), "recompute", {}, ATTENTION_TAKEN),
        ((SWAP,), "recompute-in-advance", {"granularity": "selective"}, ATTENTION_TAKEN),
    ],
)
def test_what_another_feature_recomputes_is_refused_when_the_plan_is_made(
    names: tuple[str, ...], other: str, settings: dict[str, Any], text: str
) -> None:
    for name in names:
        expected = [f"MS304 {name}: {text.format(name=name)}"]
        assert refusals(name, other, pp=2, settings={other: settings}) == expected
        assert refusals(other, name, pp=2, settings={other: settings}) == expected


@pytest.mark.parametrize(("count", "job"), [(8, {}), (4, {"pp": 2}), (2, {"pp": 2, "vpp": 2}), (7, BLOCK)])
@pytest.mark.parametrize("name", [NORM, ACTIVATION])
def test_a_count_that_every_chunk_has_is_accepted(name: str, count: int, job: dict[str, Any]) -> None:
    assert refusals(name, settings={name: {"num_layers": count}}, **job) == []
    assert refusals(name, settings={name: {"num_layers": count + 1}}, **job) != []


def messages(name: str, settings: dict[str, Any], **job: Any) -> list[str]:
    """Return what the conditions of a feature say of a job with a hybrid model."""
    feature = CATALOG.feature(name)
    pattern = pattern_of(job["hybrid_layer_pattern"])
    world = World(MODEL | {"num_layers": len(pattern.layers)} | job)
    failures = [failure(one, name, feature.Args(**settings), world) for one in conditions(feature.spec.constraints)]
    return [one.message for one in failures if one is not None]


@pytest.mark.parametrize(
    ("count", "pattern", "job", "layers"),
    [
        (2, "*-*-", {}, None),
        (3, "*-*-", {}, "2 layers with an MLP or experts"),
        (2, "*-*E|*-", {"pp": 2}, "1 layers with an MLP or experts"),
        (2, "*---*-", {"pp": 2}, None),
        (1, "*-|**", {"pp": 2}, None),
    ],
)
def test_a_count_of_layers_of_a_pattern_is_of_those_with_the_part(
    count: int, pattern: str, job: dict[str, Any], layers: str | None
) -> None:
    text = f"the setting num_layers={count} is greater than the {layers} of a model chunk"
    assert messages(ACTIVATION, {"num_layers": count}, hybrid_layer_pattern=pattern, **job) == ([text] if layers else [])


@pytest.mark.parametrize(
    ("name", "settings", "pattern", "taken", "texts"),
    [
        (SWAP, PARTS, "*-*-*-", 2, None),
        (ACTIVATION, {"num_layers": 2}, "*-*-*-", 3, None),
        (ACTIVATION, {"num_layers": 2}, "*-*-*-", 4, ("leaves 1 of the 3 layers with an MLP or experts", "least 2")),
        (ADAPTIVE, {"budget_mb": 1000, "swap": True}, "-*-*", 3, None),
    ],
)
def test_block_recomputation_of_a_pattern_leaves_layers_with_the_part(
    name: str, settings: dict[str, Any], pattern: str, taken: int, texts: tuple[str, str] | None
) -> None:
    found = messages(name, settings, hybrid_layer_pattern=pattern, **BLOCK | {"recompute_num_layers": taken})
    left, least = texts or ("", "")
    text = (
        f"--recompute-method block recomputes layers as a whole, and {left} of a model chunk. {name} works only in layers "
        f"that are left, and needs at {least} of them"
    )
    assert found == ([text] if texts else [])


@pytest.mark.parametrize(("name", "settings", "pattern"), [(SWAP, PARTS, "*-*---"), (ADAPTIVE, {"budget_mb": 1000}, "-*-*")])
def test_block_recomputation_of_a_pattern_may_leave_nothing(name: str, settings: dict[str, Any], pattern: str) -> None:
    found = messages(name, settings, hybrid_layer_pattern=pattern, **BLOCK | {"recompute_num_layers": 3})
    assert found == [NOTHING_LEFT.format(name)]


@pytest.mark.parametrize(
    ("pattern", "pp", "offloads"),
    [("*-", 1, False), ("*-*-", 1, True), ("-", 1, False), ("*-|--", 2, True), ("--|*-", 2, False)],
)
def test_attention_of_a_pattern_is_offloaded_but_the_last_of_the_last_stage(pattern: str, pp: int, offloads: bool) -> None:
    found = messages(SWAP, PARTS, hybrid_layer_pattern=pattern, pp=pp)
    assert found == ([] if offloads else [LAST_ATTENTION.partition(" | ")[0]])


def test_the_configuration_of_an_optimizer_is_judged_before_megatron_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = CATALOG.feature(HOST)
    features = [kind(kind.Args(), World({}))]
    monkeypatch.setattr(session, "current", lambda: SimpleNamespace(manager=SimpleNamespace(features=features)))
    built: list[Any] = []
    config = SimpleNamespace(optimizer="muon", use_precision_aware_optimizer=True)
    with pytest.raises(MindSpeedError) as error:
        get_megatron_optimizer(lambda config, chunks: built.append(chunks))(config, [])
    assert [problem.message for problem in error.value.problems] == [
        f"{HOST}: the precision-aware optimizer already manages main weights",
        f"{HOST}: the optimizer muon does not update each element independently, which {HOST} needs",
    ]
    assert built == []


class LayerWiseDistributedOptimizer(SimpleNamespace):
    pass


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (SimpleNamespace(), []),
        (SimpleNamespace(chained_optimizers=[SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=False))]), []),
        (
            SimpleNamespace(chained_optimizers=[SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))]),
            ["Megatron FSDP manages main weights itself"],
        ),
        (
            LayerWiseDistributedOptimizer(),
            ["the optimizer is split by layers and does not update each element independently"],
        ),
    ],
)
def test_an_optimizer_that_exists_is_judged_by_its_class(optimizer: Any, found: list[str]) -> None:
    feature: Any = None
    assert list(unsuited_optimizers(feature, optimizer)) == found
