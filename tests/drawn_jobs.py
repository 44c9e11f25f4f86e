"""Jobs drawn from seeds: a model, a layout, three to eight features and values of their settings, which a plan accepts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from mindspeed import registry

SIZES: Final = ("tp", "pp", "cp", "ep", "vpp")
EXPERTS: Final = ("num_experts", "router_topk", "moe_ffn_hidden_size", "shared_expert_hidden_size", "grouped_experts")


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """Hold the features, settings and values of a job as text that a command line takes."""

    seed: int
    world: dict[str, Any]
    features: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The options of a verb that plans this job."""
        given = {name: _text(value) for name, value in self.world.items()}
        values = [word for name, value in given.items() for word in _option(name, value)]
        settings = [word for name, value in self.settings.items() for word in ("--set", f"{name}={value}")]
        return [*values, *(["--features", ",".join(self.features)] if self.features else []), *settings]


def draw(seed: int, accepted: Callable[[DrawnJob], bool]) -> DrawnJob:
    """Draw the job of a seed: what ``accepted`` refuses is left out, one feature or setting at a time."""
    pick = random.Random(seed)
    job = next(job for job in _shapes(seed, pick) if accepted(job))
    names = sorted(registry.catalog().names)
    wanted = pick.randint(3, 8)
    for name in pick.sample(names, len(names)):
        if len(job.features) >= wanted:
            break
        more = replace(job, features=(*job.features, name))
        if accepted(more):
            job = more
            for setting, value in _settings(name, pick):
                more = replace(job, settings={**job.settings, f"{name}.{setting}": value})
                job = more if accepted(more) else job
    return job


def _shapes(seed: int, pick: random.Random) -> Iterator[DrawnJob]:
    """Yield models in layouts, some of which no plan accepts."""
    while True:
        heads = pick.choice((1, 2, 3, 4, 6, 8))
        tp, pp, cp, dp = (pick.choice(sizes) for sizes in ((1, 1, 2, 2, 3, 4), (1, 1, 2, 3, 4), (1, 1, 2, 3, 4), (1, 1, 2, 3)))
        ranks = tp * pp * cp * dp
        if ranks > 16:
            continue
        vpp = pick.choice((1, 1, 2, 3)) if pp > 1 else 1
        world = {
            "world_size": ranks,
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "vpp": vpp,
            "num_layers": pick.choice((1, 2, 3, 4, 6, 8, 12)),
            "hidden_size": heads * pick.choice((8, 16, 24)),
            "num_attention_heads": heads,
            "num_query_groups": pick.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            "ffn_hidden_size": pick.choice((32, 48, 60, 96)),
            "seq_length": pick.choice((12, 16, 24, 32, 48, 64, 100)),
            "micro_batch_size": pick.choice((1, 1, 2, 3)),
            "dtype": pick.choice(("fp32", "bf16", "bf16")),
        }
        world["global_batch_size"] = world["micro_batch_size"] * dp * pick.choice((1, 2, 4, 6, 8))
        if pick.random() < 0.3:
            world |= {"normalization": pick.choice(("LayerNorm", "RMSNorm")), "activation": pick.choice(("gelu", "silu"))}
            world |= {"gated_linear_unit": pick.random() < 0.5, "tied_embeddings": pick.random() < 0.5}
        if pick.random() < 0.5:
            world |= _experts(pick, dp * tp * cp)
        yield DrawnJob(seed, world)


def _experts(pick: random.Random, most: int) -> dict[str, Any]:
    count = pick.choice((2, 4, 6, 8))
    return {
        "num_experts": count,
        "router_topk": pick.choice((1, 2, 2, 3)),
        "moe_ffn_hidden_size": pick.choice((16, 32, 40)),
        "shared_expert_hidden_size": pick.choice((0, 0, 24, 32)),
        "grouped_experts": pick.random() < 0.5,
        "expert_capacity_factor": pick.choice((0.0, 0.0, 0.0, 1.0, 1.5)),
        "ep": pick.choice([size for size in (1, 1, 2, 3, 4, 6, 8) if size <= most and count % size == 0]),
    }


def _settings(name: str, pick: random.Random) -> Iterator[tuple[str, str]]:
    """Yield values of some settings of a feature, the edges of their ranges among them."""
    for setting, values in choices(name).items():
        if values and pick.random() < 0.4:
            yield setting, pick.choice(values)


@cache
def choices(name: str) -> dict[str, tuple[str, ...]]:
    """Return texts that each setting of a feature may have by its type and bounds."""
    found = {}
    for setting, about in registry.catalog().feature(name).Args.model_fields.items():
        bounds = {key: value for one in about.metadata for key, value in bounds_of(one).items()}
        found[setting] = tuple(dict.fromkeys(map(_text, _values(about.annotation, bounds, about.default))))
    return found


def bounds_of(constraint: Any) -> dict[str, Any]:
    """Return the bounds that a constraint of pydantic states."""
    return {key: getattr(constraint, key) for key in ("ge", "gt", "le", "lt", "multiple_of") if hasattr(constraint, key)}


def _values(annotation: Any, bounds: dict[str, Any], default: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [value for kind in get_args(annotation) if kind is not NoneType for value in _values(kind, bounds, default)]
    if origin is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [True, False]
    if annotation is int:
        least = bounds.get("ge", bounds.get("gt", -1) + 1)
        most = bounds.get("le", bounds.get("lt", least + 9) - 1)
        return sorted({least, min(least + 1, most), min(least + 2, most), min(least + 3, most), most})
    if annotation is float:
        least = bounds.get("ge", bounds.get("gt", 0.0) + 0.125)
        return [least, bounds.get("le", least + 1.0), least + 0.5 if least + 0.5 <= bounds.get("le", 1e9) else least]
    if origin is tuple and isinstance(default, tuple) and default and get_args(annotation)[0] is str:
        return [default, default[:1], default[-1:]]
    return []


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _option(name: str, value: str) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if value == "true" else [f"--no-{option[2:]}"] if value == "false" else [option, value]
