"""A feature that serves a parallel size does nothing at size 1: the framework asks it for nothing."""

from typing import Any

import pytest

from mindspeed.plugins import ArgOverride, Category, Feature, FeatureArgs, FeatureSpec, Slot, World, condition, hookimpl
from mindspeed.plugins.answers import changed_tensors
from mindspeed.plugins.conditions import conditions, failure, obstacle
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors


@condition("cp is {world.cp}")
def never(args: Any, world: World) -> bool:
    """Hold nowhere."""
    return False


MORE = SavedTensor("more", 1, 1)


class Hooked(Feature[FeatureArgs]):
    spec = FeatureSpec("hooked", category=Category.TOOL)

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("context_parallel_size", self.world.cp, "a test")]

    @hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return (*tensors, MORE)

    @hookimpl
    def activated(self) -> None:
        raise AssertionError

    @hookimpl
    def model_built(self, chunks: Any) -> None:
        raise AssertionError


class Algorithm(Hooked):
    spec = FeatureSpec(
        "algorithm", category=Category.CONTEXT_PARALLEL, slots={Slot.CONTEXT_PARALLEL, "acme-slot"}, constraints=(never,)
    )


class Owner(Hooked):
    spec = FeatureSpec("owner", category=Category.MEGATRON, sizes={"cp": None}, constraints=(never,))


@pytest.mark.parametrize(
    ("feature", "hooks", "refusals"),
    [
        (Hooked, ["activated", "megatron_args", "model_built"], []),
        (Algorithm, [], []),
        (Owner, ["megatron_args"], ["cp is 1"]),
    ],
)
def test_at_size_1_an_algorithm_is_asked_for_nothing_and_the_owner_for_its_arguments(
    feature: type[Hooked], hooks: list[str], refusals: list[str]
) -> None:
    assert asked(feature, World({})) == (hooks, refusals)


@pytest.mark.parametrize("feature", [Algorithm, Owner])
def test_above_size_1_all_of_it_is_asked(feature: type[Hooked]) -> None:
    assert asked(feature, World({"cp": 2})) == (["activated", "megatron_args", "model_built"], ["cp is 2"])


def asked(feature: type[Hooked], world: World) -> tuple[list[str], list[str]]:
    """The hooks that the manager of a plan calls, and the refusals of the conditions."""
    spec, args = feature.spec, FeatureArgs()
    manager = FeatureManager([feature(args, world)])
    found = [failure(c, spec.name, args, world) for c in conditions(spec.constraints)]
    refusals = [wrong.message for wrong in found if wrong is not None]
    obstacles = obstacle(spec.constraints, spec.name, args, world)
    assert ([] if obstacles is None else [obstacles.message]) == refusals
    return sorted(hook for hook in ("activated", "megatron_args", "model_built") if manager.owners(hook)), refusals


@pytest.mark.parametrize(("cp", "kept"), [(1, ()), (2, (MORE,))])
def test_what_an_algorithm_keeps_for_backward_counts_above_size_1(cp: int, kept: SavedTensors) -> None:
    assert changed_tensors(Algorithm, "saved_tensors", FeatureArgs(), World({"cp": cp}))(()) == kept
