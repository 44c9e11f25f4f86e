"""What the host reads from the device is recorded with the line that reads it."""

from pathlib import Path

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool


def reads() -> list[list[tuple[str, str, str]]]:
    """The reads of some lines, each on tensors of its own, as operation, file name and function."""
    import torch

    from mindspeed.platforms.host_reads import host_reads

    x = torch.tensor([0.0, 1.0, 2.0], device="cuda")
    copied = x.to("cpu")
    repeats = torch.tensor([1, 0, 2], device="cuda")
    lines = [
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.cpu().numpy(),
        lambda: bool(x.any()),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: x.to("cpu", torch.float64).sum().tolist(),
        lambda: torch.repeat_interleave(x, repeats),
        lambda: torch.repeat_interleave(x, repeats, output_size=3),
        lambda: copied.sum().item(),
        lambda: torch.tensor([1, 2]).tolist(),
        lambda: x.to(repeats.device, torch.float16, non_blocking=True),
    ]
    found = []
    for line in lines:
        with host_reads() as seen:
            line()
        found.append([(read.operation, Path(read.file).name, read.function) for read in seen])
    assert "tolist" not in vars(torch.Tensor)
    return found


def test_reads_are_recorded_with_their_call_site_and_copies_on_the_host_are_none(pool: WorkerPool) -> None:
    (found,) = pool.call(reads, 1, plan=mindspeed.plan(platform="cpu", level=0))
    assert [[operation for operation, _, _ in line] for line in found] == [
        ["item"],
        ["tolist"],
        ["cpu"],
        ["item"],
        ["index by a mask"],
        ["nonzero"],
        ["to"],
        ["repeat_interleave"],
        [],
        [],
        [],
        [],
    ]
    assert {(file, function) for line in found for _, file, function in line} == {("test_host_reads.py", "<lambda>")}
