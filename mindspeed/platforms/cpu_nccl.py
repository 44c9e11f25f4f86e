"""NCCL's names in Python, where gloo does its work."""

from __future__ import annotations

from types import SimpleNamespace


def version() -> tuple[int, int, int]:
    """``torch.cuda.nccl.version``: below every release, so that nothing of a newer NCCL is expected."""
    return 0, 0, 0


class ProcessGroupNCCL:
    """The class that no group has here; its options are accepted, and dropped with the backend nccl."""

    class Options:
        """Options of a group; ``config`` takes any field."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
