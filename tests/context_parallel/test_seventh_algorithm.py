"""An algorithm of another distribution works with every feature that needs something of the context-parallel attention."""

from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import Resolution, resolve
from mindspeed.features.eod_reset import layers as eod_reset
from mindspeed.plugins import Capability, Category, Feature, FeatureArgs, FeatureSpec, Requires, Slot, World, hookimpl
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from tests.features.resolving import CATALOG, MODEL

NAME = "acme-attention"
WORLD = MODEL | {"cp": 2, "world_size": 2, "rotary": False, "global_batch_size": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "alibi": {},
    "eod-reset": {},
    "shared-attention-mask": {"kind": "prefix", "prefix": 4},
}
"""Features that need something of the algorithm, with settings that need it."""


class AcmeCoreAttention(CoreAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return value


def algorithm(*capabilities: str) -> type[Feature[Any]]:
    class Acme(Feature[FeatureArgs]):
        """A seventh algorithm."""

        spec = FeatureSpec(
            name=NAME,
            category=Category.CONTEXT_PARALLEL,
            slots={Slot.CONTEXT_PARALLEL},
            provides=set(capabilities),
            constraints=(Requires("context-parallel", reason="it owns the group"),),
        )

        @hookimpl
        def layer_spec(self, spec: Any, config: Any) -> Any:
            return with_core_attention(spec, AcmeCoreAttention, self)

    return Acme


ABLE = algorithm(Capability.DOCUMENTS, Capability.POSITION_BIAS, Capability.SHARED_MASK)
UNABLE = algorithm()


def catalog(feature: type[Feature[Any]]) -> Catalog:
    return Catalog([*CATALOG.rows, DiscoveredFeature(NAME, "acme", "1.0", "acme.feature:Acme", feature)])


def resolved(other: str, feature: type[Feature[Any]]) -> Resolution:
    layer = Layer("test", (NAME, other), {other: OTHERS[other]}, WORLD)
    return resolve([layer], catalog(feature), made_up("cpu", "0.16.1"), has_variant=lambda op, platform: False)


@pytest.mark.parametrize("other", OTHERS)
def test_an_algorithm_that_provides_what_a_feature_needs_is_accepted(other: str) -> None:
    resolution = resolved(other, ABLE)
    assert resolution.problems == []
    names = [feature.name for feature in resolution.features]
    assert {NAME, other} <= {*names}
    if other != "shared-attention-mask":  # which exchanges nothing where there is an algorithm
        assert names.index(NAME) < names.index(other)


@pytest.mark.parametrize(
    ("other", "capability"),
    [("alibi", "position-bias"), ("eod-reset", "documents"), ("shared-attention-mask", "shared-mask")],
)
def test_one_that_does_not_is_refused_with_those_that_do(other: str, capability: str) -> None:
    (problem,) = resolved(other, UNABLE).problems
    assert problem.code == "MS202"
    needed = f"{NAME} does not support {capability.replace('-', ' ')}, which {other} needs"
    assert problem.message.startswith(needed)
    able = sorted(name for name in CATALOG.usable if capability in CATALOG.specs[name].provides)
    instead = ", or ".join(f"remove {NAME} and add {one} to the features" for one in able)
    assert problem.fix_text == f"{instead}, or remove {other} or {NAME}"


@pytest.mark.parametrize("other", ["alibi", "eod-reset"])
def test_its_core_attention_gets_what_the_feature_brings(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eod_reset, "_ranks", lambda: 2)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    spec: Any = get_gpt_layer_local_spec()
    known = catalog(ABLE)
    for planned in resolved(other, ABLE).features:
        instance: Any = known.feature(planned.name)(known.models[planned.name](**planned.args), World(WORLD))
        if planned.name in (NAME, other):
            spec = instance.layer_spec(spec, config)
    core = spec.submodules.self_attention.submodules.core_attention
    assert core.module is AcmeCoreAttention
    assert ("position_bias" in core.params) is (other == "alibi")


def test_a_choice_that_is_left_to_mindspeed_takes_none_that_an_active_feature_cannot_work_with() -> None:
    settings = {"context-parallel": {"algorithm": "auto"}, "eod-reset": {}}
    layer = Layer("test", ("eod-reset",), settings, WORLD | {"seq_length": 64, "num_attention_heads": 8, "dtype": "bf16"})
    resolution = resolve([layer], catalog(UNABLE), made_up("cpu", "0.16.1"), has_variant=lambda op, platform: False)
    assert resolution.problems == []
    rows = [row.text for row in resolution.rows if row.kind == "choice"]
    assert f"{NAME}: cannot, it conflicts with eod-reset" in rows
