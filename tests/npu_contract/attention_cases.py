"""Calls of `fusion_attention`: layouts, sparse modes, biases, masks, shared heads, packed sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mindspeed.ops as ops
from tests.npu_contract.case import FP32, Call, Case, Make, statistics

SIZES = {"batch": 2, "heads": 4, "groups": 2, "queries": 7, "keys": 9, "width": 8}
Q_ENDS, KV_ENDS = (3, 3, 7, 12), (4, 4, 10, 16)


def _heads(m: Make, layout: str, length: int, heads: int, width: int) -> Tensor:
    batch = SIZES["batch"]
    shapes = {
        "SBH": (length, batch, heads * width),
        "BSH": (batch, length, heads * width),
        "BSND": (batch, length, heads, width),
        "BNSD": (batch, heads, length, width),
        "TND": (length, heads, width),
    }
    return m.leaf(*shapes[layout])


def _mask(m: Make, mode: int, queries: int, keys: int) -> Tensor:
    full = m.normal(queries, keys, dtype=FP32) > 0.3
    hidden = m.given(torch.arange(queries).view(-1, 1) == 1)  # a row that sees nothing
    if mode == 0:
        return full | hidden
    if mode == 1:
        return (full | hidden).expand(SIZES["batch"], 1, -1, -1)
    return full


def _attention(
    layout: str,
    mode: int | None,
    pse_type: int | None = None,
    pse_shape: str = "BNSS",
    longer: bool = False,
    value: int = 8,
    keep: float = 1.0,
) -> Callable[[Make], Call]:
    """A call with rows that see nothing wherever the mode can have them; without ``mode`` there is no mask."""

    def case(m: Make) -> Call:
        packed = layout == "TND"
        queries, keys = (SIZES["queries"], SIZES["keys"]) if not longer else (SIZES["keys"], SIZES["queries"])
        q_ends, kv_ends = (KV_ENDS, Q_ENDS) if longer else (Q_ENDS, KV_ENDS)
        long_q, long_k = (q_ends[-1], kv_ends[-1]) if packed else (queries, keys)
        tensors = [
            _heads(m, layout, long_q, SIZES["heads"], SIZES["width"]),
            _heads(m, layout, long_k, SIZES["groups"], SIZES["width"]),
            _heads(m, layout, long_k, SIZES["groups"], value),
        ]
        if packed:
            queries, keys = (max(b - a for a, b in zip((0, *e), e, strict=False)) for e in (q_ends, kv_ends))
        more: dict[str, Any] = {"scale": 0.4, "keep_prob": keep}
        if mode is not None:
            full = _mask(m, 0 if packed and mode == 1 else mode, queries, keys)
            more |= {"atten_mask": full, "sparse_mode": mode, "pre_tokens": 3, "next_tokens": 2}
        if mode in (5, 6):
            more["prefix"] = [4, 1, 5, 2][: len(q_ends) if packed else SIZES["batch"]]
        if packed:
            more |= {"actual_seq_qlen": list(q_ends), "actual_seq_kvlen": list(kv_ends)}
        if pse_type in (2, 3):
            more |= {"pse": m.normal(SIZES["heads"], dtype=FP32).abs(), "q_start_idx": [2], "kv_start_idx": [1]}
        elif pse_type is not None:
            shape = {"BNSS": (2, 4, queries, keys), "1NSS": (1, 4, queries, keys), "1N1S": (1, 4, 1, keys)}
            more["pse"] = m.leaf(*shape[pse_shape])
        if pse_type is not None:
            more["pse_type"] = pse_type

        def call() -> Any:
            torch.manual_seed(7)
            return ops.fusion_attention(*tensors, SIZES["heads"], layout, **more)

        return call

    return case


def _attention_of_last_rows(layout: str) -> Callable[[Make], Call]:
    """A bias of 1024 rows."""

    def case(m: Make) -> Call:
        packed = layout == "TND"
        length, longest = (12, 7) if packed else (1100, 1100)
        more = {"actual_seq_qlen": [5, 12], "actual_seq_kvlen": [5, 12]} if packed else {}
        tensors = [_heads(m, layout, length, heads, SIZES["width"]) for heads in (4, 2, 2)]
        bias, mask = m.leaf(1, 4, 1024, longest), m.given(torch.zeros(2048, 2048, dtype=torch.bool))
        return lambda: ops.fusion_attention(*tensors, 4, layout, pse=bias, atten_mask=mask, sparse_mode=3, **more)

    return case


def _attention_by_head(m: Make) -> Call:
    """A mask of every head, for all sequences of the batch, and a window."""
    tensors = [_heads(m, "BSND", 9, heads, SIZES["width"]) for heads in (4, 2, 2)]
    mask = m.normal(1, 4, 9, 9, dtype=FP32) > 0.3
    return lambda: ops.fusion_attention(*tensors, 4, "BSND", atten_mask=mask, pre_tokens=2, next_tokens=3)


def _attention_grad(m: Make) -> Call:
    """The gradients of one block of keys, as context parallelism asks for them."""
    q, k, v = (m.normal(2, 4, 5, 8) for _ in range(3))
    stats = statistics(m, 2, 4, 5, unseen=0)
    more = {"softmax_max": stats[0] + 3, "softmax_sum": stats[1], "attention_in": m.normal(2, 4, 5, 8)}
    dy = m.normal(2, 4, 5, 8)
    return lambda: ops.fusion_attention_grad(q, k, v, dy, 4, "BNSD", **more)


def attention_cases() -> list[Case]:
    v1 = (("npu_fusion_attention",), ("npu_fusion_attention_grad",))
    v2 = (("npu_fusion_attention_v2",), ("npu_fusion_attention_grad_v2",))
    found = []
    for layout in ("SBH", "BSH", "BSND", "BNSD", "TND"):
        modes = (None, 0, 1, 2, 3, 4, 6, 7, 8) if layout == "TND" else (None, 0, 1, 2, 3, 4, 5, 6)
        found += [Case("fusion_attention", f"{layout} mode {mode}", _attention(layout, mode), *v1) for mode in modes]
        if layout != "TND":  # torch_npu takes no bias beside a packed sequence without tokens
            found += [
                Case("fusion_attention", f"{layout} pse {kind}", _attention(layout, 2, kind), *(v1 if kind == 1 else v2))
                for kind in (0, 1, 2, 3)
            ]
    for layout in ("SBH", "BNSD", "TND"):
        found.append(Case("fusion_attention", f"{layout} dropout", _attention(layout, 3, keep=0.6), *v1))
    found.append(Case("fusion_attention", "dropout with slopes", _attention("BSH", 2, 2, keep=0.6), *v2))
    for mode in (3, 6):
        found.append(Case("fusion_attention", f"more queries, mode {mode}", _attention("BNSD", mode, longer=True), *v1))
    for shape in ("1NSS", "1N1S"):
        found.append(Case("fusion_attention", f"pse {shape}", _attention("SBH", None, 1, shape), *v1))
    found.append(Case("fusion_attention", "narrow values", _attention("BSH", 2, value=4), *v1))
    found.append(Case("fusion_attention", "a mask by head", _attention_by_head, *v1))
    for layout in ("BNSD", "TND"):
        call = _attention_of_last_rows(layout)
        found.append(Case("fusion_attention", f"{layout} pse of 1024 rows", call, *v1, values=False))
    found.append(Case("fusion_attention", "gradients of a block", _attention_grad, ("npu_fusion_attention_grad",)))
    return found
