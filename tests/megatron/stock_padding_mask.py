"""Which tokens a rank takes for padding in Megatron alone: ``torchrun --nproc-per-node 4 stock_padding_mask.py``.

A model with experts under sequence parallelism, whose tensor-parallel groups are its own: ranks 0 and 2, 1 and 3. Megatron
splits the padding mask by the global groups, ranks 0 and 1, 2 and 3. Printed are the ranks that get the mask of tokens
which another rank has. Needs no mindspeed, no GPU and no Transformer Engine.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

LENGTH, EXPERTS = 8, 2


def model(groups: ProcessGroupCollection) -> GPTModel:
    """The first stage of a model whose layer does nothing: what is looked at comes before the layers."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
    )
    idle = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
    return GPTModel(config, idle, 16, LENGTH, post_process=False, pg_collection=groups)


class NoEmbedding(torch.nn.Module):
    scatter_to_sequence_parallel = True

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(LENGTH // 2, 1, 8)


def own_share(mask: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    """The mask of the tokens that this rank has in its model's group."""
    return mask.chunk(groups.tp.size(), dim=1)[groups.tp.rank()]


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.tp, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    tokens = torch.arange(LENGTH)[None]
    mask = tokens >= LENGTH - 3

    stage = model(groups)
    stage.embedding = NoEmbedding()  # Megatron's own draws random numbers on a GPU
    given = stage._preprocess(tokens, tokens, padding_mask=mask)
    (share,) = [value for value in given if isinstance(value, torch.Tensor) and value.dtype == torch.bool]

    wrong = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, not torch.equal(share, own_share(mask, groups)))
    if dist.get_rank() == 0:
        print(f"ranks with the padding mask of other tokens: {[rank for rank, bad in enumerate(wrong) if bad]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
