"""Chunks of different sizes against one process."""

from typing import Any

from tests.features.parity import DTYPES, FULL, Given, given, trains


def uneven(layers: str | tuple[int, ...], num_layers: int = 4, also: tuple[str, ...] = (), **case: Any) -> Given:
    settings = {"noop-layers": {"layers": layers}}
    return given(also=also, settings=settings, **{"pp": 2, "num_layers": num_layers, "vpp": 1, **case})


test_uneven_stages_train_as_one_process = trains(
    "noop-layers",
    {f"auto, {dtype}": uneven("auto", dtype=dtype) for dtype in DTYPES}
    | {f"places, {dtype}": uneven((0, 5), dtype=dtype) for dtype in DTYPES}
    | {
        "recompute": given(also=["recompute"], settings=FULL),
        "experts": uneven((0, 5), also=("moe-token-permute",), nproc=2),
        "four stages": uneven((0, 7), 6, nproc=4, pp=4),
        "tensor ranks": uneven((0, 7), 6, nproc=4, tp=2),
    },
)
