"""Bytes that the linear layers of a transformer layer send, and the grid that sends the least.

Per rank and row of the sequence that it multiplies, in numbers: forward and backward of the four linear layers. Hidden states
have h numbers a row, a linear layer beside them n; t = x * y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from mindspeed import plugins as ms

GROUPS: Final = ("TENSOR_PARALLEL_X_GROUP", "TENSOR_PARALLEL_Y_GROUP")
"""Descriptions of the process groups of a grid of x by y ranks: of x ranks, and of y."""


class GridSettings(Protocol):
    """The settings of a grid."""

    @property
    def x(self) -> int | Literal["auto"]: ...

    @property
    def y(self) -> int | Literal["auto"]: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers that a rank sends for a row in forward and in backward."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def column(h: float, n: float, x: int, y: int) -> Sent:
    """From hidden states to n features: all-to-all and all-gather of the input, reduce-scatter of the output."""
    hidden, features = h / y * (1 - 1 / (x * y)), n / x * (1 - 1 / y)
    return Sent(hidden + features, 2 * hidden + features)


def row(h: float, m: float, x: int, y: int) -> Sent:
    """From m features to hidden states."""
    hidden, features = h / y * (1 - 1 / (x * y)), m / x * (1 - 1 / y)
    return Sent(hidden + features, hidden + 2 * features)


def layer_numbers(world: ms.World, x: int, y: int) -> float:
    """The numbers of attention's and the MLP's linear layers; y = 1 is tensor parallelism in one dimension."""
    world.need("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "gated_linear_unit")
    h, ffn = world.hidden_size, world.ffn_hidden_size
    qkv = h * (1 + 2 * world.num_query_groups / world.num_attention_heads)
    up = ffn * (2 if world.gated_linear_unit else 1)
    return column(h, qkv, x, y).both + row(h, h, x, y).both + column(h, up, x, y).both + row(h, ffn, x, y).both


def grids(world: ms.World) -> list[tuple[int, int]]:
    """Every grid of the tensor-parallel size whose y divides the hidden size, one dimension first."""
    tp = int(world.tp)
    return [(tp // y, y) for y in range(1, tp + 1) if tp % y == 0 and world.hidden_size % y == 0]


def cheapest_grid(world: ms.World) -> tuple[int, int]:
    """The grid that sends the least; of equal ones the one with the smallest y."""
    return min(grids(world), key=lambda grid: layer_numbers(world, *grid))


def grid_of(args: GridSettings, world: ms.World) -> tuple[int, int]:
    """The grid of the settings: the one with the least communication, with values not set derived from the tensor-parallel
    size."""
    if args.x == "auto":
        return cheapest_grid(world) if args.y == "auto" else (world.tp // args.y, args.y)
    return args.x, world.tp // args.x if args.y == "auto" else args.y


def fits_ranks(args: GridSettings, world: ms.World) -> bool:
    """Return whether the settings mean as many ranks as there are."""
    given = [size for size in (args.x, args.y) if size != "auto"]
    if any(size < 1 for size in given):
        return False
    return world.tp == given[0] * given[1] if len(given) == 2 else not given or world.tp % given[0] == 0


def describe_costs(args: GridSettings, world: ms.World) -> list[str]:
    """Say what the grid sends, and what tensor parallelism in one dimension does."""
    if not fits_ranks(args, world):
        return []
    x, y = grid_of(args, world)
    ours, theirs = layer_numbers(world, x, y), layer_numbers(world, world.tp, 1)
    chosen = f", the minimum of {', '.join((f'{x}x{y}' for x, y in grids(world)))}" if args.x == args.y == "auto" else ""
    text = (
        f"the grid is {x}x{y}{chosen}: a rank sends {ours:.0f} numbers per token and layer, instead of {theirs:.0f} "
        f"with {world.tp}x1"
    )
    return [f"{text} ({ours / theirs:.2f})" if theirs else text]
