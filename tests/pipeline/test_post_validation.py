"""Optimizer steps that are validated later have the bits of synchronized ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.pipeline.bounds import shortest_period
from mindspeed.pipeline.messages import warm_up
from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Schedule
from mindspeed.pipeline.post_validation import PostValidation, _restore, _settings
from mindspeed.pipeline.search import fastest
from mindspeed.pipeline.simulator import period
from mindspeed.workbench.verification.pool import WorkerPool


class Numbers:
    """A data iterator."""

    name = "numbers"

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


def test_data_is_repeated_until_it_is_released() -> None:
    from mindspeed.pipeline.repeated_forwards import KeptIterator

    numbers = Numbers()
    kept = KeptIterator(numbers)
    assert [next(kept), next(kept)] == [1, 2]
    kept.rewind()
    assert [next(kept)] == [1]
    kept.rewind()
    kept.release()
    assert [next(kept) for _ in range(4)] == [1, 2, 3, 4]
    assert (numbers.count, kept.name) == (4, "numbers")


@pytest.mark.parametrize(
    "shape", [PipelineShape(4, 1, 8), PipelineShape(4, 2, 8), PipelineShape(3, 2, 6, "v"), PipelineShape(2, 1, 1)]
)
def test_the_warm_up_of_a_rank_needs_only_that_of_others_and_gaps_end_it(shape: PipelineShape) -> None:
    schedule = fastest(shape, Costs(1, 1.3, 0.8), repeated=True)[0]
    first = warm_up(schedule)
    made = {(shape.stage_of(rank, op.chunk), op.micro_batch) for rank, ops in enumerate(first.ops) for op in ops}
    assert all(ops for ops in first.ops)
    for rank, (ops, whole) in enumerate(zip(first.ops, schedule.ops, strict=True)):
        assert ops == whole[: len(ops)]
        assert {op.kind for op in ops} == {"F"}
        needed = {(shape.stage_of(rank, op.chunk) - 1, op.micro_batch) for op in ops}
        assert {unit for unit in needed if unit[0] >= 0} <= made


def test_a_forward_pass_that_waits_for_a_backward_pass_of_another_rank_is_not_repeated() -> None:
    shape = PipelineShape(2, 1, 2)
    ops = (("F0", "D0", "F1", "D1"), ("F0", "F1", "D0", "D1"))  # cannot run, as rank 0 needs D0 of rank 1 for its own
    lists = tuple(tuple(Op(word[0], 0, int(word[1])) for word in rank) for rank in ops)  # type: ignore[arg-type]
    assert [len(ops) for ops in warm_up(Schedule("gap", shape, lists)).ops] == [1, 1]


@pytest.mark.parametrize(
    ("shape", "limit", "synchronized", "before", "later"),
    [
        (PipelineShape(4, 1, 8), None, 27.8, 27.8, 26.1),
        (PipelineShape(8, 1, 16), 8, 60.1, 60.1, 60.1),
        (PipelineShape(8, 2, 16, "v"), 16, 108.3, 107.4, 106.2),
    ],
)
def test_steps_that_overlap_have_a_shorter_period(
    shape: PipelineShape, limit: int | None, synchronized: float, before: float, later: float
) -> None:
    costs = Costs(1, 1.3, 0.8)
    alone, overlapping = fastest(shape, costs, "none", limit), fastest(shape, costs, "none", limit, repeated=True)
    periods = [period(schedule, costs) for schedule, _ in (alone, overlapping)]
    assert [alone[1].makespan, *periods] == pytest.approx([synchronized, before, later])
    assert shortest_period(shape, costs) <= later
    assert limit is None or max(overlapping[1].peak) <= limit


STEPS = [(0, 1.0), (0, 100.0), (0, 1.0), (1, 200.0), (1, 1.0), (0, 1.0)]
"""Stage and factor of its gradients: steps 2 and 4 are clipped for the gradients of one stage alone."""
INFINITE = [(0, 1.0), (1, float("inf")), (0, 1.0), (0, float("nan")), (0, 1.0), (1, 100.0), (0, 1.0)]


def on_rank(name: str, *arguments: Any) -> Any:
    """Run a function of `post_validation_job`, which imports Megatron, on this rank."""
    from tests.pipeline import post_validation_job

    return getattr(post_validation_job, name)(*arguments)


def compared(pool: WorkerPool, ranks: int, steps: Any, *given: Any, settings: Any = None, **world: Any) -> list[dict[str, Any]]:
    sizes = {"world_size": ranks, "num_layers": 8, "micro_batch_size": 2, "tied_embeddings": False, "mtp_num_layers": 0}
    names = ("zero-bubble", *(["virtual-pipeline"] if world.get("vpp", 1) > 1 else []))
    replicas = ranks // world["pp"]
    layer = Layer(
        "test",
        features=names,
        settings={"zero-bubble": {"post_validation": True, **(settings or {})}},
        world=sizes | {"global_batch_size": 8 * replicas} | world,
        platform="cpu",
    )
    plan = registry.resolve([layer])
    return pool.call(on_rank, ranks, "compared", steps, *given, plan=plan)


def assert_equal(results: list[dict[str, Any]], repeated: int) -> None:
    for result in results:
        assert result["different"] == 0 < result["tensors"]
        for name in ("losses", "logged", "scale", "scheduled", "rates"):
            assert result["actual"][name] == result["expected"][name], name
        assert result["finite"]
        assert result["repeated"] == repeated


def test_a_clipped_step_is_repeated_with_the_bits_of_a_synchronized_one(pool: WorkerPool) -> None:
    """The norm of a step is returned one step later."""
    results = compared(pool, 2, STEPS[:3], "fp32", False, pp=2)
    assert_equal(results, repeated=1)
    for result in results:
        assert result["actual"]["norms"] == pytest.approx([0.0, *result["expected"]["norms"][:2]], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "dtype", "sharded", "world"),
    [
        (2, "fp32", False, {"pp": 2}),
        (2, "bf16", False, {"pp": 2, "vpp": 2}),
        (4, "bf16", False, {"pp": 4}),
        (4, "fp32", True, {"pp": 2}),
        (4, "bf16", True, {"pp": 2}),
    ],
)
def test_clipped_steps_are_repeated_with_the_bits_of_synchronized_ones(
    pool: WorkerPool, ranks: int, dtype: str, sharded: bool, world: dict[str, Any]
) -> None:
    assert_equal(compared(pool, ranks, STEPS, dtype, sharded, **world), repeated=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "sharded", "world"),
    [(2, False, {"pp": 2}), (4, True, {"pp": 2}), (4, False, {"pp": 4})],
)
def test_skipped_steps_of_fp16_leave_the_bits_of_synchronized_ones(
    pool: WorkerPool, ranks: int, sharded: bool, world: dict[str, Any]
) -> None:
    """Loss scale, learning rate and weight decay are those of a skipped step too."""
    results = compared(pool, ranks, INFINITE, "fp16", sharded, **world)
    assert_equal(results, repeated=3)
    assert [result["actual"]["scheduled"] for result in results] == [5] * ranks


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "steps", "resume"), [("bf16", STEPS, 2), ("fp16", INFINITE, 4)])
def test_a_checkpoint_has_the_validated_step(pool: WorkerPool, dtype: str, steps: Any, resume: int) -> None:
    """It is saved behind a step that is to be repeated or skipped; the run that resumes it has the bits of one in one piece."""
    results = compared(pool, 2, steps, dtype, False, "adam", None, resume, pp=2)
    assert_equal(results, repeated=2 if dtype == "bf16" else 3)


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
"""A model whose forward passes count tokens and sum losses for the log."""
LENGTHS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
"""Messages with headers."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "optimizer", "arguments", "world"),
    [
        ({"placement": "v"}, "adam", {}, {"pp": 2, "vpp": 2}),
        ({"costs": [10, 20, 7, 10], "hop": 1}, "sgd", {}, {"pp": 2, "vpp": 2}),
        ({"recompute": "least", "limit": 3}, "adam", {}, {"pp": 2, "vpp": 2}),
        ({"recompute": "all"}, "adam", LENGTHS, {"pp": 2}),
        ({"placement": "v"}, "adam", LENGTHS, {"pp": 4, "vpp": 2}),
        ({}, "adam", EXPERTS, {"pp": 2, "num_experts": 4}),
    ],
    ids=["v", "sgd", "recompute", "lengths", "v-lengths", "experts"],
)
def test_repeated_warm_ups_of_other_schedules_and_models(
    pool: WorkerPool, settings: dict[str, Any], optimizer: str, arguments: dict[str, Any], world: dict[str, Any]
) -> None:
    given = (STEPS, "fp32", False, optimizer, arguments)
    assert_equal(compared(pool, world["pp"], *given, settings=settings, **world), repeated=2)


def test_undoing_a_step_restores_what_a_kernel_counts_in_its_group() -> None:
    """As fused optimizers do, in a number that their first step creates, or in a tensor that they change in place."""
    count = torch.zeros(())
    inner = SimpleNamespace(param_groups=[{"params": [], "lr": 1.0, "count": count}])
    before = _settings(inner)
    (group,) = inner.param_groups
    group["step"] = 1
    group["lr"] = 2.0
    count += 1
    _restore(inner, before)
    assert group == {"params": [], "lr": 1.0, "count": torch.zeros(())}
    assert group["count"] is count


def test_methods_of_optimizers_return_at_deactivation_with_a_warning_for_a_pending_step() -> None:
    class Optimizer:
        def step(self) -> None: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    optimizer, validation = Optimizer(), PostValidation(None)
    validation.attach(optimizer)
    assert validation.is_attached
    assert set(vars(optimizer)) == {"step", "zero_grad"}
    validation._steps.append(object())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="was not validated"):
        validation.detach()
    assert vars(optimizer) == {}
    assert not validation.is_attached
    assert not validation.is_pending
