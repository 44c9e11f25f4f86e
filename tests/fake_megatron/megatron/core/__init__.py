import megatron.core.state  # noqa: F401
from megatron.core import state

mpu = state
