"""device-emulation: asynchronous collectives and copies take time, fail and leave traces as those of a device do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from mindspeed import plugins as ms
from mindspeed.platforms.backend_rules import BackendRules

_HERE: Final = "mindspeed.features.device_emulation"
_COPIES: Final = "mindspeed.memory.transfers:transfer"
_PASSES: Final = "mindspeed.megatron.hook_wrappers:_forward_backward"
_PARKED: Final = "mindspeed.memory.parked:Parked"
_C10D: Final = "torch.distributed.distributed_c10d"


class DeviceEmulationArgs(ms.FeatureArgs):
    poison: bool = ms.Field(
        False,
        description="Fill outputs of asynchronous collectives and offloaded tensors with NaN until they are waited for",
    )
    collective_log: str = ms.Field(
        "",
        description="File that logs launch, wait and first use of asynchronous collectives and transfers, one file per "
        "rank. {rank} in the name is replaced by the rank; without it .RANK is appended",
    )
    log_steps: bool = ms.Field(
        False,
        description="Also log steps, communicators, synchronous collectives and matrix products in the file of collective_log: "
        "all that a simulation of exposed time needs",
    )
    transfer_delay: float = ms.Field(
        0.0,
        ge=0,
        description="Minimum time of a copy between device and host in milliseconds, to check that compute overlaps it",
    )
    link_ms: float = ms.Field(
        0.0,
        ge=0,
        description="Latency of every transfer on an emulated link in milliseconds; 0 together with "
        "link_gbps=0 = no emulated link",
    )
    link_gbps: float = ms.Field(0.0, ge=0, description="Bandwidth of a rank on an emulated link in Gbit/s; 0 = unlimited")
    backend: BackendRules | None = ms.Field(
        None,
        description="Collective backend whose rules are checked: what it refuses, when it creates communicators, and which "
        "operations hold which others. nccl-rules-eager = NCCL with device_id. A job that would hang ends with MS619. "
        "All ranks must be on one host",
    )


class DeviceEmulation(ms.Feature[DeviceEmulationArgs]):
    """Emulate on the CPU how a device overlaps collectives and copies with compute."""

    spec = ms.FeatureSpec(name="device-emulation", category=ms.Category.PLATFORM, level=0, platforms={"cpu"})

    _guard: AbstractContextManager[None] | None = None

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        """Return the wraps of collectives, inside out: launch/wait log, emulated link, poison."""
        from mindspeed.platforms.cpu import COLLECTIVES

        args = self.args
        patches: list[ms.Patch] = []
        if args.transfer_delay:
            reason = "delays copies between device and host"
            patches.append(ms.Set(f"{_HERE}.transfers:DELAY", args.transfer_delay / 1e3, reason))
            patches.append(ms.Wrap(_COPIES, f"{_HERE}.transfers:delayed", reason))
        if args.collective_log:
            reason = "logs launch, wait and first use of asynchronous collectives"
            patches.append(ms.Set(f"{_HERE}.collective_log:PATH", args.collective_log, reason))
            patches += _wraps("collective_log:logged", reason, *COLLECTIVES)
            patches += _wraps("collective_log:logged_group", reason, "_coalescing_manager")
            patches += _wraps("collective_log:watching", reason, "init_process_group")
            patches.append(ms.Wrap(_COPIES, f"{_HERE}.transfers:logged", "logs copies between device and host"))
            if args.log_steps:
                patches.append(ms.Set(f"{_HERE}.collective_log:WHOLE_STEPS", True, "logs whole steps"))
                patches.append(ms.Wrap(_PASSES, f"{_HERE}.collective_log:logged_step", "logs steps and their products"))
                patches += _wraps("collective_log:logged_batch", reason, "batch_isend_irecv")
        if args.link_ms or args.link_gbps:
            reason = "delays transfers as on the emulated link"
            patches.append(ms.Set(f"{_HERE}.link:LATENCY", args.link_ms / 1e3, reason))
            patches.append(ms.Set(f"{_HERE}.link:BYTES_PER_SECOND", args.link_gbps * 1e9 / 8 or float("inf"), reason))
            patches += _wraps("link:delayed", reason, *COLLECTIVES)
            patches += _wraps("link:delayed_group", reason, "_coalescing_manager")
        if args.poison:
            reason = "fills the output of an asynchronous collective with NaN until the collective is waited for"
            patches += _wraps("poison:poisoned", reason, *COLLECTIVES)
            patches += _wraps("poison:poisoned_group", reason, "_coalescing_manager")
            patches.append(
                ms.Wrap(
                    _COPIES,
                    f"{_HERE}.transfers:poisoned",
                    "fills the target of a copy between device and host with NaN until the copy is waited for",
                )
            )
            ended = "a device synchronization completes every collective"
            patches.append(ms.Wrap("torch.cuda:synchronize", f"{_HERE}.poison:synchronized", ended))
            away = "fills offloaded tensors with NaN until their transfer is waited for"
            patches.append(ms.Replace(f"{_PARKED}.free", f"{_HERE}.absent:fill_with_poison", away))
            patches.append(ms.Wrap(f"{_PARKED}.give", f"{_HERE}.absent:present_again", away))
        if args.backend:
            patches += _backend_rules(args.backend)
        return patches

    @ms.hookimpl
    def activated(self) -> None:
        if self.args.poison:
            from mindspeed.features.device_emulation.absent import reads_refused

            self._guard = reads_refused()
            self._guard.__enter__()

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.args.collective_log:
            from mindspeed.features.device_emulation.collective_log import stop_watching

            stop_watching()
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None


def _backend_rules(name: str) -> list[ms.Patch]:
    """Return the wraps that hold process groups to the rules of a backend."""
    from mindspeed.platforms.cpu import COLLECTIVES

    reason = "holds process groups to the rules of a collective backend"
    return [
        ms.Set("mindspeed.platforms.backend_rules:ACTIVE", name, reason),
        *_wraps("backend_rules:joined", reason, "init_process_group"),
        *_wraps("backend_rules:left", reason, "destroy_process_group"),
        *_wraps("backend_rules:ruled", reason, *COLLECTIVES),
        *_wraps("backend_rules:ruled_batch", reason, "batch_isend_irecv"),
        *_wraps("backend_rules:ruled_group", reason, "_coalescing_manager"),
        *_wraps("backend_rules:ruled_barrier", reason, "barrier"),
        *_wraps("backend_rules:ruled_new_group", reason, "new_group"),
        *_wraps("backend_rules:ruled_split_group", reason, "split_group"),
        ms.Wrap("torch.cuda:synchronize", f"{_HERE}.backend_rules:ruled_synchronize", reason),
    ]


def _wraps(wrapper: str, reason: str, *names: str) -> list[ms.Patch]:
    return [ms.Wrap(f"{_C10D}:{name}", f"{_HERE}.{wrapper}", reason) for name in names]
