"""No layer reads what has not arrived, and collectives are launched before the products that hide them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import mindspeed
from benchmarks._linear_layers import FFN, HIDDEN, ROWS, grid_of, run_layers
from mindspeed.features.coc.products import GatheredProducts, ScatteredProducts
from mindspeed.features.tensor_parallel_2d.products import Overlap, column_products, row_products
from mindspeed.tensor_parallel.fused import FusedGatheredProducts
from mindspeed.tensor_parallel.linear import Products, plain_weight_gradient
from mindspeed.workbench.verification.pool import WorkerPool

LONG = pytest.mark.long
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
LAYERS = {
    "coc": "mindspeed.features.coc.layers:CocColumnParallelLinear,CocRowParallelLinear",
    "mc2": "mindspeed.features.mc2.layers:Mc2ColumnParallelLinear,Mc2RowParallelLinear",
    "tensor-parallel-2d": "mindspeed.features.tensor_parallel_2d.layers:ColumnParallelLinear2D,RowParallelLinear2D",
}
OVERLAPS = {"overlap_gather": True, "overlap_scatter": True, "overlap_backward": True}


def values(name: str) -> Any:
    return run_layers(LAYERS[name]).values


def run(
    pool: WorkerPool,
    name: str,
    settings: dict[str, Any],
    ranks: int,
    job: Callable[[str], Any] = values,
    **platform: Any,
) -> list[Any]:
    plan = mindspeed.plan(
        features=[name],
        platform="cpu",
        settings={name: settings, "device-emulation": platform},
        world={"world_size": ranks, "tp": ranks},
    )
    return list(pool.call(job, ranks, name, plan=plan))


def forgetful(name: str) -> dict[str, bool]:
    """Run the layers with handles whose wait does nothing; return which values are finite."""
    forgotten: list[Any] = []

    def launched(original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if work is None:
                return None
            forgotten.append(work)
            return Forgotten()

        return launch

    with patch.multiple(dist, **{kind: launched(getattr(dist, kind)) for kind in COLLECTIVES}):
        found = run_layers(LAYERS[name]).values
    for work in forgotten:
        work.wait()
    return {key: bool(value.isfinite().all()) for key, value in found.items()}


class Forgotten:
    """A handle that nobody waits for."""

    def wait(self) -> None: ...


CASES = [
    ("coc", {"parts": 4}, 2),
    pytest.param("mc2", {}, 2, marks=LONG),
    ("tensor-parallel-2d", {"x": 1, "y": 2, **OVERLAPS}, 2),
    pytest.param("tensor-parallel-2d", {"x": 2, "y": 2, **OVERLAPS}, 4, marks=LONG),
    pytest.param("tensor-parallel-2d", {"x": 2, "y": 2}, 4, marks=LONG),
]


@pytest.mark.parametrize(("name", "settings", "ranks"), CASES)
def test_poison_finds_no_early_use(pool: WorkerPool, name: str, settings: dict[str, Any], ranks: int) -> None:
    plain, poisoned = (run(pool, name, settings, ranks, poison=poison) for poison in (False, True))
    for one, other in zip(plain, poisoned, strict=True):
        assert {key: value.equal(other[key]) for key, value in one.items()} == dict.fromkeys(one, True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings", "ranks"), CASES)
def test_poison_finds_forgotten_waits(pool: WorkerPool, name: str, settings: dict[str, Any], ranks: int) -> None:
    for finite in run(pool, name, settings, ranks, forgetful, poison=True):
        assert not finite["0.weight"]


class Recorder(TorchDispatchMode):
    """Counts the products that run while each collective is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.flights: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._overloadpacket in flop_registry
        return func(*args, **(kwargs or {}))

    def recording(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            return Flight(self, kind, original(*args, **kwargs))

        return launch


class Flight:
    """The handle of a collective that is recorded."""

    def __init__(self, recorder: Recorder, kind: str, work: Any) -> None:
        self._recorder, self._work = recorder, work
        self._products, self._place = recorder.products, len(recorder.flights)
        recorder.flights.append((kind.partition("_in")[0].partition("_tensor")[0].partition("_single")[0], 0))

    def wait(self) -> None:
        kind, _ = self._recorder.flights[self._place]
        self._recorder.flights[self._place] = kind, self._recorder.products - self._products
        self._work.wait()


def in_flight(name: str) -> dict[str, list[tuple[str, int]]]:
    """The collectives of both directions in the order of their launches, with the products that ran beside each."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    share, whole = torch.ones(ROWS, HIDDEN), torch.ones(ROWS * ranks, FFN // ranks)
    column: Products
    row: Products | None = None
    weights = torch.ones(FFN // ranks, HIDDEN), torch.ones(HIDDEN, FFN // ranks)
    if name == "coc":
        column, row = GatheredProducts(group, lambda rows: 4), ScatteredProducts(group, lambda rows: 4)
    elif name == "mc2":
        column = FusedGatheredProducts(group)
    else:
        overlap = Overlap(**{key.removeprefix("overlap_"): True for key in [name] if key in OVERLAPS})
        grid = grid_of(1, ranks)
        column, row = (make(grid, overlap, lambda rows: 4) for make in (column_products, row_products))
        weights = torch.ones(FFN, HIDDEN // ranks), torch.ones(HIDDEN // ranks, FFN)
    runs = {
        "column forward": lambda: column.forward(share, weights[0]),
        "column backward": lambda: column.gradients(whole, share, weights[0], plain_weight_gradient),
    }
    if row is not None:
        runs["row forward"] = lambda: row.forward(whole, weights[1])
        runs["row backward"] = lambda: row.gradients(share, whole, weights[1], plain_weight_gradient)
    found = {}
    for direction, run in runs.items():
        recorder = Recorder()
        recording = {kind: recorder.recording(kind, getattr(dist, kind)) for kind in COLLECTIVES}
        with patch.multiple(dist, **recording), recorder:
            run()
        found[direction] = recorder.flights
    return found


GATHERED = [("all_gather", products) for products in (0, 1, 1, 1)]
SCATTERED = [("reduce_scatter", products) for products in (1, 1, 1, 0)]
BACKWARD = [("all_gather", 1), ("reduce_scatter", 1)]
FLIGHTS = {
    "coc": {
        "column forward": GATHERED,
        "column backward": BACKWARD,
        "row forward": SCATTERED,
        "row backward": GATHERED,
    },
    "mc2": {"column forward": [("all_gather", 0)], "column backward": BACKWARD},
}


@pytest.mark.parametrize("name", ["coc", pytest.param("mc2", marks=LONG)])
def test_collectives_are_launched_before_products_and_waited_for_after_them(pool: WorkerPool, name: str) -> None:
    for rank in pool.call(in_flight, 2, name, plan=mindspeed.plan(platform="cpu", world={"world_size": 2})):
        assert rank == FLIGHTS[name]


@pytest.mark.parametrize(
    ("name", "exposed"),
    [
        ("overlap_gather", {"column forward": [0, 4], "row forward": [0, 4]}),
        pytest.param("overlap_scatter", {"column forward": [0, 4], "row forward": [0, 4]}, marks=LONG),
        pytest.param("overlap_backward", {"column backward": [0], "row backward": [0]}, marks=LONG),
    ],
)
def test_overlap_settings_leave_one_part_without_a_product_beside_it(
    pool: WorkerPool, name: str, exposed: dict[str, list[int]]
) -> None:
    """The place of collectives beside which nothing is multiplied: a first or last part, and what the setting does not name."""
    for rank in pool.call(in_flight, 2, name, plan=mindspeed.plan(platform="cpu", world={"world_size": 2})):
        found = {direction: [place for place, (_, beside) in enumerate(rank[direction]) if not beside] for direction in exposed}
        assert found == exposed


def test_a_part_is_launched_before_the_part_before_it_is_used(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, "coc", {"parts": 4}, 2, collective_log=str(tmp_path / "log.{rank}"))
    for rank in range(2):
        rows = [json.loads(line) for line in (tmp_path / f"log.{rank}").read_text().splitlines()]
        assert all(row["waited"] for row in rows if row["event"] == "use")
        gathers = [row["id"] for row in rows if row.get("kind", "").startswith("all_gather")][:4]
        order = [(row["event"], gathers.index(row["id"])) for row in rows if row["id"] in gathers]
        expected = [("launch", 0)]
        for part in range(4):
            expected += [("launch", part + 1)] * (part < 3) + [("wait", part), ("use", part)]
        assert order == expected
