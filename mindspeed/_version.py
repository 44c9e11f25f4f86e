"""The version of mindspeed."""

from typing import Final

__version__: Final = "0.2.0"
