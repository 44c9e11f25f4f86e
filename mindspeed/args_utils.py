"""Old import name; see `mindspeed.legacy.arguments`. Consumers also write ``_MINDSPEED_ARGS``, so it lives here."""

from __future__ import annotations

from argparse import Namespace

from mindspeed.legacy.arguments import get_full_args as get_full_args
from mindspeed.legacy.arguments import get_mindspeed_args as get_mindspeed_args
from mindspeed.legacy.arguments import process_args as process_args

__all__ = ["get_full_args", "get_mindspeed_args", "process_args"]

__path__: list[str] = []  # `mindspeed.legacy.imports` is asked for the names that are not here

_MINDSPEED_ARGS: Namespace | None = None
