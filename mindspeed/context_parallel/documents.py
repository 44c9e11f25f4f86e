"""Documents packed into the rows of a batch, which do not see one another.

They travel as an int64 tensor [rows, documents] in the place of an attention mask, through every layer, stage and
recomputation of a model: the ends of the documents of each row, the last repeated where another row has more. It stays on
the host, where attention reads it without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from mindspeed.problems import Fix, MindSpeedError, Problem

Ends = tuple[tuple[int, ...], ...]
"""For each row of a batch the ends of the documents packed into it; the last is the length. Nothing means one document."""


def are_documents(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Tell whether the tensor in the place of an attention mask has the ends of documents."""
    return mask is not None and mask.dtype == torch.int64 and mask.dim() == 2


def ends_of_rows(documents: Tensor) -> Ends:
    """The document ends that such a tensor contains."""
    return tuple(tuple(dict.fromkeys(row)) for row in documents.tolist())


def in_one_row(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the ends of documents when rows of equal length follow one another."""
    return [number * row[-1] + end for number, row in enumerate(rows) for end in row]


def ends_of_packed(packed: Any, side: Literal["q", "kv"], tokens: int) -> tuple[int, ...]:
    """The ends that Megatron's ``PackedSeqParams`` say of a row of ``tokens`` queries or keys, read from the device once.

    Padding behind a sequence counts as its last tokens, which under a causal mask no other of its tokens sees; what follows
    the last sequence stands alone. Raises MS337 for sequences that are longer than the row.
    """
    known: dict[tuple[str, int], tuple[int, ...]] = vars(packed).setdefault("_ends", {})
    if (side, tokens) not in known:
        padded = getattr(packed, f"cu_seqlens_{side}_padded", None)
        starts: Tensor = getattr(packed, f"cu_seqlens_{side}") if padded is None else padded
        _, *ends = starts.flatten().tolist()
        if ends[-1] > tokens:
            text = f"packed sequences end at {ends[-1]}, but their row has {tokens} tokens"
            raise MindSpeedError([Problem("MS337", text, fix=Fix.advise("give cu_seqlens that match this row"))])
        known[side, tokens] = (*ends, *([tokens] if ends[-1] < tokens else []))
    return known[side, tokens]


def is_padded(packed: Any) -> bool:
    """Tell whether packed sequences have padding behind them, which attention that is not causal would see."""
    padded = getattr(packed, "cu_seqlens_kv_padded", None)
    return padded is not None and padded is not packed.cu_seqlens_kv and not torch.equal(padded, packed.cu_seqlens_kv)
