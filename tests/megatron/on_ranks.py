"""What ranks of the pool do with Megatron's groups in `test_fixes`."""

import os
from typing import Any


def held() -> tuple[int, int]:
    """Threads and open descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycles(count: int, tensor_parallel: int) -> list[tuple[int, int]]:
    """Create, use and destroy the groups ``count`` times; what the process holds after each."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    state.destroy_model_parallel()
    after = []
    for _ in range(count):
        state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        dist.all_reduce(torch.ones(1), group=state.get_tensor_model_parallel_group())
        dist.barrier()
        state.destroy_model_parallel()
        after.append(held())
    state.initialize_model_parallel()
    return after


def host_weights(tensor_parallel: int) -> Any:
    """The rows that this rank has of a layer that is initialised on the host."""
    import torch
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    state.destroy_model_parallel()
    state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
    )
    layer = ColumnParallelLinear(8, 16, config=config, init_method=config.init_method, bias=False)
    return layer.cuda().weight.detach()


def reduced_by_instances() -> list[list[float]]:
    """Gradients after two steps of a model whose distributed optimizer has two instances of one rank each."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    state.destroy_model_parallel()
    state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = torch.nn.Linear(4, 1, bias=False).cuda()
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, num_distributed_optimizer_instances=2
    )
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    parallel = DistributedDataParallel(config, options, model)
    reduced = []
    for _ in range(2):
        parallel.zero_grad_buffer()
        parallel(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        parallel.finish_grad_sync()
        (buffer,) = parallel.buffers
        reduced.append(buffer.grad_data[:4].tolist())
    return reduced
