"""What Megatron-LM 0.18 and newer take from Python 3.12, for tests of their checkouts under an older Python."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
