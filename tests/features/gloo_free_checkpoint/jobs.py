"""Work of one rank: slices of shards alone, and Megatron's distributed optimizer with its files."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist

from mindspeed.features.gloo_free_checkpoint import slices
from mindspeed.workbench.verification.shape import Recipe


def without_last_slice(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the starts and lengths of slices: the last one is forgotten."""
    return lambda length, size: list(original(length, size))[:-1]


def one_early(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the places of a slice in the whole state: they begin one number too early."""
    return lambda whole, shard, start, count, group: original(whole, shard, max(start - 1, 0), count, group)


FAULTS: Final = {"_slices": without_last_slice, "_parts": one_early}


def exchange(length: int, whole: int, size: int, fault: str = "") -> tuple[Any, list[float], int]:
    """Gather shards and scatter them again; return the whole, what came back, and the peak of device bytes.

    ``fault`` names a function of `FAULTS` that makes a mistake.
    """
    with patch.object(slices, fault, FAULTS[fault](getattr(slices, fault))) if fault else nullcontext():
        return _exchange(length, whole, size)


def _exchange(length: int, whole: int, size: int) -> tuple[Any, list[float], int]:
    from mindspeed.memory.meter import Meter

    group, rank = dist.group.WORLD, dist.get_rank()
    shard = torch.arange(length, dtype=torch.float32) + 1 + rank * length
    gathered = torch.zeros(whole, device="cpu") if rank == 0 else None
    returned = torch.full((length,), -1.0)
    with Meter() as meter:
        slices.gather(shard, gathered, group, size, torch.device("cpu", 0))
        slices.scatter(gathered, returned, group, size, torch.device("cpu", 0))
    return None if gathered is None else gathered.tolist(), returned.tolist(), meter.peak.device


def save(recipe: Recipe, file: str) -> dict[str, Any]:
    """Train and write the state of the optimizer.

    Returns the states of this rank, the bytes it sent to save them, Megatron's gloo groups, and the numbers in its shards.
    """
    from mindspeed.memory.optimizer_windows import whole_tensors
    from mindspeed.platforms import runtime
    from tests.memory.adam_steps import adam_run

    with adam_run(recipe) as run:
        for step in range(recipe.steps):
            run.train_step(step)
        with runtime.traffic() as sent:
            run.optimizer.save_parameter_state(file)
        return {
            "states": dict(whole_tensors(run.optimizer)),
            "sent": sent.total("send").bytes,
            "groups": gloo_groups(),
            "shards": shards(run.optimizer),
        }


def load(recipe: Recipe, file: str) -> dict[str, torch.Tensor]:
    """Read the state of an optimizer that has taken another step; return the states of this rank."""
    from mindspeed.memory.optimizer_windows import whole_tensors
    from tests.memory.adam_steps import adam_run

    with adam_run(recipe) as run:
        run.train_step(7)
        run.optimizer.load_parameter_state(file)
        return dict(whole_tensors(run.optimizer))


def shards(optimizer: Any) -> list[int]:
    """The numbers in this rank's share of each bucket."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    buckets = [(member, bucket) for member in members for buffer in member.buffers for bucket in buffer.buckets]
    return [bucket.grad_data.numel() // member.data_parallel_group.size() for member, bucket in buckets]


def gloo_groups() -> list[str]:
    """Names of Megatron's gloo groups that exist."""
    from megatron.core import parallel_state

    return sorted(name for name, value in vars(parallel_state).items() if name.endswith("_GLOO") and value is not None)


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state by their path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: tensor for key, member in members for name, tensor in tensors(member, f"{path}/{key}").items()}


def assert_same(left: Any, right: Any) -> None:
    """Assert that two states hold the same tensors."""
    one, other = tensors(left), tensors(right)
    assert one
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
