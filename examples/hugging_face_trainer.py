"""A Hugging Face model and Trainer with ring attention and the swapped optimizer of mindspeed.

python examples/hugging_face_trainer.py --attention sdpa
torchrun --nproc-per-node 2 examples/hugging_face_trainer.py

Each rank has a part of the tokens of every row, so long rows fit. Both commands print the same losses. Needs transformers and
accelerate.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mindspeed.nn import ContextParallelAttention, transformers_attention
from mindspeed.optim import SwapOptimizer

ROWS, TOKENS, STEPS = 4, 64, 3


class ShardedTrainer(Trainer):
    """Gives every rank the same rows, of which it takes its tokens; DDP averages the gradients of the parts."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["ring", "sdpa"], default="ring")
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    ring = ContextParallelAttention(init_device_mesh("cpu", (dist.get_world_size(),)))
    AttentionInterface.register("ring", transformers_attention(ring))

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=options.attention)
    model = LlamaForCausalLM(config)
    optimizer = SwapOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), parts=4)

    def collate(rows):
        tokens = torch.stack(rows)
        labels = ring.shard(tokens[:, 1:])  # the tokens that follow, shifted before the rows are split
        positions = ring.positions(TOKENS).expand(len(rows), -1)
        return {"input_ids": ring.shard(tokens[:, :-1]), "labels": labels, "shift_labels": labels, "position_ids": positions}

    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = list(text[: ROWS * STEPS * (TOKENS + 1)].view(-1, TOKENS + 1))
    arguments = TrainingArguments(
        output_dir="build/hugging_face",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        logging_steps=1,
        ddp_find_unused_parameters=False,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = ShardedTrainer(model, arguments, data_collator=collate, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    for row in trainer.state.log_history if dist.get_rank() == 0 else ():
        if "loss" in row:
            print(f"step {row['step']}  loss {row['loss']:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
