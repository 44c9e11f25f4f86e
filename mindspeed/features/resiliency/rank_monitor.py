"""The rank monitor of nvidia-resiliency-ext. Calls of this package alone."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.problems import Fix, Problem, RunError

_NAMES: Final = {"step": "step", "evaluation": "step", "save": "checkpointing"}
"""Names of sections that Megatron-LM's ``--enable-ft-package`` gives to the rank monitor, by ours."""


class RankMonitor:
    """A connection to the monitor that ft_launcher keeps for this rank. Raises RunError without the package."""

    def __init__(self) -> None:
        try:
            from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
        except ModuleNotFoundError as error:
            text = "nvidia-resiliency-ext is not installed, but resiliency.rank_monitor needs it"
            fix = Fix.run_command("pip install nvidia-resiliency-ext")
            raise RunError([Problem("MS501", text, ("resiliency",), fix=fix)]) from error
        self._client: Any = RankMonitorClient()
        self._client.init_workload_monitoring()

    def enter(self, section: str) -> None:
        """Begin a section that the monitor knows."""
        if section in _NAMES:
            self._client.start_section(_NAMES[section])

    def leave(self, section: str) -> None:
        """End a section that the monitor knows."""
        if section in _NAMES:
            self._client.end_section(_NAMES[section])

    def stop(self) -> None:
        """Tell the monitor that this rank is no longer to be watched."""
        self._client.shutdown_workload_monitoring()
