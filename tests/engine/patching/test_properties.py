"""Whatever independent patches are applied, in whatever order: the same result, and the way back is exact."""

import importlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed.engine.planning.patch_checks import check_patches
from mindspeed.engine.planning.plan import PlannedPatch
from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, put, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401
from tests.engine.patching.patch_snapshots import Snapshot

PACKAGES = ("megatron", "fakelib", "glue", "layers")
MODULES = ("megatron.core.transformer.layer", "megatron.core.lazy", "megatron.core.circular_b", "layers", "glue")

MAKERS: tuple[tuple[Any, ...], ...] = (
    (replace, f"{STATE}:get_size", "glue:size_of_42"),
    (replace, "megatron.core.mpu:get_size", "glue:size_of_7"),
    (wrap, f"{STATE}:get_size", "glue:marked"),
    (wrap, f"{STATE}:scale", "glue:starred"),
    (wrap, f"{STATE}:table", "glue:marked"),
    (put, f"{STATE}:HAVE_FAST", True),
    (put, f"{STATE}:LIMIT", 2),
    (put, f"{STATE}:LIMIT", 3),
    (replace, "megatron.core.jit:jit", "glue:other_compiler"),
    (wrap, "megatron.core.circular_a:early", "glue:marked"),
    (mixin, f"{ATTENTION}:Attention", "glue:Loud"),
    (mixin, f"{ATTENTION}:Base", "glue:Quiet"),
    (replace, f"{ATTENTION}:Attention", "layers:RingAttention"),
    (replace, f"{ATTENTION}:SelfAttention", "layers:Helper"),
    (wrap, f"{ATTENTION}:Attention.forward", "glue:marked"),
    (wrap, f"{ATTENTION}:Base.shape", "glue:starred"),
    (wrap, f"{ATTENTION}:Base.build", "glue:starred"),
    (wrap, f"{ATTENTION}:SelfAttention.inherited", "glue:starred"),
    (replace, "fakelib:helper", "glue:triple"),
)
choices = st.lists(st.tuples(st.sampled_from(MAKERS), st.booleans()), max_size=7, unique_by=lambda choice: choice[0][1:])
quickly = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
with_imports = settings(quickly, max_examples=5)


@pytest.fixture
def loaded(fake_megatron: object) -> None:  # noqa: F811
    for name in MODULES:
        importlib.import_module(name)


def made(chosen: list[tuple[tuple[Any, ...], bool]]) -> list[PlannedPatch]:
    """The chosen patches, each of its own owner; the flag puts it into the base plan."""
    return [make(*rest, owner=f"feature-{MAKERS.index((make, *rest))}", ground=ground) for (make, *rest), ground in chosen]


def results() -> list[Any]:
    """What the fake megatron computes."""
    layer, attention = importlib.import_module(MODULES[0]), importlib.import_module(ATTENTION)
    state, circular = importlib.import_module(STATE), importlib.import_module("megatron.core.circular_a")
    return [
        layer.sizes(),
        layer.Layer().forward(1),
        layer.Layer.measure(),
        [cls().forward(2) for cls in (attention.Base, attention.Attention, attention.SelfAttention)],
        [cls.shape(3) for cls in (attention.Base, attention.Attention)],
        attention.Attention.build(4),
        attention.SelfAttention.__mro__[-2].__name__,
        attention.enabled()[0],
        attention.jit(5),
        (attention.times is state.scale, state.LIMIT, layer.LIMIT),
        circular.both(),
    ]


@quickly
@given(chosen=choices)
@pytest.mark.guards(30)
def test_patches_applied_and_undone_leave_everything_as_it_was(loaded: None, chosen: list[Any]) -> None:
    patches = made(chosen)
    before = Snapshot(*PACKAGES)
    if not check_patches(patches):
        active = applied(*patches)
        assert bool(patches) == bool(before.differences(Snapshot(*PACKAGES)))
        active.undo()
    assert before.differences(Snapshot(*PACKAGES)) == []


@quickly
@given(chosen=choices, data=st.data())
def test_the_order_of_patches_of_different_sites_does_not_matter(loaded: None, chosen: list[Any], data: st.DataObject) -> None:
    patches = made(chosen)
    sites = {planned.site: None for planned in patches}
    order = data.draw(st.permutations(list(sites)))
    shuffled = [planned for site in order for planned in patches if planned.site == site]
    if check_patches(patches):
        return
    seen = []
    for these in (patches, shuffled):
        active = applied(*these)
        seen.append(results())
        active.undo()
    assert seen[0] == seen[1]


@quickly
@given(chosen=choices, data=st.data())
def test_conflicts_do_not_depend_on_who_comes_first(loaded: None, chosen: list[Any], data: st.DataObject) -> None:
    patches = made(chosen)
    shuffled = data.draw(st.permutations(patches))
    assert set(check_patches(patches)) == set(check_patches(shuffled))


@with_imports
@given(chosen=choices)
@pytest.mark.guards(28)
def test_patching_before_the_import_gives_what_patching_after_it_gives(fake_megatron: object, chosen: list[Any]) -> None:  # noqa: F811
    import sys

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]

    patches = made(chosen)
    if check_patches(patches):
        return
    forget()
    active = applied(*patches)
    early = results()
    active.undo()
    forget()
    results()
    active = applied(*patches)
    late = results()
    active.undo()
    assert early == late
