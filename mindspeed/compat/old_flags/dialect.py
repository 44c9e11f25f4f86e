"""MindSpeed's flags and programs as a dialect: the entry point through which command lines are translated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

from mindspeed.compat.old_flags.as_hybrid import as_hybrid
from mindspeed.compat.old_flags.flags import flags_of, read_old_flags, takes_text
from mindspeed.compat.old_flags.other_flags import refused_program
from mindspeed.megatron_lm.dialects import Dialect

MINDSPEED: Final[Dialect] = SimpleNamespace(
    name="old flags",
    translate=read_old_flags,
    advice=as_hybrid,
    flags_of=flags_of,
    takes_text=takes_text,
    refusal_of=refused_program,
)
