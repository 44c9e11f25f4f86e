"""Checkpoints of the roles have the keys of Transformer Engine's, and are converted to those of local layers and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

import pytest
import yaml

import mindspeed
from mindspeed.engine.planning.checkpoint_layers import LayerKind
from mindspeed.workbench.training import conversion
from tests.features.transformer_engine_layers.saved_keys import MODELS, build, saved
from tests.features.transformer_engine_layers.single_rank import single_rank

HERE: Final = Path(__file__).parent
LISTS: Final = yaml.safe_load((HERE / "saved_keys.yaml").read_text("utf-8"))
"""By layers and model. Those of Transformer Engine are what Megatron's wrappers save of modules with its parameters."""


LEVEL_1: Final = ("rms-norm", "swiglu", "flash-attention", "matmul-add")


@pytest.fixture(scope="module")
def _roles(request: pytest.FixtureRequest) -> Iterator[None]:
    world = {"normalization": "RMSNorm", "activation": "silu", "gated_linear_unit": True}
    mindspeed.activate(mindspeed.plan(["transformer-engine-layers", *request.param], world=world, platform="cpu", level=2))
    with single_rank():
        yield
    mindspeed.deactivate()


_QUICK: Final = {"gpt": (), "everything": LEVEL_1}
"""Models that the default tests build, and beside which features: together they have each kind of layer."""
_CASES: Final = [
    pytest.param(
        others, name, id=f"{name}{' with others' * bool(others)}", marks=[pytest.mark.long] * (_QUICK.get(name) != others)
    )
    for others in ((), LEVEL_1)
    for name in MODELS
    if (name, others) != ("gpt", LEVEL_1)
]


@pytest.mark.parametrize(("_roles", "name"), _CASES, indirect=["_roles"])
def test_a_model_saves_the_keys_and_shapes_of_transformer_engines(_roles: None, name: str) -> None:
    assert saved(build(name, engine=True)) == LISTS["engine"][name]


@pytest.mark.long
@pytest.mark.parametrize("layers", LISTS)
def test_the_lists_are_those_of_megatrons_wrappers_and_local_layers(layers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.list_keys", layers], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == LISTS[layers]


def converted(rows: Mapping[str, str], kind: LayerKind) -> dict[str, str]:
    """Return the list of a model after a conversion, as the index of a checkpoint is converted."""
    shapes = {key: tuple(map(int, row.split(" x "))) for key, row in rows.items() if conversion.STATE not in key}
    after = {conversion.renamed(key, shapes, kind): shape for key, shape in shapes.items()}
    result = {key: row for key, row in rows.items() if conversion.STATE in key}
    if kind == "local":
        result = {key: row for key, row in result.items() if conversion.is_local(key)}
    else:
        for key, shape in conversion.states(after):
            result.setdefault(key, f"state of {' x '.join(map(str, shape))}")
    result |= {key: " x ".join(map(str, shape)) for key, shape in after.items()}
    return dict(sorted(result.items()))


@pytest.mark.parametrize("name", MODELS)
def test_the_keys_of_either_layers_become_those_of_the_other(name: str) -> None:
    local, engine = LISTS["local"][name], LISTS["engine"][name]
    assert converted(local, "transformer-engine") == engine
    assert converted(engine, "local") == local
    size = {
        kind: sum(prod(map(int, row.split(" x "))) for row in rows.values() if row[0].isdigit())
        for kind, rows in (("local", local), ("engine", engine))
    }
    assert size["local"] == size["engine"]
