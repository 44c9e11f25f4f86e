"""Imports under other names, through a package, and by star."""

from megatron.core import mpu
from megatron.core.state import *  # noqa: F403
from megatron.core.state import get_size as size_of
from megatron.core.transformer.attention import Attention as CoreAttention
from megatron.core.transformer.attention import Base


class Layer(Base):
    core = CoreAttention
    measure = staticmethod(size_of)
    by_name = {"core": CoreAttention}  # noqa: RUF012

    def forward(self, x):
        return self.core().forward(x)


def sizes():
    return size_of(), mpu.get_size()
