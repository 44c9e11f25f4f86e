"""An engine for tests: the classes of Transformer Engine 2.6 with the parameters and extra states that its source names.

It computes with plain torch. Megatron's own wrappers are built on it, so that the keys of their checkpoints are Megatron's.
"""

from . import common as common
from . import pytorch as pytorch

__version__ = "2.6.0"
