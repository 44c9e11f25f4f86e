"""What `test_platform_collectives.py` runs on two ranks; each function's result, of all ranks, is printed as JSON."""

import json
import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from mindspeed.platforms import runtime

BIG = 1 << 21


def backend_is_gloo():
    group = dist.new_group([0, 1], backend="nccl")
    dist.barrier(group, device_ids=[0])
    return [dist.get_backend(), dist.get_backend(group)]


def sums_are_poison_until_the_wait():
    total, count = torch.full((2,), float(dist.get_rank() + 1), device="cuda"), torch.ones(2, dtype=torch.int64)
    works = dist.all_reduce(total, async_op=True), dist.all_reduce(count, async_op=True)
    early = [total.isnan().all().item(), count.tolist() == [torch.iinfo(torch.int64).min] * 2]
    for work in works:
        work.wait()
    return [*early, total.tolist(), count.tolist()]


def a_gather_in_place_keeps_its_own_share():
    whole = torch.zeros(4)
    mine = whole[2 * dist.get_rank() :][:2].fill_(dist.get_rank() + 1)
    work = dist.all_gather_into_tensor(whole, mine, async_op=True)
    early = [int(mine[0]), int(whole.isnan().sum())]
    work.wait()
    return [early, whole.tolist()]


def a_scatter_into_its_own_input_is_poison_until_the_wait():
    whole = torch.arange(4.0)
    mine = whole[2 * dist.get_rank() :][:2]
    work = dist.reduce_scatter_tensor(mine, whole, async_op=True)
    early = mine.isnan().all().item()
    work.wait()
    return [early, mine.tolist()]


def a_broadcast_is_poison_where_it_arrives():
    tensor = torch.full((2,), float(dist.get_rank()))
    work = dist.broadcast(tensor, src=1, async_op=True)
    early = tensor.isnan().all().item()
    work.wait()
    return [early, tensor.tolist()]


def coalesced_gathers_are_poison_until_their_one_wait():
    wholes = [torch.zeros(2), torch.zeros(2)]
    with _coalescing_manager(async_ops=True) as group:
        for factor, whole in enumerate(wholes, 1):
            dist.all_gather_into_tensor(whole, torch.tensor([factor * (dist.get_rank() + 1.0)]))
    early = [whole.isnan().all().item() for whole in wholes]
    group.wait()
    return [early, [whole.tolist() for whole in wholes]]


def batched_messages_are_poison_until_the_wait():
    other, got = 1 - dist.get_rank(), torch.zeros(2)
    sent = torch.full((2,), float(dist.get_rank()))
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)])
    early = got.isnan().all().item()
    for work in works:
        work.wait()
    return [early, got.tolist()]


def synchronizing_the_device_waits_for_everything():
    total = torch.ones(2)
    dist.all_reduce(total, async_op=True)
    torch.cuda.synchronize()
    return total.tolist()


def a_future_brings_the_output():
    total = torch.ones(2)
    dist.all_reduce(total, async_op=True).get_future().wait()
    return total.tolist()


def a_missing_wait_poisons_the_loss():
    losses = []
    for waits in (True, False):
        weight = torch.ones(4, requires_grad=True)
        weight.grad = torch.full((4,), float(dist.get_rank()))
        work = dist.all_reduce(weight.grad, async_op=True)
        if waits:
            work.wait()
        with torch.no_grad():
            loss = (weight - 0.1 * weight.grad).sum()
        losses.append("finite" if loss.isfinite() else "poison")
        work.wait()
    return losses


def uneven_parts_are_gathered_and_scattered():
    results = []
    for later in (False, True):
        parts = [torch.zeros(1), torch.zeros(3)]
        work = dist.all_gather(parts, torch.full((1 + 2 * dist.get_rank(),), float(dist.get_rank() + 1)), async_op=later)
        share = torch.zeros(1 + 2 * dist.get_rank())
        scatter = dist.reduce_scatter(share, [torch.ones(1), torch.full((3,), 2.0)], async_op=later)
        if later:
            work.wait()
            scatter.wait()
        results.append([[part.tolist() for part in parts], share.tolist()])
    return results


def uneven_parts_are_exchanged():
    """From rank s to rank d go s + 1 rows of d + 1 numbers 10 s + d; that of a rank to itself may be empty."""
    rank, results = dist.get_rank(), []
    for later in (False, True):
        for own in (rank + 1, 0):
            sent = [torch.full((own if d == rank else rank + 1, d + 1), 10.0 * rank + d) for d in range(2)]
            taken = [torch.zeros(own if s == rank else s + 1, rank + 1) for s in range(2)]
            work = dist.all_to_all(taken, sent, async_op=later)
            if later:
                work.wait()
            results.append([part.tolist() for part in taken])
    return results


def a_gather_asks_for_sizes_and_not_for_shapes():
    flat, mine = torch.zeros(16), torch.full((2, 4), dist.get_rank() + 1.0)
    dist.all_gather_into_tensor(flat, mine)
    tall = torch.zeros(8, 2)
    dist.all_gather_into_tensor(tall, mine, async_op=True).wait()
    return [flat.tolist(), tall.sum(1).tolist()]


def parts_are_scaled_before_they_are_summed():
    scaled = dist._make_nccl_premul_sum(0.5)
    total, parts, share = torch.full((2,), dist.get_rank() + 1.0), torch.arange(4.0), torch.zeros(2)
    dist.all_reduce(total, op=scaled)
    dist.reduce_scatter_tensor(share, parts, op=scaled, async_op=True).wait()
    listed = torch.zeros(1)
    dist.reduce_scatter(listed, [torch.ones(1), torch.full((1,), 3.0)], scaled)
    return [total.tolist(), share.tolist(), parts.tolist(), listed.tolist()]


def views_are_scattered_by_their_elements():
    """What arrives of halves, transposed, expanded, zero-size and 0-d tensors, here and later."""
    whole, results = torch.arange(4.0).view(2, 2), []
    rows = torch.tensor([[5.0], [6.0]])
    given = [whole.chunk(2, 1), (whole, whole.t()), rows.expand(2, 2), whole[:, :0].chunk(2), torch.tensor([7.0, 8.0]).unbind()]
    for parts in given:
        for later in (False, True):
            output = torch.full(parts[0].shape, -1.0)
            work = dist.scatter(output, list(parts) if dist.get_rank() == 0 else None, src=0, async_op=later)
            if later:
                work.wait()
        results.append(output.tolist())
    return results


def lists_of_views_are_filled_and_read():
    rank, whole = dist.get_rank(), torch.zeros(2, 4)
    dist.all_gather(list(whole.view(2, 2, 2).unbind(2)), torch.full((2, 2), rank + 1.0))
    share = torch.zeros(2)
    dist.reduce_scatter(share, list((torch.arange(4.0).view(2, 2) + rank).unbind(1)))
    return [whole.tolist(), share.tolist()]


def other_views_are_refused():
    """The first words of what each collective raises in a group of one rank; the tensors in turn are its arguments."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    root = dist.get_rank()
    view, expanded, dense = torch.ones(2, 4)[:, :2], torch.ones(1).expand(4), torch.ones(2, 2)
    calls = {
        "broadcast": [(view, root), (expanded, root)],
        "all_reduce": [(view,), (expanded,), (torch.ones(2, 3).t(),)],
        "reduce": [(view, root)],
        "all_gather": [([dense], view)],
        "all_gather_into_tensor": [(dense, view), (view, dense)],
        "gather": [(view, [dense], root), (dense, [view], root)],
        "scatter": [(view, [dense], root)],
        "reduce_scatter": [(view, [dense])],
        "reduce_scatter_tensor": [(dense, view), (view, dense)],
        "all_to_all_single": [(dense, view), (view, dense)],
        "all_to_all": [([dense], [view]), ([view], [dense])],
    }
    return {name: [refusal(getattr(dist, name), arguments, group) for arguments in calls[name]] for name in calls}


def refusal(collective, arguments, group):
    try:
        collective(*arguments, group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def dense_tensors_of_any_shape_are_reduced():
    """Zero-size and 0-d tensors are contiguous, and one with its channels last is for NCCL."""
    empty, scalar = torch.ones(0, 3)[:, :2], torch.tensor(1.0 + dist.get_rank())
    image = (torch.arange(8.0) + dist.get_rank()).view(1, 2, 2, 2).to(memory_format=torch.channels_last)
    for tensor in (empty, scalar, image):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0)
    return [list(empty.shape), scalar.item(), image.flatten().tolist()]


def a_message_outlives_the_storage_of_its_tensor():
    right = True
    for value in range(5):
        if dist.get_rank() == 0:
            tensor = torch.full((BIG,), float(value))
            work = dist.isend(tensor, 1)
            tensor.data = torch.empty(1)
            garbage = torch.full((BIG,), -1.0)
            work.wait()
            del garbage
        else:
            time.sleep(0.05)
            got = torch.empty(BIG)
            dist.recv(got, 0)
            right = right and bool((got == value).all())
    return right


def traffic_is_counted():
    group = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    with runtime.traffic() as traffic:
        dist.all_reduce(torch.ones(4), group=group)
        dist.all_gather_into_tensor(torch.zeros(8), torch.ones(4), group=group)
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4, dtype=torch.bfloat16).float())
        with runtime.traffic() as inner:
            dist.all_reduce(torch.ones(2, dtype=torch.float64), group=group)
    dist.all_reduce(torch.ones(4))
    outer = {f"{kind} {name}": [count.calls, count.bytes] for (kind, name), count in traffic.items()}
    return [outer, inner.total("all_reduce").bytes]


def uses_before_the_wait_are_logged():
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    work.wait()
    waited = torch.ones(5)
    dist.all_reduce(waited, async_op=True).wait()
    waited.mul(2)


def a_spawned_process_gets_the_platform():
    if dist.get_rank():
        return None
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=ask_device, args=(queue,))
    child.start()
    child.join()
    return queue.get()


def ask_device(queue):
    queue.put([torch.cuda.is_available(), torch.ones(1, device="cuda").tolist(), runtime.platform()])


CHECKS = (
    backend_is_gloo,
    sums_are_poison_until_the_wait,
    a_gather_in_place_keeps_its_own_share,
    a_scatter_into_its_own_input_is_poison_until_the_wait,
    a_broadcast_is_poison_where_it_arrives,
    coalesced_gathers_are_poison_until_their_one_wait,
    batched_messages_are_poison_until_the_wait,
    synchronizing_the_device_waits_for_everything,
    a_future_brings_the_output,
    a_missing_wait_poisons_the_loss,
    uneven_parts_are_gathered_and_scattered,
    uneven_parts_are_exchanged,
    a_gather_asks_for_sizes_and_not_for_shapes,
    parts_are_scaled_before_they_are_summed,
    views_are_scattered_by_their_elements,
    lists_of_views_are_filled_and_read,
    other_views_are_refused,
    dense_tensors_of_any_shape_are_reduced,
    a_message_outlives_the_storage_of_its_tensor,
    traffic_is_counted,
    a_spawned_process_gets_the_platform,
    uses_before_the_wait_are_logged,
)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    results = {}
    for check in CHECKS:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, check())
        results[check.__name__] = everyone
    if dist.get_rank() == 0:
        json.dump(results, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
