"""The cases of the matrix: pairs of features, features in layouts, and larger sets. Light."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Final
from zlib import crc32

from mindspeed import registry
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.problems import ResolutionError
from mindspeed.verification.case import VerificationCase, build_case

STEPS: Final = 2
"""Optimizer steps of a case: gradients are those of the first, and a wrong update shows in the loss of the second."""
_BF16_OF: Final = 3
"""One case of so many trains in bf16, chosen by its name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes, and the features that a job of this layout has beside those that its sizes bring in."""

    world: Mapping[str, Any]
    features: tuple[str, ...] = ()


LAYOUTS: Final[Mapping[str, Layout]] = {
    "tp2": Layout({"tp": 2}),
    "tp2-sp": Layout({"tp": 2}, ("sequence-parallel",)),
    "pp2": Layout({"pp": 2}),
    "pp2-vpp2": Layout({"pp": 2, "vpp": 2}),
    "cp2-ring": Layout({"cp": 2}, ("ring-attention",)),
    "cp2-ulysses": Layout({"cp": 2}, ("ulysses-attention",)),
    "ep2": Layout({"ep": 2, "num_experts": 4}),
    "dp2": Layout({"world_size": 2}),
    "dp2-sharded": Layout({"world_size": 2}, ("distributed-optimizer", "async-ddp", "async-param-gather")),
    "tp2-pp2": Layout({"tp": 2, "pp": 2}),
    "tp2-cp2": Layout({"tp": 2, "cp": 2}, ("ulysses-attention",)),
    "pp2-dp2": Layout({"pp": 2, "world_size": 4}),
    "ep2-tp2-sp": Layout({"ep": 2, "tp": 2, "num_experts": 4}, ("sequence-parallel",)),
}
"""Layouts in which every feature is judged. ``world_size`` beyond the product of the sizes are replicas."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A choice that stock Megatron offers: fields of its configuration, a model, or features that only set its arguments."""

    options: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()


def _experts(**options: Any) -> Switch:
    return Switch(options, {"num_experts": 4})


SWITCHES: Final[Mapping[str, Switch]] = {
    "plain": Switch(),
    "llama": Switch(world={"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "rotary": True}),
    "untied-embeddings": Switch(world={"tied_embeddings": False}),
    "grouped-query-attention": Switch(world={"num_query_groups": 2}),
    "qk-layernorm": Switch({"qk_layernorm": True}),
    "latent-attention": Switch(world={"multi_latent_attention": True, "rotary": True, "tied_embeddings": False}),
    "residual-in-fp32": Switch({"fp32_residual_connection": True}),
    "loss-per-token": Switch({"calculate_per_token_loss": True}),
    "multi-token-prediction": Switch(world={"mtp_num_layers": 1, "rotary": True, "tied_embeddings": False}),
    "distributed-optimizer": Switch(features=("distributed-optimizer",)),
    "overlapped-reduction": Switch(features=("async-ddp",)),
    "overlapped-gathering": Switch(features=("distributed-optimizer", "async-ddp", "async-param-gather")),
    "recompute-core-attention": Switch(features=("recompute",)),
    "experts": _experts(),
    "experts-alltoall": _experts(moe_token_dispatcher_type="alltoall"),
    "experts-allgather": _experts(moe_token_dispatcher_type="allgather"),
    "experts-grouped": Switch(world={"num_experts": 4, "grouped_experts": True}),
    "experts-shared": Switch(world={"num_experts": 4, "shared_expert_hidden_size": 32}),
    "experts-with-capacity": Switch(world={"num_experts": 4, "expert_capacity_factor": 2.0}),
    "aux-loss": _experts(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0),
    "sequence-aux-loss": _experts(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0),
    "global-aux-loss": _experts(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0),
    "sinkhorn": _experts(moe_router_load_balancing_type="sinkhorn", moe_router_pre_softmax=False),
    "z-loss": _experts(moe_z_loss_coeff=1.0),
    "expert-bias": _experts(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_load_balancing_type="none"
    ),
    "aux-loss-per-token": _experts(moe_aux_loss_coeff=1.0, calculate_per_token_loss=True),
}
"""Choices of stock Megatron that are judged in the layouts of `STOCK_LAYOUTS`, without a feature of ours at work."""

FEATURE_LAYOUTS: Final = tuple(name for name in LAYOUTS if name != "dp2")
"""Plain replicas are part of `dp2-sharded`."""
STOCK_LAYOUTS: Final = ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "dp2", "ep2", "ep2-tp2-sp")


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """Some features, in a layout or in the smallest surroundings that suit them; or a switch of stock Megatron in a layout.

    ``given`` are sizes and a model shape, ``test`` is a command that judges the case instead of a proof on a tiny model.
    """

    features: tuple[str, ...]
    layout: str = ""
    switch: str = ""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    test: str = ""

    @property
    def name(self) -> str:
        """``"rms-norm + swiglu"`` or ``"swiglu @ tp2"``, by which the store knows the case."""
        what = f"stock {self.switch}" if self.switch else " + ".join(self.features)
        more = [json.dumps(part, sort_keys=True) for part in (self.settings, self.given, self.test) if part]
        return " ".join([what, *(["@", self.layout] if self.layout else []), *more])

    @property
    def dtype(self) -> str:
        """Return bf16 for a third of all cases, the same ones at every run."""
        return "bf16" if not (self.switch or self.given) and crc32(self.name.encode()) % _BF16_OF == 0 else "fp32"

    @property
    def tested(self) -> tuple[str, ...]:
        """The features of the case, and those of its switch and its layout whose slots they leave free."""
        known = registry.catalog()
        taken = {slot for name in self.features for slot in known.feature(name).spec.slots}
        free = [name for name in self._layout.features if not taken.intersection(known.feature(name).spec.slots)]
        switched = [known.owners[size][0] for size in self._layout.world if self.switch and size in known.owners]
        switched += ["data-parallel"] if self.switch and "world_size" in self._layout.world else []
        return tuple(dict.fromkeys((*self.features, *switched, *self._switch.features, *free)))

    @property
    def world(self) -> dict[str, Any]:
        """The sizes that the case asks for; a feature that declares a dtype for its proof gets that one."""
        known = registry.catalog()
        declared = any("dtype" in known.feature(name).spec.verify_with.world for name in self.tested)
        sizes = {**self._switch.world, **self._layout.world, **self.given}
        return sizes if declared else {"dtype": self.dtype} | sizes

    @property
    def command(self) -> str:
        """The command that judges this case alone."""
        if self.switch:
            return f"mindspeed features matrix run --stock --switch {self.switch} --layout {self.layout} --again"
        sizes = {name: value for name, value in self.world.items() if value != "fp32"}
        options = [f"--{name.replace('_', '-')} {value}" for name, value in sizes.items()]
        options += [f"--set {name}.{key}={value}" for name, given in self.settings.items() for key, value in given.items()]
        return " ".join(["mindspeed features verify", *self.tested, *options])

    def build(self, environment: Environment | None = None) -> VerificationCase:
        """Plan both sides of the comparison. Raises ResolutionError where the features are refused."""
        layer = Layer("the matrix", settings=self.settings, world=self.world)
        case = build_case(self.tested, [layer], environment=environment, options=self._switch.options)
        return replace(case, recipe=replace(case.recipe, steps=STEPS))

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.layout] if self.layout else Layout({})

    @property
    def _switch(self) -> Switch:
        return SWITCHES[self.switch] if self.switch else Switch()


def pairs(names: Iterable[str]) -> Iterator[MatrixCase]:
    """Every two of these features."""
    return (MatrixCase(pair) for pair in combinations(sorted(names), 2))


def in_layouts(names: Iterable[str], layouts: Iterable[str] = FEATURE_LAYOUTS) -> Iterator[MatrixCase]:
    """Each of these features in each layout; of layouts that differ in who holds a slot that the feature takes, the first."""
    for name in sorted(names):
        seen = set[tuple[Any, ...]]()
        for layout in layouts:
            case = MatrixCase((name,), layout)
            made = (*sorted(case.tested), *sorted(case.world.items() - {("dtype", case.dtype)}))
            if made not in seen:
                seen.add(made)
                yield case


def of_stock(switches: Iterable[str] = tuple(SWITCHES), layouts: Iterable[str] = STOCK_LAYOUTS) -> Iterator[MatrixCase]:
    """Each switch of stock Megatron in each layout; expert parallelism needs experts."""
    layouts = tuple(layouts)
    for switch in switches:
        dense = "num_experts" not in SWITCHES[switch].world
        for layout in layouts:
            if not (dense and "num_experts" in LAYOUTS[layout].world):
                yield MatrixCase((), layout, switch=switch)


def resolves(names: Sequence[str]) -> bool:
    """Return whether these features can be planned together, in the surroundings that they declare."""
    try:
        MatrixCase(tuple(names)).build()
    except ResolutionError:
        return False
    return True
