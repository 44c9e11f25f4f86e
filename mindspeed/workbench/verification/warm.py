"""Import, in the fork server of the broker, all that jobs on the cpu platform need, so that workers can be forked.

To import this module is to warm up. The server ends with the process that started it, and ends at once where a fork would
not be safe: with more than one thread.
"""

import gc
import os
from importlib.util import find_spec
from unittest.mock import patch

from mindspeed import registry
from mindspeed.engine.runtime import parent_process
from mindspeed.workbench.verification.worker import threads

parent_process.end_with(os.getppid())
with patch.dict(os.environ):
    registry.activate(registry.plan(platform="cpu", level=0))
    try:
        import mindspeed.workbench.verification.training  # noqa: F401  with the platform in place, for it imports Megatron

        if find_spec("megatron.training") is not None:
            import megatron.training.training  # noqa: F401
    finally:
        registry.deactivate()
if threads() != 1:
    raise SystemExit("workers are fresh processes, for this one has several threads and cannot be forked")
gc.collect()
gc.freeze()
