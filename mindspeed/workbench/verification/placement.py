"""Locate local tensors in the full model, by the metadata that Megatron keeps for its checkpoints."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from mindspeed.job.hybrid_pattern import ATTENTION, pattern_of
from mindspeed.workbench.verification.record import TensorShard


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A local parameter with its place: a ShardedTensor, or a factory where it consists of several (SwiGLU's two halves)."""

    parameter: torch.nn.Parameter
    sharded: Any

    @property
    def main_grad(self) -> torch.Tensor:
        """The accumulated gradient that Megatron's data parallelism keeps with the parameter."""
        gradient: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return gradient

    def views(self, tensor: torch.Tensor) -> Iterator[View]:
        """Each part of ``tensor``, which is shaped like the parameter."""
        yield from _views(self._cut(tensor))

    def assembled(self, content: Callable[[View], torch.Tensor]) -> torch.Tensor:
        """A tensor shaped like the parameter, made of what ``content`` gives for each of its parts."""
        cut = self._cut(torch.empty(self.parameter.shape, dtype=torch.float32))
        for view in _views(cut):
            view.tensor.copy_(content(view))
        parts: Any = [part.data for part in cut] if isinstance(cut, list) else cut.data
        whole: torch.Tensor = self.sharded.merge_fn(parts) if isinstance(self.sharded, ShardedTensorFactory) else parts
        return whole

    def _cut(self, tensor: torch.Tensor) -> Any:
        """Return the sharded form of ``tensor`` in a checkpoint: one ShardedTensor, or a list of them."""
        if isinstance(self.sharded, ShardedTensorFactory):
            built = self.sharded.build_fn(self.sharded.key, tensor, self.sharded.replica_id, self.sharded.flattened_range)
            return list(built.values()) if isinstance(built, dict) else built
        return replace(self.sharded, data=tensor, dtype=tensor.dtype)


class View(NamedTuple):
    """Part of a tensor that is ``full[where]`` of the full tensor ``name``, whose shape is ``shape``."""

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]
    tensor: torch.Tensor


def placed_parameters(chunks: Sequence[torch.nn.Module]) -> list[ShardedParameter]:
    """Every parameter of this rank's model chunks with its place. Raises ValueError when one has none."""
    found: dict[int, ShardedParameter] = {}
    for chunk in unwrap_model(list(chunks)):
        name_of = _name_in_gpt(getattr(chunk, "hybrid_layer_pattern", None) or "")
        state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for sharded in state.values():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and isinstance(sharded.data, torch.nn.Parameter):
                found.setdefault(id(sharded.data), ShardedParameter(sharded.data, replace(sharded, key=name_of(sharded.key))))
        missing = [name for name, parameter in chunk.named_parameters() if id(parameter) not in found]
        if missing:
            raise ValueError(f"parameters without a position in the full model: {', '.join(missing)}")
    return list(found.values())


def _name_in_gpt(pattern: str) -> Callable[[str], str]:
    """Return a function that names a parameter of a hybrid model as the GPTModel of the same layers does.

    A layer of that has the attention and the MLP, or experts, of the same number among those of the pattern.
    """
    if not pattern:
        return str
    read = pattern_of(pattern)

    def numbers(layers: str) -> list[int]:
        return [sum((other in ATTENTION) == (layer in ATTENTION) for other in layers[:at]) for at, layer in enumerate(layers)]

    decoder = numbers(read.layers)

    def name_of(key: str) -> str:
        key = re.sub(r"(?<=mtp\.layers\.)(\d+)\.mtp_model_layer\.layers\.\d+\.", r"\1.transformer_layer.", key)
        key = key.replace("decoder.final_norm.", "decoder.final_layernorm.")
        return re.sub(r"^decoder\.layers\.(\d+)", lambda found: f"decoder.layers.{decoder[int(found[1])]}", key)

    return name_of


def fill_weights(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Give every parameter its share of a full tensor that depends on its name and ``seed`` alone, not on the layout."""
    with torch.no_grad():
        for placed in placed_parameters(chunks):
            placed.parameter.copy_(placed.assembled(lambda view: _full_weight(view.name, view.shape, seed)[view.where]))


def pieces_of(kind: str, placed: ShardedParameter, tensor: torch.Tensor) -> Iterator[TensorShard]:
    """The shards of ``tensor``, a gradient or the weight of ``placed``."""
    for name, shape, index, view in placed.views(tensor.detach()):
        yield TensorShard(kind, name, shape, index, view.to("cpu", torch.float32, copy=True).numpy())


def _full_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big")))
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)


def _views(cut: Any) -> Iterator[View]:
    """The parts of a tensor; those of grouped experts, whose first axis is the expert, one by one."""
    for part in cut if isinstance(cut, list) else [cut]:
        grouped = ".experts." in part.key and part.data.dim() == 3
        for number, tensor in enumerate(part.data if grouped else [part.data]):
            yield View(*_place(part, part.prepend_axis_num + grouped, number), tensor)


_OTHER_NAMES: Final = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "linear_q_up_proj.layer_norm_": "q_layernorm.",
    "linear_kv_up_proj.layer_norm_": "kv_layernorm.",
}
"""Names of norms that differ between local layers and those of Transformer Engine, each with the one that counts here."""


def _one_name(key: str) -> str:
    """Return the name of a parameter that local layers and those of Transformer Engine share."""
    for name, shared in _OTHER_NAMES.items():
        before, found, after = key.rpartition(f".{name}")
        if found:
            return f"{before}.{shared}{after}"
    return key


def _place(sharded: Any, axes: int, number: int) -> tuple[str, tuple[int, ...], tuple[slice, ...]]:
    """The first ``axes`` axes number the expert; they move into the name. ``number`` is the place on the last of them."""
    name, shape = _one_name(str(sharded.key)), tuple(sharded.global_shape[axes:])
    offsets = list(sharded.global_offset[:axes])
    for offset in [*offsets[:-1], *(last + number for last in offsets[-1:])]:
        before, experts, after = name.rpartition(".experts.")
        name = f"{before}{experts}{offset}.{after}" if experts else f"{name}[{offset}]"
    lengths = [1] * sharded.prepend_axis_num + list(sharded.local_shape)
    place = [slice(start, start + length) for start, length in zip(sharded.global_offset, lengths, strict=True)]
    return name, shape, tuple(place[axes:])
