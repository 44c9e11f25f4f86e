"""Old import name; see `mindspeed.compat.arguments`."""

from mindspeed.compat.arguments import process_args as process_args

__all__ = ["process_args"]
