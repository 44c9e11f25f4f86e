import megatron.core.state
from megatron.core import state

mpu = state
