"""Operations of a pipeline schedule, the placement of stages on ranks, and costs. Light, data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

Kind = Literal["F", "B", "W", "D", "R"]
"""F forward, B input gradient, W weight gradient, D both gradients in one pass, R forward again (recompute)."""
Placement = Literal["loop", "v"]

KINDS: Final[tuple[str, ...]] = get_args(Kind)


class Op(NamedTuple):
    """Operation of a rank: its kind, the model chunk of that rank and the micro-batch."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, micro-batch {self.micro_batch})"


Ops = tuple[tuple[Op, ...], ...]
"""The operations of each rank, in order."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Sizes of a pipeline and the placement of its ``pp * vpp`` stages.

    ``loop`` puts stage s on rank s mod pp, as Megatron does. ``v`` has two stages a rank: r and 2 pp - 1 - r.
    ``group`` is Megatron's ``microbatch_group_size_per_vp_stage``, pp if not given.
    """

    pp: int
    vpp: int
    micro_batches: int
    placement: Placement = "loop"
    group: int | None = None

    def __post_init__(self) -> None:
        if min(self.pp, self.vpp, self.micro_batches) < 1:
            raise ValueError(f"a pipeline has at least one rank, chunk and micro-batch, but this one is {self}")
        if self.placement == "v" and self.vpp != 2:
            raise ValueError(f"placement v has two stages on each rank, but vpp is {self.vpp}")

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        if self.placement == "v":
            return stage if stage < self.pp else 2 * self.pp - 1 - stage
        return stage % self.pp

    def stage_of(self, rank: int, chunk: int) -> int:
        if self.placement == "v" and chunk == 1:
            return 2 * self.pp - 1 - rank
        return chunk * self.pp + rank


Duration = float | tuple[float, ...]
"""Duration of an operation, or one for each stage where stages differ."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Duration of each kind of operation for one chunk, and of a message between two ranks (``hop``). D lasts B + W."""

    F: Duration = 1.0
    B: Duration = 1.0
    W: Duration = 1.0
    R: Duration = 1.0
    hop: float = 0.0

    def of(self, kind: Kind, stage: int) -> float:
        if kind == "D":
            return self.of("B", stage) + self.of("W", stage)
        duration: Duration = getattr(self, kind)
        return duration[stage] if isinstance(duration, tuple) else duration

    def with_recompute_in_backward(self) -> Costs:
        """Return the costs of a backward pass that first runs the forward again."""
        stages = max((len(duration) for duration in (self.B, self.R) if isinstance(duration, tuple)), default=0)
        both = tuple(self.of("B", stage) + self.of("R", stage) for stage in range(max(stages, 1)))
        return replace(self, B=both if stages else both[0])

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("F", "B", "W", "R", "hop")}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Named list of operations for each rank of a pipeline.

    ``pairs`` has for each rank the places of forward passes that run together with the backward pass behind them: both begin
    when both have their inputs, and one computes while the other's tokens travel. It is empty where there are none.
    """

    name: str
    shape: PipelineShape
    ops: Ops
    pairs: tuple[frozenset[int], ...] = ()

    def together(self, rank: int, index: int) -> tuple[Op, ...]:
        """Return the operation at a place of a rank, with the one that runs together with it."""
        return self.ops[rank][index : index + 1 + (bool(self.pairs) and index in self.pairs[rank])]

    def to_json(self) -> dict[str, Any]:
        shape = self.shape
        pairs = {"pairs": [sorted(places) for places in self.pairs]} if self.pairs else {}
        group = {"group": shape.group} if shape.group else {}
        return (
            pairs
            | group
            | {
                "schedule": self.name,
                "pp": shape.pp,
                "vpp": shape.vpp,
                "micro_batches": shape.micro_batches,
                "placement": shape.placement,
                "ops": [[list(op) for op in rank] for rank in self.ops],
            }
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """Read what `to_json` wrote. Raises ValueError for a list that is malformed."""
        try:
            pp, vpp, micro_batches = (int(data[name]) for name in ("pp", "vpp", "micro_batches"))
            shape = PipelineShape(pp, vpp, micro_batches, data.get("placement", "loop"), data.get("group"))
            ops = tuple(tuple(_op(words) for words in rank) for rank in data["ops"])
            pairs = tuple(frozenset(map(int, places)) for places in data.get("pairs", ()))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a schedule: {error!r}") from error
        return cls(str(data.get("schedule", "file")), shape, ops, pairs)


def _op(words: Sequence[Any]) -> Op:
    kind, chunk, micro_batch = words
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of operation; the kinds are {', '.join(KINDS)}")
    return Op(kind, int(chunk), int(micro_batch))
