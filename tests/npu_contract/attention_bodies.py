"""`bodies` of attention: the formula of torch_npu's documentation, score matrices in full, one sequence after the other."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed.ops.attention_scores import Dropout

_LARGEST = torch.finfo(torch.float32).max
_FAR = 2147483647


class Given(NamedTuple):
    """The arguments of a call that say what is computed, under the names of the first version."""

    head_num: int
    input_layout: str
    pse: Tensor | None = None
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    seed: int = 0
    offset: int = 0
    numels: int = 0
    pre_tockens: int = _FAR
    next_tockens: int = _FAR
    inner_precise: int = 0
    prefix: list[int] | None = None
    actual_seq_qlen: list[int] | None = None
    actual_seq_kvlen: list[int] | None = None
    sparse_mode: int = 0
    softmax_layout: str = ""
    pse_type: int = 1
    q_start_idx: list[int] | None = None
    kv_start_idx: list[int] | None = None


_NAMES = {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens", "scale_value": "scale"}
_BY_PLACE = (
    *("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix"),
    *("actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout"),
)
"""What follows the layout in the first version of the schema, none of it by keyword only."""


def _given(head_num: int, input_layout: str, more: dict[str, Any], by_place: tuple[Any, ...] = ()) -> Given:
    more = dict(zip(_BY_PLACE, by_place, strict=False)) | {_NAMES.get(name, name): value for name, value in more.items()}
    assert more.get("padding_mask") is None
    return Given(head_num, input_layout, **{name: value for name, value in more.items() if name in Given._fields})


def _sequences(x: Tensor, heads: int, layout: str, ends: list[int] | None) -> list[Tensor]:
    """Views [N, S, D], one per sequence."""
    if layout == "TND":
        assert ends is not None
        return [part.transpose(0, 1) for part in x.tensor_split(ends[:-1])]
    if layout in ("SBH", "BSH"):
        x = x.unflatten(-1, (heads, x.shape[-1] // heads))
    orders = {"SBH": (1, 2, 0, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
    return list(x.permute(orders[layout]))


def _key_heads(key: Tensor, query: Tensor, how: Given) -> int:
    if how.input_layout in ("SBH", "BSH"):
        return key.shape[-1] // (query.shape[-1] // how.head_num)
    return key.shape[1] if how.input_layout in ("BNSD", "TND") else key.shape[2]


def _compressed(mask: Tensor, with_prefix: bool) -> None:
    assert tuple(mask.shape) == ((3072, 2048) if with_prefix else (2048, 2048))
    assert torch.equal(mask[:2048], torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    if with_prefix:
        assert not mask[2048:, :1024].any()
        assert mask[2048:, 1024:].all()


def _hidden(how: Given, n: int, queries: int, keys: int, edge: int) -> Tensor:
    """True where query i of sequence n does not see key j, [N | 1, queries, keys]."""
    i, j, d = torch.arange(queries)[:, None], torch.arange(keys), keys - queries
    mask, mode = how.atten_mask, how.sparse_mode
    if mask is None:
        assert mode == 0
        return torch.zeros(1, queries, keys, dtype=torch.bool)
    band = (j < i + d - how.pre_tockens) | (j > i + d + how.next_tockens)
    if mode in (0, 1, 5):
        shape = mask.shape
        full = mask[None] if mask.dim() == 2 else mask[n if shape[0] > 1 else 0]
        full = full[:, :queries, :keys] if how.input_layout == "TND" else full
        outside = torch.zeros_like(full[0])
        if mode == 0:
            outside = (j < i - how.pre_tockens) | (j > i + how.next_tockens)
        if mode == 5:
            assert how.prefix is not None
            outside = (j > i + d) & (j >= how.prefix[n])
        assert full[:, outside].all(), "the mask shows what the window or prefix hides, which torch_npu leaves open"
        return full
    _compressed(mask, mode == 6)
    if mode == 6:
        assert how.prefix is not None
        assert how.prefix[n] >= max(d, 0)
        return ((j > i + d) & (j >= how.prefix[n]))[None]
    plain = {2: j > i, 3: j > i + d, 4: band, 7: j > i + d, 8: j > i}[mode]
    return (band if mode in (7, 8) and n == edge else plain)[None]


class Part(NamedTuple):
    """One sequence: queries, keys and values [N, S, D] in fp32, masked logits, what is hidden and the factors of dropout."""

    q: Tensor
    k: Tensor
    v: Tensor
    logits: Tensor
    hidden: Tensor
    factors: Tensor


def _parts(query: Tensor, key: Tensor, value: Tensor, how: Given) -> Iterator[Part]:
    groups = _key_heads(key, query, how)
    qs = _sequences(query, how.head_num, how.input_layout, how.actual_seq_qlen)
    ks, vs = (_sequences(x, groups, how.input_layout, how.actual_seq_kvlen) for x in (key, value))
    filled = [n for n, q in enumerate(qs) if q.shape[1]] or [0]
    edge = filled[0] if how.sparse_mode == 8 else filled[-1]
    first = 0
    for n, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True)):
        q, k, v = (x.float().repeat_interleave(how.head_num // x.shape[0], 0) for x in (q, k, v))
        products, bias = q @ k.transpose(1, 2), _bias(how, n, q.shape[1], k.shape[1])
        logits = (products + bias) * how.scale if how.pse_type == 1 else products * how.scale + bias
        yield Part(q, k, v, logits, _hidden(how, n, q.shape[1], k.shape[1], edge), _factors(how, logits.shape, first))
        first += logits.numel() if how.input_layout == "TND" else q.shape[0] * q.shape[1]


def _factors(how: Given, shape: torch.Size, first: int) -> Tensor:
    """The dropout of our reference, so that values can be compared; ``first`` counts the rows of earlier sequences."""
    if how.keep_prob == 1:
        return torch.ones(())
    heads, queries, keys = shape
    drop = Dropout(how.keep_prob, torch.tensor(how.seed), first, (1, heads, 1, queries, keys))
    return drop.factors((0, queries), (0, keys), torch.float32)[0, :, 0]


def _bias(how: Given, n: int, queries: int, keys: int) -> Tensor:
    if how.pse is None:
        return torch.zeros(())
    if how.pse_type < 2:
        return how.pse[n if how.pse.shape[0] > 1 else 0].float()
    assert how.q_start_idx is not None
    assert how.kv_start_idx is not None
    distance = torch.arange(queries)[:, None] + how.q_start_idx[0] - torch.arange(keys) - how.kv_start_idx[0]
    slopes = how.pse if how.pse.dim() == 1 else how.pse[n]
    away = distance.abs().float()
    return -slopes[:, None, None] * (away if how.pse_type == 2 else away.sqrt())


def _forward(query: Tensor, key: Tensor, value: Tensor, how: Given) -> tuple[Tensor, Tensor, Tensor]:
    groups = _key_heads(key, query, how)
    flat = how.input_layout in ("SBH", "BSH")
    width = value.shape[-1] // groups if flat else value.shape[-1]
    out = query.new_empty(*query.shape[:-1], how.head_num * width if flat else width)
    outs = _sequences(out, how.head_num, how.input_layout, how.actual_seq_qlen)
    stats: list[list[Tensor]] = [[], []]
    for part, place in zip(_parts(query, key, value, how), outs, strict=True):
        logits = part.logits.masked_fill(part.hidden, -torch.inf)
        maximum = logits.amax(-1, keepdim=True) if logits.numel() else logits.sum(-1, keepdim=True)
        exponents = (logits - maximum).exp()
        total = exponents.sum(-1, keepdim=True)
        result, unseen = exponents * part.factors @ part.v / total, maximum == -torch.inf
        if how.inner_precise == 2:
            result = result.masked_fill(unseen, 0)
            maximum, total = maximum.masked_fill(unseen, -_LARGEST), total.masked_fill(unseen, _LARGEST)
        place.copy_(result)
        for kept, stat in zip(stats, (maximum, total), strict=True):
            kept.append(stat.expand(*stat.shape[:-1], 8))
    if how.input_layout == "TND":
        assert how.softmax_layout == "TND"
        maximum, total = (torch.cat([stat.transpose(0, 1) for stat in kept]) for kept in stats)
    else:
        maximum, total = (torch.stack(kept) for kept in stats)
    return out, maximum.contiguous(), total.contiguous()


def _backward(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, how: Given, more: dict[str, Tensor]) -> list[Tensor]:
    groups, grads = _key_heads(key, query, how), [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    heads = (how.head_num, groups, groups)
    lists = (how.actual_seq_qlen, how.actual_seq_kvlen, how.actual_seq_kvlen)
    places = [_sequences(g, h, how.input_layout, e) for g, h, e in zip(grads, heads, lists, strict=True)]
    q_side = [_sequences(x, how.head_num, how.input_layout, how.actual_seq_qlen) for x in (dy, more["attention_in"])]
    dpse = torch.zeros(()) if how.pse is None else torch.zeros_like(how.pse, dtype=torch.float32)
    for n, part in enumerate(_parts(query, key, value, how)):
        dout, out = (side[n].float() for side in q_side)
        maximum, total = (_statistic(more[name], how, n) for name in ("softmax_max", "softmax_sum"))
        # a hidden logit is a very small number, not -inf: what such a row makes depends on its statistics
        p = (part.logits.masked_fill(part.hidden, -_LARGEST / 2) - maximum).exp() / total
        ds = p * (dout @ part.v.transpose(1, 2) * part.factors - (dout * out).sum(-1, keepdim=True))
        kept = (p * part.factors).transpose(1, 2)
        shared = [ds @ part.k * how.scale, ds.transpose(1, 2) @ part.q * how.scale, kept @ dout]
        for place, grad, count in zip(places, shared, heads, strict=True):
            place[n].copy_(grad.unflatten(0, (count, -1)).sum(1))
        if how.pse is not None and how.pse_type < 2:
            dpse[n if dpse.shape[0] > 1 else 0] += (ds * (how.scale if how.pse_type == 1 else 1)).sum_to_size(dpse.shape[1:])
    return [*(grad.to(query.dtype) for grad in grads), query.new_empty(0) if how.pse is None else dpse.to(how.pse.dtype)]


def _statistic(stat: Tensor, how: Given, n: int) -> Tensor:
    """[N, S, 1] of sequence n."""
    assert stat.shape[-1] == 8
    if how.input_layout != "TND":
        return stat[n, ..., :1]
    assert how.softmax_layout == "TND"
    assert how.actual_seq_qlen is not None
    return stat.tensor_split(how.actual_seq_qlen[:-1])[n].transpose(0, 1)[..., :1]


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *by_place: Any, **more: Any
) -> Any:
    how = _given(head_num, input_layout, more, by_place)
    if how.keep_prob < 1:
        how = how._replace(seed=int(torch.randint(1 << 62, ())))
    numels = sum(part.logits.numel() for part in _parts(query, key, value, how)) if how.keep_prob < 1 else 0
    return (*_forward(query, key, value, how), query.new_empty(0), how.seed, how.offset, numels)


npu_fusion_attention_v2 = npu_fusion_attention
_STATISTICS = ("softmax_max", "softmax_sum", "attention_in")


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, more: dict[str, Any]
) -> list[Tensor]:
    stats = {name: more.pop(name) for name in _STATISTICS}
    how = _given(head_num, input_layout, more)
    if how.keep_prob < 1:
        assert how.numels == sum(part.logits.numel() for part in _parts(query, key, value, how))
    return _backward(query, key, value, dy, how, stats)


def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **more: Any
) -> Any:
    return (*_gradients(query, key, value, dy, head_num, input_layout, more), query.new_empty(0))


def npu_fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **more: Any
) -> Any:
    empty = [query.new_empty(0) for _ in range(3)]
    return (*_gradients(query, key, value, dy, head_num, input_layout, more), *empty)


BODIES = {
    function: globals()[function]
    for function in (
        "npu_fusion_attention",
        "npu_fusion_attention_v2",
        "npu_fusion_attention_grad",
        "npu_fusion_attention_grad_v2",
    )
}
