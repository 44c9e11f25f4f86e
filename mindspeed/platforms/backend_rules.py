"""The rules of NCCL and HCCL that the emulation of a device holds a job to. Light, data only.

The sources of each rule are in ``backend_rules.yaml``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from mindspeed.files.tables import table_beside

BackendRules = Literal["nccl-rules", "nccl-rules-eager", "hccl-rules"]
"""Name of a set of rules. Eager is NCCL under ``init_process_group(device_id=...)``."""
NAMES: Final[tuple[str, ...]] = get_args(BackendRules)

ACTIVE: str | None = None
"""Name of the set of rules that the active plan holds process groups to."""

PAIR: Final = " pair"
created: Final[list[str]] = []
"""Communicators of this rank, by the description of their group; a name that ends in `PAIR` is that of two ranks."""

_TABLES: Final[dict[str, Any]] = table_beside(__file__)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The behavior of one backend.

    With ``eager``, a group has its communicator as soon as it exists, and every operation uses it. Otherwise a communicator is
    created at its first operation, and a point-to-point operation outside a batch has one of its two ranks. ``no_split`` says
    why ``split_group`` is refused; empty is allowed. With ``in_place_all_to_all``, input and output may overlap. ``types`` are
    the data types that the backend moves, ``reduced_types`` those that it reduces. ``buffer`` and ``pair_buffer`` are the
    megabytes of a communicator of a group and of two ranks; None is unknown.
    """

    name: str
    backend: str
    eager: bool
    no_split: str
    in_place_all_to_all: bool
    types: frozenset[str]
    reduced_types: frozenset[str]
    buffer: int | None
    pair_buffer: int | None

    def megabytes(self, communicators: Collection[str]) -> int | None:
        """Return the megabytes that communicators, named as in `created`, reserve on a device; None is unknown."""
        if self.buffer is None or self.pair_buffer is None:
            return None
        pairs = sum(name.endswith(PAIR) for name in communicators)
        return pairs * self.pair_buffer + (len(communicators) - pairs) * self.buffer


def rule_set(name: str) -> RuleSet:
    """Return a set of rules by its name."""
    row = dict(_TABLES["sets"][name])
    moved, reduced = (frozenset(row.pop(kind).split()) for kind in ("types", "reduced_types"))
    return RuleSet(name, types=moved, reduced_types=reduced, **row)


@dataclass(frozen=True, slots=True)
class BackendRule:
    """A rule: what a backend does, and the place in its source. ``nccl`` or ``hccl`` is empty where it has no such rule."""

    name: str
    text: str
    nccl: str = ""
    hccl: str = ""


RULES: Final = tuple(BackendRule(**row) for row in _TABLES["rules"])
METHODS: Final[tuple[str, ...]] = tuple(_TABLES["methods"]["names"].split())
"""Methods of a process group that move tensors."""
