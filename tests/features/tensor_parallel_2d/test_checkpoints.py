"""Distributed checkpoints of every split load into every other one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mindspeed
from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.planning.checkpoint_state import record_of
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe

NAME = "tensor-parallel-2d"
RECIPE = Recipe(LLAMA)


def plan(layout: tuple[int, int] | int) -> Any:
    """A grid (x, y), or so many ranks in one dimension."""
    if isinstance(layout, int):
        return mindspeed.plan(features=[], platform="cpu", world={"world_size": layout, "tp": layout, **RECIPE.world()})
    x, y = layout
    settings, world = {NAME: {"x": x, "y": y}}, {"world_size": x * y, "tp": x * y, **RECIPE.world()}
    return mindspeed.plan(features=[NAME], platform="cpu", settings=settings, world=world)


def sharded_state(chunks: list[Any]) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunks)[0].sharded_state_dict(metadata={"non_homogeneous_layers": True})


def save(folder: str) -> None:
    from megatron.core import dist_checkpointing

    from mindspeed.workbench.verification.model import build_chunks

    dist_checkpointing.save(sharded_state(build_chunks(RECIPE)), folder)


def load(folder: str) -> list[str]:
    """Names of the parameters that are not what the same model has when it is built in this layout."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    from mindspeed.workbench.verification.model import build_chunks

    chunks = build_chunks(RECIPE)
    (model,) = unwrap_model(chunks)
    built = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(dist_checkpointing.load(sharded_state(chunks), folder))
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, built[name])]


def load_file_of_rank(folder: str) -> list[str]:
    """Save this rank's weights in a file as `--ckpt-format torch` does, and load a file in this layout.

    Return the names of the parameters that are not what they were, or the refusals of the other grid.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from mindspeed.workbench.verification.model import build_chunks

    (model,) = unwrap_model(build_chunks(RECIPE))
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    built = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if not list(Path(folder).glob(f"{name}.pt")):
        torch.save(model.state_dict_for_save_checkpoint(), Path(folder, f"{name}.pt"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    try:
        model.load_state_dict(torch.load(Path(folder, f"{name}.pt"), weights_only=False))
    except RuntimeError as error:
        return ["size mismatch" if "size mismatch for decoder.layers.0.mlp.linear_fc1.weight" in str(error) else str(error)]
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, built[name])]


def test_a_checkpoint_with_a_file_for_each_rank_loads_into_the_same_grid_only(pool: WorkerPool, tmp_path: Path) -> None:
    for grid, found in [((1, 2), []), ((2, 1), ["size mismatch"])]:
        assert pool.call(load_file_of_rank, 2, str(tmp_path), plan=plan(grid)) == [found] * 2


def ranks(layout: tuple[int, int] | int) -> int:
    return layout if isinstance(layout, int) else layout[0] * layout[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((1, 2), 1),
        (1, (1, 2)),
        ((1, 2), (2, 1)),
        ((2, 2), 1),
        ((2, 2), 4),
        ((2, 2), (1, 4)),
        (1, (2, 2)),
        (4, (2, 2)),
        ((1, 4), (2, 2)),
        (2, (2, 2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_split_loads_into_another(pool: WorkerPool, tmp_path: Path, saved: Any, loaded: Any) -> None:
    pool.call(save, ranks(saved), str(tmp_path), plan=plan(saved))
    assert pool.call(load, ranks(loaded), str(tmp_path), plan=plan(loaded)) == [[]] * ranks(loaded)


@pytest.mark.parametrize(
    ("saved", "job"),
    [
        ((2, 2), ["--tp", "4"]),
        (4, ["--tp", "4", "--features", NAME, "--set", f"{NAME}.x=2", "--set", f"{NAME}.y=2"]),
        ((2, 2), ["--tp", "4", "--features", NAME, "--set", f"{NAME}.x=1", "--set", f"{NAME}.y=4"]),
    ],
    ids=["removed", "added", "changed"],
)
def test_checkpoint_diff_calls_another_split_convertible(tmp_path: Path, saved: Any, job: list[str]) -> None:
    before = plan(saved)
    record_of(before, registry.feature_classes(before), registry.content_of(before)).write(tmp_path)
    shape = {"--" + name.replace("_", "-"): str(RECIPE.world()[name]) for name in ("hidden_size", "ffn_hidden_size")}
    sizes = ["--platform", "cpu", "--world-size", "4", *(word for option in shape.items() for word in option)]
    result = CliRunner().invoke(main, ["checkpoint", "diff", str(tmp_path), *sizes, *job, "--json"])
    assert result.exit_code == 0, result.output
    verdicts = {change["feature"]: change["verdict"] for change in json.loads(result.stdout)["changes"]}
    assert verdicts.pop(NAME) == "convertible"
    assert "refused" not in verdicts.values()


def read_split_dimension() -> list[str]:
    """What readers of Megatron's attributes get of the first linear weight: its rows are joined, or the dimension is asked."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.utils import unwrap_model

    from mindspeed.plugins import MindSpeedError
    from mindspeed.workbench.verification.model import build_chunks

    model_parallel_cuda_manual_seed(1)
    drawn = replace(RECIPE, shape=LLAMA.with_options({"perform_initialization": True}))  # else Megatron sets no attributes
    (model,) = unwrap_model(build_chunks(drawn))
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    readers = {
        "joined": lambda: torch.cat([weight, weight], dim=weight.partition_dim),
        "number": lambda: int(weight.partition_dim),
        "compared": lambda: weight.partition_dim == 0,
    }
    found = [f"tensor_model_parallel {weight.tensor_model_parallel}"]  # Megatron's gradient norm counts it once a rank
    for name, read in readers.items():
        try:
            read()
            found.append(f"{name}: read")
        except MindSpeedError as error:
            found.append(f"{name}: {error.problems[0].message}")
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((2, 1), marks=pytest.mark.long)], ids=str)
def test_a_weight_that_is_split_along_both_dimensions_has_no_split_dimension(pool: WorkerPool, layout: Any) -> None:
    refused = (
        f"{NAME}: code outside this feature reads partition_dim, the dimension along which a weight is split, but this weight "
        "is split along two dimensions"
    )
    answers = {
        "joined": "cat(): argument 'dim' must be int, not SplitAlongBothDimensions",
        "number": refused,
        "compared": refused,
    }
    expected = [f"{name}: {'read' if layout == (2, 1) else answer}" for name, answer in answers.items()]
    assert pool.call(read_split_dimension, 2, plan=plan(layout)) == [["tensor_model_parallel True", *expected]] * 2
