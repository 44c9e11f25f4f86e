"""Packages that arguments of Megatron-LM need on every rank, and that this machine does not have. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.megatron_lm.given_arguments import Given


class _Need(NamedTuple):
    dest: str
    values: tuple[object, ...]
    module: str
    package: str


_NEEDS: Final = (
    _Need("moe_enable_deepep", (True,), "deep_ep", "DeepEP"),
    _Need("moe_flex_dispatcher_backend", ("deepep", "hybridep"), "deep_ep", "DeepEP"),
    _Need("optimizer", ("muon", "dist_muon", "adaptive_muon", "soap"), "emerging_optimizers", "Emerging Optimizers"),
    _Need("experimental_attention_variant", ("gated_delta_net",), "fla", "flash-linear-attention"),
    _Need("linear_attention_type", ("gated_delta_net",), "fla", "flash-linear-attention"),
)
"""Values of arguments with which Megatron imports a package, and its name."""


def package_rows(given: Mapping[str, Given]) -> Iterator[PlanNote]:
    """Yield a row for every argument whose package is not installed here; the ranks may have it."""
    for need in _NEEDS:
        argument = given.get(need.dest)
        if argument is not None and argument.value in need.values and find_spec(need.module) is None:
            word = argument.option if argument.value is True else f"{argument.option} {argument.value}"
            text = f"{word} needs {need.package} on every rank; its module {need.module} is not installed here"
            yield PlanNote("not-checked", "megatron-lm", text)
