import dataclasses
import json
import subprocess
import sys

import pytest

from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride, PlannedPatch, plan_from_json
from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote, Reason, ReasonKind, Value
from mindspeed.plugins import ArgOverride, Mixin, Ref, Replace, Set, When, World, Wrap

PATCHES = [
    Replace("megatron.core.a:f", "acme.a:f", reason="faster", clears=("megatron.core.a:cached",)),
    Wrap("megatron.core.a:g", "acme.a:wrap_g", reason="counted", when=When(platform="cpu", megatron=">=0.15")),
    Mixin("megatron.core.a:C", "acme.a:C", reason="one more method", phase="build"),
    Set("megatron.core.a:LIMIT", 3, reason="three is enough"),
    Set("megatron.core.a:jit", Ref("acme.a:identity"), reason="nothing to fuse"),
]


@pytest.fixture
def plan():
    return ActivationPlan(
        features=(
            PlannedFeature(
                "a",
                "acme",
                "1.0",
                (Reason("a", ReasonKind.REQUESTED, source="API"),),
                {"size": Value(2, "API", ("default: 1",))},
            ),
        ),
        world=World({"tp": 2, "platform": "cpu", "recompute_modules": ("mlp", "moe")}),
        overrides=(PlannedOverride(("a",), ArgOverride("tensor_model_parallel_size", 2, "two ranks")),),
        patches=tuple(PlannedPatch("a", patch, patch.target) for patch in PATCHES),
        rows=(PlanNote("note", "a", "something"),),
        environment={"platform": "cpu", "megatron": "0.16.1"},
    )


def test_a_plan_survives_json(plan):
    text = json.dumps(plan.to_json())
    assert plan_from_json(json.loads(text)) == plan
    assert plan_from_json(json.loads(text)).digest == plan.digest


def test_the_digest_sees_settings_versions_and_patches_but_not_sources(plan):
    feature = plan.features[0]
    same = dataclasses.replace(plan, features=(feature._replace(settings={"size": Value(2, "job file")}),), rows=())
    assert same.digest == plan.digest
    others = [
        dataclasses.replace(plan, features=(feature._replace(settings={"size": Value(4, "API")}),)),
        dataclasses.replace(plan, features=(feature._replace(version="1.1"),)),
        dataclasses.replace(plan, environment={"platform": "cpu", "megatron": "0.15.3"}),
        dataclasses.replace(plan, patches=plan.patches[:-1]),
        dataclasses.replace(plan, world=World({**plan.world.known(), "tp": 4})),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 6


def test_the_digest_leaves_out_what_only_the_processes_of_a_job_know(plan):
    with_torch = dataclasses.replace(plan, environment={**plan.environment, "torch": "2.13.0"})
    launched = dataclasses.replace(plan, world=World({**plan.world.known(), "world_size": 2}))
    assert with_torch.digest == launched.digest == plan.digest
    assert plan.is_same(with_torch)
    assert not plan.is_same(launched)


def test_a_plan_whose_content_was_changed_is_refused(plan):
    data = plan.to_json()
    data["world"]["tp"] = 4
    with pytest.raises(ValueError, match=f"the plan digest {plan.digest} does not match the content of the plan"):
        plan_from_json(data)


def test_a_plan_of_an_older_format_is_refused_with_what_to_do(plan):
    message = "^the plan has format 2, but this mindspeed reads 3; make the plan again$"
    with pytest.raises(ValueError, match=message):
        plan_from_json(plan.to_json() | {"format": 2})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Replace("megatron.core.f", "a:b", reason="x"),
            "target 'megatron.core.f' is not of the form 'package.module:Qual.name'",
        ),
        (
            lambda: Replace("megatron.core:f", "a.b", reason="x"),
            "reference 'a.b' is not of the form 'package.module:Qual.name'",
        ),
        (lambda: Wrap("megatron.core:f", "a:b", reason=""), "the wrap of megatron.core:f has no reason"),
    ],
)
def test_a_malformed_patch_is_refused_where_it_is_written(make, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is asserted
        make()
    assert str(caught.value) == message


LIGHT = """
import sys, importlib, pkgutil
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "torch_npu"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Block())
import mindspeed
third = {m.split(".")[0] for m in sys.modules} & {"pydantic", "pluggy", "click", "yaml", "rich", "packaging"}
assert not third, f"import mindspeed loads {third}"
import mindspeed.plugins, mindspeed.registry, mindspeed.cli, mindspeed.platforms
from mindspeed.plugins.discovery import discover
for module in pkgutil.iter_modules(mindspeed.plugins.__path__, "mindspeed.plugins."):
    if not module.name.endswith(".testing"):
        importlib.import_module(module.name)
catalog = discover()
assert not catalog.broken, {n: str(r.problem) for n, r in catalog.broken.items()}
print(len(catalog.usable))
"""


@pytest.mark.guards(22, processes=True)
def test_declarations_import_neither_torch_nor_megatron():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12
