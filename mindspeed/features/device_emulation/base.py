"""device-emulation: asynchronous collectives and copies take time, fail and leave traces as those of a device do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Field, Patch, Replace, Set, Wrap, hookimpl

_HERE: Final = "mindspeed.features.device_emulation"
_COPIES: Final = "mindspeed.memory.transfers:transfer"
_PARKED: Final = "mindspeed.memory.parked:Parked"
_C10D: Final = "torch.distributed.distributed_c10d"


class DeviceEmulationArgs(FeatureArgs):
    poison: bool = Field(
        False,
        description="fill outputs of asynchronous collectives, and storages that are elsewhere, with NaN until the wait",
    )
    collective_log: str = Field(
        "",
        description="write launch, wait and first use of asynchronous collectives and transfers to this file, one per rank: "
        "{rank} in the name is the rank, and a name without it gets .RANK at its end",
    )
    transfer_delay: float = Field(
        0.0, ge=0, description="milliseconds that a copy between device and host takes at least, to see whether work hides it"
    )
    link_ms: float = Field(
        0.0, ge=0, description="milliseconds that every transfer takes on an emulated link; 0 with link_gbps 0 is no such link"
    )
    link_gbps: float = Field(0.0, ge=0, description="gigabits per second that a rank sends on an emulated link; 0 is no limit")


class DeviceEmulation(Feature[DeviceEmulationArgs]):
    """Emulate on the CPU how a device runs collectives and copies beside the computation."""

    spec = FeatureSpec(name="device-emulation", category=Category.PLATFORM, level=0, platforms={"cpu"})

    _guard: AbstractContextManager[None] | None = None

    @hookimpl
    def patches(self) -> list[Patch]:
        """Return the wraps of collectives, inside out: launch/wait log, emulated link, poison."""
        from mindspeed.platforms.cpu import COLLECTIVES

        args = self.args
        patches: list[Patch] = []
        if args.transfer_delay:
            reason = "copies between device and host take their time"
            patches.append(Set(f"{_HERE}.transfers:DELAY", args.transfer_delay / 1e3, reason))
            patches.append(Wrap(_COPIES, f"{_HERE}.transfers:delayed", reason))
        if args.collective_log:
            reason = "launch, wait and use of asynchronous collectives are logged"
            patches.append(Set(f"{_HERE}.collective_log:PATH", args.collective_log, reason))
            patches += _wraps("collective_log:logged", reason, *COLLECTIVES)
            patches += _wraps("collective_log:logged_group", reason, "_coalescing_manager")
            patches += _wraps("collective_log:watching", reason, "init_process_group")
            patches.append(Wrap(_COPIES, f"{_HERE}.transfers:logged", "so are copies between device and host"))
        if args.link_ms or args.link_gbps:
            reason = "transfers take the time of an emulated link"
            patches.append(Set(f"{_HERE}.link:LATENCY", args.link_ms / 1e3, reason))
            patches.append(Set(f"{_HERE}.link:BYTES_PER_SECOND", args.link_gbps * 1e9 / 8 or float("inf"), reason))
            patches += _wraps("link:delayed", reason, *COLLECTIVES)
            patches += _wraps("link:delayed_group", reason, "_coalescing_manager")
        if args.poison:
            reason = "the output of an asynchronous collective is poison until it is waited for"
            patches += _wraps("poison:poisoned", reason, *COLLECTIVES)
            patches += _wraps("poison:poisoned_group", reason, "_coalescing_manager")
            patches.append(Wrap(_COPIES, f"{_HERE}.transfers:poisoned", "so is the target of a copy between device and host"))
            ended = "a synchronization of the device waits for every collective"
            patches.append(Wrap("torch.cuda:synchronize", f"{_HERE}.poison:synchronized", ended))
            away = "what is away is poison until it is waited for"
            patches.append(Replace(f"{_PARKED}.free", f"{_HERE}.absent:fill_with_poison", away))
            patches.append(Wrap(f"{_PARKED}.give", f"{_HERE}.absent:present_again", away))
        return patches

    @hookimpl
    def activated(self) -> None:
        if self.args.poison:
            from mindspeed.features.device_emulation.absent import reads_refused

            self._guard = reads_refused()
            self._guard.__enter__()

    @hookimpl
    def deactivated(self) -> None:
        if self.args.collective_log:
            from mindspeed.features.device_emulation.collective_log import stop_watching

            stop_watching()
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None


def _wraps(wrapper: str, reason: str, *names: str) -> list[Patch]:
    return [Wrap(f"{_C10D}:{name}", f"{_HERE}.{wrapper}", reason) for name in names]
