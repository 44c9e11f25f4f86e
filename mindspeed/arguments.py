"""Old import name; see `mindspeed.legacy.arguments`."""

from mindspeed.legacy.arguments import process_args as process_args

__all__ = ["process_args"]
