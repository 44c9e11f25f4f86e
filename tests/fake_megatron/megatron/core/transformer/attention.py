"""Classes in every relation that patches meet."""

import functools  # noqa: F401
from dataclasses import dataclass

from megatron.core.jit import jit
from megatron.core.state import HAVE_FAST, get_size
from megatron.core.state import scale as times
from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass
class Config:
    heads: int = 1

    def __post_init__(self):
        self.checked = True


class Base:
    kind = "base"

    def __init__(self, config=None):
        self.config = config

    def forward(self, x):
        return ("base", x)

    def inherited(self):
        return "inherited"

    @staticmethod
    def shape(x):
        return ("shape", x)

    @classmethod
    def build(cls, x):
        return (cls.__name__, x)

    @property
    def label(self):
        return "label"


class Attention(Base):
    """The class that features fight over."""

    def forward(self, x):
        return ("attention", *super().forward(x))

    call = forward


class SelfAttention(Attention):
    def forward(self, x):
        return ("self", *super().forward(x))


class Named(Base):
    def forward(self, x):
        return super(Named, self).forward(x)  # noqa: UP008


class Explicit(Base):
    def __init__(self):
        Base.__init__(self)
        Explicit.reset(self)

    def reset(self):
        self.state = 0


@dataclass
class Submodules:
    core: type = Attention
    scale: object = None


def attend(x, core=Attention, *, scaled=times):
    return core().forward(scaled(x))


SPEC = ModuleSpec(module=SelfAttention, submodules=Submodules(core=Attention, scale=ModuleSpec(module=times)))
BY_NAME = {"attention": Attention, "nested": {"deep": [Attention]}}
BY_CLASS = {Attention: "attention", Base: "base"}
LIST = [times, get_size]
TUPLE = ("attention", Attention, (times,))
SET = {times, get_size}
FROZEN = frozenset({times})


def enabled():
    return HAVE_FAST, jit
