"""Every rule of context parallelism is a problem with its fix, for worlds that need not exist."""

from typing import Any

import pytest

from mindspeed.plugins import World
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.plugins.manager import FeatureManager
from tests.features.resolving import CATALOG, MODEL, ask, overrides, refusals

ALGORITHMS = ["ring-attention", "ulysses-attention", "kv-allgather-cp"]
ALL = [*ALGORITHMS, "hybrid-attention", "adaptive-cp"]
RING, ULYSSES, HYBRID = "ring-attention", "ulysses-attention", "hybrid-attention"
TWO = {HYBRID: {"ulysses_degree": 2}}


def test_the_size_is_all_that_it_sets():
    assert overrides("context-parallel", size=2) == {"context_parallel_size": 2}
    assert overrides("context-parallel", size=1) == {"context_parallel_size": 1}


def zigzag(name: str) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    message = f"MS304 {name}: sequence length 60 is not a multiple of 2 x cp = 2 x 4 | --seq-length 64 (a multiple of 2 x 4)"
    return name, TWO if name == HYBRID else {}, {"cp": 4, "seq_length": 60}, message


def prediction(name: str) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    settings = {HYBRID: TWO, "adaptive-cp": {"adaptive-cp": {"dynamic_mask": True}}}.get(name, {})
    message = (
        f"MS304 {name}: multi-token prediction expects tokens in Megatron's zig-zag order, which {name} does not "
        "use | use a context-parallel feature with ring attention or all-gather (mindspeed features list --slot "
        "context-parallel shows them), or --mtp-num-layers 0"
    )
    return name, settings, {"cp": 4, "mtp_num_layers": 1}, message


def cached(name: str, **settings: Any) -> dict[str, Any]:
    return {name: settings | (TWO[HYBRID] if name == HYBRID else {})}


RULES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # lengths
    *map(zigzag, (RING, "kv-allgather-cp", HYBRID)),
    (
        ULYSSES,
        {},
        {"cp": 4, "seq_length": 62},
        "MS304 context-parallel: sequence length 62 is not divisible by cp=4 | --seq-length 64 (a multiple of 4)",
    ),
    # heads
    (
        ULYSSES,
        {},
        {"cp": 4, "num_attention_heads": 6, "num_query_groups": 2},
        "MS304 ulysses-attention: 6 attention heads are not divisible by cp x tp = 4 x 1 "
        "| --cp 2 (so that cp x tp divides the number of heads), or use ring-attention, which does not split heads",
    ),
    (
        HYBRID,
        TWO,
        {"cp": 4, "num_attention_heads": 7, "num_query_groups": 1},
        "MS304 hybrid-attention: 7 attention heads are not divisible by ulysses_degree x tp = 2 x 1 "
        "| --set hybrid-attention.ulysses_degree=7 (a divisor of the number of heads per tensor-parallel rank)",
    ),
    # the window of a double ring
    *(
        (
            RING,
            {RING: {"window": window}},
            {"cp": 4},
            (
                f"MS304 ring-attention: the ring of cp=4 ranks cannot be split into two or more inner rings of window={window} "
                "ranks | --set ring-attention.window=1, or --set ring-attention.window=2 (a divisor of 4, smaller than 4)"
            ),
        )
        for window in (3, 4, 8)
    ),
    (
        RING,
        {RING: {"window": 0}},
        {"cp": 4},
        (
            "MS301 ring-attention.window is 0: input should be greater than or equal to 1 | --set ring-attention.window=1 "
            "(Number of neighbouring ranks in an inner ring, such as those of a node. Keys and values pass around each inner "
            "ring, then between the inner rings. 1 = one ring of all ranks)"
        ),
    ),
    *(
        (
            HYBRID,
            {HYBRID: {"ulysses_degree": 2, "window": window}},
            {"cp": 8},
            (
                "MS304 hybrid-attention: the ring of cp=8 / ulysses_degree=2 ranks cannot be split into two or more inner "
                f"rings of window={window} ranks | --set hybrid-attention.window=1, or --set hybrid-attention.window=2 (a "
                "smaller divisor of the ring size)"
            ),
        )
        for window in (3, 4)
    ),
    # neighbours of a hybrid
    (
        HYBRID,
        {},
        {"cp": 4},
        (
            "MS304 hybrid-attention: ulysses_degree, the number of ranks that exchange tokens for heads, is not set | --set "
            "hybrid-attention.ulysses_degree=2 (ideally the number of ranks of a node)"
        ),
    ),
    (
        HYBRID,
        {HYBRID: {"ulysses_degree": 1}},
        {"cp": 4},
        (
            "MS301 hybrid-attention.ulysses_degree is 1: input should be greater than or equal to 2 | --set "
            "hybrid-attention.ulysses_degree=2 (Number of neighbouring ranks that exchange tokens for attention heads by "
            "all-to-all (Ulysses). Best: the number of ranks of a node. Required)"
        ),
    ),
    *(
        (
            HYBRID,
            TWO,
            {"cp": cp, "world_size": cp, "seq_length": 6 * cp},
            (f"MS304 hybrid-attention: ulysses_degree=2 does not split cp={cp} into two or more groups of equal size | --cp 1"),
        )
        for cp in (2, 3)
    ),
    # predicting more tokens than the next
    *map(prediction, (ULYSSES, HYBRID, "adaptive-cp")),
    # what backward keeps
    *(
        (
            name,
            cached(name, interval=1),
            {"cp": 8},
            (
                f"MS301 {name}: interval=1 selects layers that keep keys and values, but with keep=none no layer does | --set "
                f"{name}.keep=full, or --set {name}.interval=0"
            ),
        )
        for name in (RING, ULYSSES, HYBRID)
    ),
    *(
        (
            name,
            cached(name, interval=interval, keep="half"),
            {"cp": 8} | model,
            f"MS304 {name}: the setting interval={interval} skips {interval} attention layers after each one to which the "
            f"setting keep applies. The model has {interval} attention layers, so keep would apply only to the first one. "
            f"With interval=0, it applies to every attention layer | --set {name}.interval=0",
        )
        for name in (RING, ULYSSES, HYBRID)
        for interval, model in ((8, {}), (4, {"hybrid_layer_pattern": "*-*-*-*-"}))
    ),
    (
        RING,
        {RING: {"keep": "some"}},
        {"cp": 4},
        (
            "MS301 ring-attention.keep is 'some': input should be 'none', 'half' or 'full' | --set "
            "ring-attention.keep=none (Received blocks that are kept for backward: none (all are received again), half (keys "
            "are kept) or full (keys and values). Keeping blocks saves transfers but uses memory)"
        ),
    ),
    (
        ULYSSES,
        {ULYSSES: {"keep": "full"}},
        {"cp": 2},
        (
            "MS304 ulysses-attention: keep=full stores keys as they are before the all-to-all. This saves memory only if the "
            "all-to-all copies key heads to several ranks. Here it copies none: cp x tp = 2 x 1 divides the 4 key heads | "
            "--set ulysses-attention.keep=none"
        ),
    ),
    (
        ULYSSES,
        {ULYSSES: {"kv_allgather": True}},
        {"cp": 2, "tp": 2, "vocab_size": 512},
        (
            "MS304 ulysses-attention: kv_allgather supports one key head per tensor-parallel rank, but the model has 4 key "
            "heads for tp=2 ranks | --set "
            "ulysses-attention.kv_allgather=false, or use kv-allgather-cp, which gathers any number of key heads"
        ),
    ),
]


@pytest.mark.parametrize(("name", "settings", "world", "expected"), RULES)
def test_a_broken_rule_is_a_problem_with_its_fix(name, settings, world, expected):
    assert refusals(name, settings=settings, model=MODEL | world) == [expected]


def test_ranks_that_no_degree_splits_are_told_instead_of_the_missing_degree():
    assert refusals(HYBRID, settings={}, model=MODEL | {"cp": 2}) == [
        "MS304 hybrid-attention: no ulysses_degree splits cp=2 into two or more groups of two or more ranks | --cp 4 (or a "
        "larger product of two numbers)"
    ]


@pytest.mark.parametrize("name", ALL)
def test_one_rank_keeps_every_rule_and_changes_nothing(name):
    world = {"cp": 1, "seq_length": 61, "num_attention_heads": 7, "num_query_groups": 7}
    resolution = ask(name, settings={"adaptive-cp": {"dynamic_mask": True}} if name == "adaptive-cp" else {}, **world)
    assert resolution.problems == []
    assert "the context-parallel size is 1, so context-parallel changes nothing" in [row.text for row in resolution.rows]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("world", "message"),
    [
        (
            {"softmax_type": "learnable"},
            (
                "softmax_type is learnable, but {name} computes only the vanilla softmax | --softmax-type vanilla, or remove "
                "{name}"
            ),
        ),
        (
            {"windowed_attention": True},
            (
                "attention has a sliding window (window_size), which {name} does not support | --no-windowed-attention, or "
                "remove {name}"
            ),
        ),
    ],
)
def test_other_attention_is_refused(name, world, message):
    settings = {HYBRID: TWO, "adaptive-cp": {"adaptive-cp": {"dynamic_mask": True}}}.get(name, {})
    assert refusals(name, settings=settings, cp=4, **world) == [f"MS304 {name}: {message.format(name=name)}"]
    assert refusals(name, settings=settings, cp=1, **world) == []


@pytest.mark.parametrize("name", ["context-parallel", *ALL])
def test_one_rank_is_left_to_megatron(name):
    feature = CATALOG.feature(name)
    manager = FeatureManager([feature(feature.Args(), World({"cp": 1}))])
    implemented = {hook for hook in HOOKS if manager.owners(hook)}
    assert implemented == ({"megatron_args"} if name == "context-parallel" else set())
    overrides = [override for _, answer in manager.call("megatron_args") for override in answer]
    assert [(override.argument, override.value) for override in overrides] == (
        [("context_parallel_size", 1)] if name == "context-parallel" else []
    )
