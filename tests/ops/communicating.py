"""What `test_communicating.py` runs on every rank of a gloo job."""

import importlib
from operator import attrgetter

import torch
import torch.distributed as dist

import mindspeed.ops
from mindspeed.problems import MindSpeedError


def grid(ep, tp):
    """The expert and the tensor group of this rank, ranks numbered tensor first."""
    rank = dist.get_rank()
    found = {}
    for t in range(tp):
        ranks = [e * tp + t for e in range(ep)]
        found.update({"EP": dist.new_group(ranks)} if rank in ranks else {"": dist.new_group(ranks)})
    for e in range(ep):
        ranks = [e * tp + t for t in range(tp)]
        found.update({"TP": dist.new_group(ranks)} if rank in ranks else {"": dist.new_group(ranks)})
    return found


def with_groups(value, groups):
    if isinstance(value, str):
        return groups.get(value, value)
    if isinstance(value, dict):
        return {name: with_groups(item, groups) for name, item in value.items()}
    return [with_groups(item, groups) for item in value] if isinstance(value, (list, tuple)) else value


def calls(cases, ep=1, tp=1):
    """Results of several calls ``(operator, arguments of each rank, keywords of each rank)``, with these groups.

    A named output that an operator fills is given back as well; so is whether the in-place variant kept its memory.
    """
    groups = grid(ep, tp) | {"WORLD": dist.group.WORLD, "NAME": dist.group.WORLD.group_name}
    results = []
    for name, arguments, keywords in cases:
        given = with_groups(arguments[dist.get_rank()], groups)
        more = with_groups(keywords[dist.get_rank()] if keywords else {}, groups)
        if name.startswith("lcal_coc."):
            attrgetter(name)(mindspeed.ops)(*given, **more)
            results.append([t for t in given[2:4] if isinstance(t, torch.Tensor)])
        elif name.endswith("_"):
            place = given[2].data_ptr()
            y, norm = getattr(mindspeed.ops, name)(*given, **more)
            results.append([y, norm, y is given[2] and y.data_ptr() == place])
        else:
            results.append(getattr(mindspeed.ops, name)(*given, **more))
    return results


def calls_for_inference(cases):
    """`calls` under `torch.inference_mode`."""
    with torch.inference_mode():
        return calls(cases)


def registrations(cases):
    """Every case through `torch.library.opcheck`; groups are named."""
    groups = {"NAME": dist.group.WORLD.group_name}
    for name, arguments in cases:
        importlib.import_module(f"mindspeed.ops.{'lcal_coc' if name.startswith('lcal_coc') else name}")
        torch.library.opcheck(getattr(torch.ops.mindspeed, name).default, tuple(with_groups(arguments, groups)))
    return len(cases)


def compiled(cases):
    """Whether compiled calls give what eager calls give, bit for bit; each compiles without a graph break."""
    groups = grid(1, dist.get_world_size()) | {"WORLD": dist.group.WORLD}
    same = []
    for name, arguments, keywords in cases:
        operator = attrgetter(name)(mindspeed.ops)
        results = []
        for backend in (None, "aot_eager"):
            given = [t.clone() if isinstance(t, torch.Tensor) else t for t in with_groups(arguments, groups)]
            torch.compiler.reset()
            call = operator if backend is None else torch.compile(operator, fullgraph=True, backend=backend)
            result = call(*given, **with_groups(keywords, groups))
            found = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
            results.append([*found, *(t for t in given if isinstance(t, torch.Tensor))])
        same.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return same


def refusals(cases):
    """The messages of calls that are refused."""
    groups = grid(1, dist.get_world_size()) | {"WORLD": dist.group.WORLD}
    messages = []
    for name, arguments, keywords in cases:
        operator = attrgetter(name)(mindspeed.ops)
        try:
            operator(*with_groups(arguments, groups), **with_groups(keywords, groups))
        except MindSpeedError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")
    return messages
