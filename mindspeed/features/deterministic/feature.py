"""Results that a rerun repeats bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from mindspeed import plugins as ms
from mindspeed.process.variables import ProcessVariable

if TYPE_CHECKING:
    from mindspeed.features.deterministic.digests import Digests
    from mindspeed.features.deterministic.torch_settings import TorchSettings


_VARIABLES: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ProcessVariable(":4096:8", ":16:8"),
    "NCCL_ALGO": ProcessVariable("Ring", r"Tree|CollnetDirect|CollnetChain|\^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ProcessVariable("0"),
    "HCCL_DETERMINISTIC": ProcessVariable("true", r"(?i)true|strict"),
    "LCCL_DETERMINISTIC": ProcessVariable("1"),
    "CLOSE_MATMUL_K_SHIFT": ProcessVariable("1"),
    "ATB_MATMUL_SHUFFLE_K_ENABLE": ProcessVariable("0"),
    "PYTHONHASHSEED": ProcessVariable("0", r"\d+"),
}
"""Each library below torch has a switch of its own."""


class DeterministicArgs(ms.FeatureArgs):
    digest_interval: int = ms.Field(
        0,
        ge=0,
        description="Interval in steps at which digests of weights and gradients are logged and compared across "
        "replicas (0 = never)",
    )


class Deterministic(ms.Feature[DeterministicArgs]):
    """Make reruns bitwise identical, also on resume.

    Every order of summation is fixed through Megatron's options, torch's deterministic algorithms, and environment
    variables of other libraries.
    """

    spec = ms.FeatureSpec(
        name="deterministic",
        category=ms.Category.TOOL,
        level=0,
        megatron_flags=(ms.MegatronFlag("deterministic_mode", switch="on"),),
        numerics=ms.Numerics.reordered(
            reason="the embedding gradient is summed in a fixed order, which differs from Megatron's order"
        ),
    )
    settings: TorchSettings | None = None
    digests: Digests | None = None

    @ms.hookimpl
    def process_variables(self) -> Mapping[str, ProcessVariable]:
        return _VARIABLES

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "deterministic_mode",
                True,
                "makes Megatron use deterministic implementations where it also has faster ones that are not",
            )
        ]

    @ms.hookimpl
    def activated(self) -> None:
        from mindspeed.features.deterministic.torch_settings import TorchSettings

        self.settings = TorchSettings.make_deterministic()

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.settings is not None:
            self.settings.restore()

    @ms.hookimpl
    def model_built(self, chunks: Sequence[Any]) -> None:
        if self.args.digest_interval:
            from mindspeed.features.deterministic.digests import Digests

            self.digests = Digests(chunks)

    @ms.hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None]:
        from mindspeed.features.deterministic.torch_settings import refusals_named

        return refusals_named()

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        if self.digests is None or state.step % self.args.digest_interval:
            return None
        return self.digests.compare(state.step)
