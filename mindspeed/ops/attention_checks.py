"""Check the calls of `fusion_attention`, and name what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mindspeed.ops.attention_layout import LAYOUTS, head_width, heads_like, ranges_of, sizes
from mindspeed.ops.attention_scores import COMPRESSED_ROWS
from mindspeed.ops.errors import require

if TYPE_CHECKING:
    from mindspeed.ops.attention_arguments import AttentionOptions

_OP: Final = "fusion_attention"
_COMPRESSED: Final = dict.fromkeys((2, 3, 4, 7, 8), (2048, 2048)) | {6: (3072, 2048)}
_CAUSAL: Final = (0, 2, 3)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse: Tensor | None,
    mask: Tensor | None,
    padding_mask: Tensor | None,
    softmax_layout: str,
    options: AttentionOptions,
) -> None:
    """Raise OperatorError for what no kernel could compute."""
    layout, mode = options.layout, options.mode
    require(layout in LAYOUTS, _OP, f"input_layout is {layout}, but must be one of {', '.join(LAYOUTS)}")
    rank = 3 if layout in ("SBH", "BSH", "TND") else 4
    shapes = [tuple(x.shape) for x in (query, key, value)]
    ranks = {len(shape) for shape in shapes}
    require(ranks == {rank}, _OP, f"query, key and value have shapes {shapes}, but {layout} needs {rank} dimensions")
    one = query.dtype == key.dtype == value.dtype and query.is_floating_point()
    types = f"{query.dtype}, {key.dtype} and {value.dtype}"
    require(one, _OP, f"query, key and value are {types}, but must have one floating-point type")
    _check_heads(query, key, value, options)
    modes = "0 to 4 and 6 to 8" if layout == "TND" else "0 to 6"
    taken = 0 <= mode <= 8 and (mode != 5 if layout == "TND" else mode < 7)
    require(taken, _OP, f"sparse_mode is {mode}, but the layout {layout} supports {modes}")
    queries, keys, sequences = _check_lengths(query, key, value, options)
    require(0 <= options.keep_prob <= 1, _OP, f"keep_prob is {options.keep_prob}, but must be between 0 and 1")
    require(padding_mask is None, _OP, "padding_mask is reserved and must be None")
    require(softmax_layout in ("", "TND"), _OP, f"softmax_layout is {softmax_layout}, but must be empty or TND")
    if mask is not None:
        _check_mask(mask, (sequences, options.heads, queries, keys), options)
    if pse is not None:
        _check_pse(pse, query.dtype, (sequences, options.heads, queries, keys), options)
    for name, start in (("q_start_idx", options.q_start), ("kv_start_idx", options.kv_start)):
        require(isinstance(start, int), _OP, f"{name} is {start}, but must be a list of one integer")


def check_results(dy: Tensor, out: Tensor, maximum: Tensor, total: Tensor, like: Tensor, options: AttentionOptions) -> None:
    """Raise OperatorError unless results of a forward call belong to one whose result would be like ``like``."""
    fits = dy.shape == out.shape == like.shape and dy.dtype == out.dtype == like.dtype
    shapes = f"dy and attention_in have shapes {tuple(dy.shape)} and {tuple(out.shape)}"
    require(fits, "fusion_attention_grad", f"{shapes}; both are {like.dtype} of shape {tuple(like.shape)}")
    if options.layout == "TND":
        rows = (like.shape[0], options.heads)
    else:
        batch, length = sizes(like, options.layout)
        rows = (batch, options.heads, length)  # type: ignore[assignment]  # of another rank
    same = maximum.shape == total.shape and tuple(maximum.shape[:-1]) == rows and maximum.dim() == len(rows) + 1
    text = f"softmax_max and softmax_sum have shapes {tuple(maximum.shape)} and {tuple(total.shape)}"
    require(same, "fusion_attention_grad", f"{text}; both start with {rows} and end with a repetition")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> None:
    heads, layout = options.heads, options.layout
    own = heads if layout in ("SBH", "BSH") else query.shape[1 if layout in ("BNSD", "TND") else 2]
    divides = heads > 0 and own == heads and (layout not in ("SBH", "BSH") or query.shape[-1] % heads == 0)
    require(divides, _OP, f"query of shape {tuple(query.shape)} in the layout {layout} does not have {heads} heads")
    groups = heads_like(key, layout, query, heads)
    shared = groups > 0 and heads % groups == 0
    require(shared, _OP, f"{heads} query heads are not divisible by {groups} key heads")
    width = head_width(query, layout, heads)
    alike = head_width(key, layout, groups) == width
    require(alike, _OP, f"key of shape {tuple(key.shape)} does not have heads of width {width}")
    flat = layout in ("SBH", "BSH")
    same = value.shape[-1] % groups == 0 if flat else heads_like(value, layout, query, heads) == groups
    require(same, _OP, f"value of shape {tuple(value.shape)} does not have the {groups} heads of the key")


def _check_lengths(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> tuple[int, int, int]:
    """The (longest) number of queries and of keys, and the number of sequences."""
    if options.layout == "TND":
        require(key.shape[0] == value.shape[0], _OP, f"key has {key.shape[0]} tokens, but value has {value.shape[0]}")
        for name, ends, x in (("actual_seq_qlen", options.q_ends, query), ("actual_seq_kvlen", options.kv_ends, key)):
            whole = ends and ends[-1] == x.shape[0] and all(start <= end for start, end in ranges_of(ends))
            require(bool(whole), _OP, f"{name} is {ends}, but the layout TND needs ascending ends up to {x.shape[0]}")
        q_ends, kv_ends = options.q_ends or [], options.kv_ends or []
        counts = f"{len(q_ends)} and {len(kv_ends)}"
        require(
            len(q_ends) == len(kv_ends),
            _OP,
            f"actual_seq_qlen and actual_seq_kvlen have different numbers of sequences, {counts}",
        )
        longest = [max(end - start for start, end in ranges_of(ends)) for ends in (q_ends, kv_ends)]
        sequences = len(q_ends)
    else:
        (sequences, queries), (other, keys) = sizes(query, options.layout), sizes(key, options.layout)
        same = other == sequences and sizes(value, options.layout) == (other, keys)
        shapes = [tuple(x.shape) for x in (query, key, value)]
        require(same, _OP, f"query, key and value have shapes {shapes}, whose sizes do not match")
        none = options.q_ends is None and options.kv_ends is None
        require(none, _OP, f"actual_seq_qlen and actual_seq_kvlen are supported in the layout TND, but not in {options.layout}")
        longest = [queries, keys]
    if options.mode in (5, 6):
        given = options.prefix is not None and len(options.prefix) == sequences
        given = given and all(0 <= n <= longest[1] for n in options.prefix or [])
        require(given, _OP, f"prefix is {options.prefix}, but must be {sequences} numbers of keys from 0 to {longest[1]}")
    return longest[0], longest[1], sequences


def _check_mask(mask: Tensor, sizes: tuple[int, int, int, int], options: AttentionOptions) -> None:
    require(mask.dtype in (torch.bool, torch.uint8), _OP, f"atten_mask is {mask.dtype}, but must be bool or uint8")
    batch, heads, queries, keys = sizes
    shape = tuple(mask.shape)
    if options.layout == "TND":
        full = len(shape) == 2 and shape[0] >= queries and shape[1] >= keys
    else:
        broadcasts = len(shape) == 2 or (len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads))
        full = broadcasts and shape[-2:] == (queries, keys)
    compressed = _COMPRESSED.get(options.mode)
    text = f"sparse_mode {options.mode} needs {f'{list(compressed)} or ' if compressed else ''}a full mask"
    require(full or shape == compressed, _OP, f"atten_mask has shape {shape}; {text} of {queries} x {keys}")


def _check_pse(pse: Tensor, dtype: torch.dtype, sizes: tuple[int, int, int, int], options: AttentionOptions) -> None:
    batch, heads, queries, keys = sizes
    shape, kind, mode = tuple(pse.shape), options.pse_type, options.mode
    require(kind in (0, 1, 2, 3), _OP, f"pse_type is {kind}, but must be 0, 1, 2 or 3")
    require(mode not in (7, 8), _OP, f"sparse_mode {mode} does not support pse")
    if kind >= 2:
        require(pse.dtype in (torch.float32, torch.float64), _OP, f"pse is {pse.dtype}, but slopes must be fp32")
        require(
            shape in ((heads,), (batch, heads)),
            _OP,
            f"pse has shape {shape}, but slopes must be [{heads}] or [{batch}, {heads}]",
        )
        return
    require(pse.dtype == dtype, _OP, f"pse is {pse.dtype}, but the query is {dtype}")
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] == heads and shape[3] == keys
    packed = options.layout == "TND"
    rows = (COMPRESSED_ROWS,) if packed else (1, queries, *((COMPRESSED_ROWS,) if queries > COMPRESSED_ROWS else ()))
    fits = fits and shape[2] in rows
    allowed = " | ".join(map(str, rows))
    require(fits, _OP, f"pse has shape {shape}, but a bias must be [{batch} | 1, {heads}, {allowed}, {keys}]")
    if packed or (queries > COMPRESSED_ROWS and shape[2] == COMPRESSED_ROWS):
        equal = options.q_ends == options.kv_ends if packed else queries == keys
        require(equal and mode in _CAUSAL, _OP, "a pse of 1024 rows needs as many keys as queries and sparse_mode 0, 2 or 3")
