"""Old import name; see `mindspeed.legacy.arguments`. Consumers also write ``_MINDSPEED_ARGS``, so it lives here."""

from __future__ import annotations

from argparse import Namespace

from mindspeed.legacy.arguments import get_full_args as get_full_args
from mindspeed.legacy.arguments import get_mindspeed_args as get_mindspeed_args
from mindspeed.legacy.arguments import process_args as process_args

__all__ = ["get_full_args", "get_mindspeed_args", "process_args"]

_MINDSPEED_ARGS: Namespace | None = None


def __getattr__(name: str) -> object:
    from mindspeed.legacy.imports import missing_name

    raise missing_name(__name__, name)
