"""Start one rank of a Megatron-LM command, up to the end of its first step: tensors have shapes but no contents.

Megatron-LM's own script, parser, validation, model, optimizer and schedule run here, with the other ranks of the group missing.
What reads files is left out: samples hold token 0.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from mindspeed import registry
from mindspeed.engine.planning.plan import plan_from_json
from mindspeed.engine.runtime import session
from mindspeed.workbench.verification.dry_run import fake_tensors
from mindspeed.workbench.verification.scratch_folder import scratch_folder

_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL: Final = 10
"""The first compute capability at which tensor parallelism does not need a single hardware queue."""


class Started(BaseException):
    """The first step has ended; a BaseException, so that nothing of the script takes it for a failure."""


def start(script: str, words: Sequence[str], plan: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run a script of the Megatron-LM on the path with these arguments under a plan in its JSON form, for one step.

    ``environ`` has the variables that the command sets.
    """
    decoded = plan_from_json(plan)
    os.environ.pop(_QUEUES, None)  # which workers have for features of ours
    os.environ.update({**environ, **registry.process_variables(decoded)})
    os.environ.update({"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"})
    with scratch_folder():
        registry.activate(decoded)
        try:
            if (active := session.current()) is not None:
                active.proof.say = None  # what other ranks reach cannot be asked
            _run(script, words)
        finally:
            registry.deactivate()


def _run(script: str, words: Sequence[str]) -> None:
    from megatron.core.datasets import utils
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer  # which compares shards of all ranks
    from megatron.training import arguments, get_args, training

    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", [script, *words]))
        stack.enter_context(patch.object(utils, "compile_helpers", lambda: None))
        if os.environ.get(_QUEUES, "1") != "1":  # what older devices refuse, the rules of the arguments have said
            stack.enter_context(patch.object(arguments, "get_device_arch_version", lambda: _BLACKWELL))
        stack.enter_context(patch.object(param_and_grad_buffer, "validate_uneven_dtensor", lambda shard: None, create=True))
        stack.enter_context(patch.object(training, "set_jit_fusion_options", lambda: None))  # which computes with real tensors
        stack.enter_context(patch.object(training, "build_train_valid_test_data_iterators", _iterators))
        stack.enter_context(
            patch.object(training, "setup_model_and_optimizer", _faked(training.setup_model_and_optimizer, stack))
        )
        stack.enter_context(patch.object(training, "train_step", _last(training.train_step)))
        try:
            runpy.run_path(script, run_name="__main__")
        except Started:
            return
        if not get_args().skip_train:
            raise RuntimeError(f"{script} ended without a training step")


def _faked(setup: Callable[..., Any], stack: ExitStack) -> Callable[..., Any]:
    """Around what makes model and optimizer: from there on tensors are fake."""

    def made(*args: Any, **kwargs: Any) -> Any:
        stack.enter_context(fake_tensors(losses=[{}]))  # Megatron-LM reads the names of the first one
        return setup(*args, **kwargs)

    return made


def _last(step: Callable[..., Any]) -> Callable[..., Any]:
    """Around a training step: nothing follows it. It ends early where shapes depend on the values of tensors."""

    def ended(*args: Any, **kwargs: Any) -> Any:
        with suppress(DynamicOutputShapeException):
            step(*args, **kwargs)
        raise Started

    return ended


def _iterators(*providers: Any) -> tuple[Any, None, None]:
    """Give what Megatron-LM's function of this name does: the samples of training of one model chunk."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args

    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    return RerunDataIterator(_samples(args)), None, None


def _samples(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
        batch["loss_mask"] = torch.ones(shape)
        batch["position_ids"] = torch.arange(args.seq_length).expand(shape).contiguous()
        if hasattr(args, "freeze_ViT"):  # of pretrain_vlm.py
            from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

            batch["image"] = torch.zeros(args.micro_batch_size, 3, args.img_h, args.img_w)
            batch["tokens"][:, 0] = DEFAULT_IMAGE_TOKEN_INDEX
        if args.create_attention_mask_in_dataloader:
            length = args.seq_length
            batch["attention_mask"] = torch.ones(args.micro_batch_size, 1, length, length, dtype=torch.bool).triu(1)
        yield batch
