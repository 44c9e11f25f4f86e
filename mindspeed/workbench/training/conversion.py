"""Convert a distributed checkpoint between Megatron's local layers and Transformer Engine's.

Tensors are not read: only the index has their names. Their files are linked, or copied to another file system.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.planning.checkpoint_layers import NAMES, TRACKER, LayerKind, layers_of
from mindspeed.problems import Problem, RunError, advice
from mindspeed.workbench.training.checkpoint_index import INDEX, read_index
from mindspeed.workbench.training.checkpoints import (
    FOLDER,
    MANIFEST,
    UNREADABLE,
    checkpoint_at,
    damaged,
    file_sizes,
    read_manifest,
)

_OPTIMIZER: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.\w+\.")
"""Prefix of a parameter's name in the key of its optimizer state."""
_OF_LAYER: Final = re.compile(
    r"(?P<layer>.*?)"
    r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_|self_attention\.(?P<side>q|kv)_layernorm\."
    r"|self_attention\.linear_(?P<engine_side>q|kv)_up_proj\.layer_norm_)"
    r"(?P<last>weight|bias)"
)
_NORM: Final = re.compile(r".*(?:layernorm|final_norm|enorm|hnorm)")
_STATELESS: Final = re.compile(r".*(?:_embeddings|output_layer|router|gate)")
"""Modules that are not Transformer Engine's, or whose state Megatron leaves out."""
_PREDICTION: Final = re.compile(r"(mtp\.layers\.\d+\.transformer_layer\.self_attention)\.linear_proj")
STATE: Final = "._extra_state"


def renamed(key: str, parameters: Collection[str], kind: LayerKind) -> str:
    """Return the key of a tensor in a checkpoint of these layers; ``parameters`` are the keys of all."""
    optimizer = match.group() if (match := _OPTIMIZER.match(key)) else ""
    name = _OF_LAYER.fullmatch(key, len(optimizer))
    if name is None:
        return key
    layer, last = name["layer"], name["last"]
    is_latent = f"{layer}self_attention.linear_kv_up_proj.weight" in parameters
    if side := name["side"] or name["engine_side"]:
        if not is_latent:
            return key
        part = {"local": f"{side}_layernorm.", "transformer-engine": f"linear_{side}_up_proj.layer_norm_"}[kind]
        return f"{optimizer}{layer}self_attention.{part}{last}"
    is_module = is_latent if kind == "local" else f"{layer}mlp.router.weight" in parameters
    return f"{optimizer}{layer}{'pre_mlp_layernorm.' if is_module else 'mlp.linear_fc1.layer_norm_'}{last}"


def states(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the key and the shape of each extra state that Transformer Engine's layers with these parameters have.

    A module has one for each layer, and for each expert, whose parameters are parts of one tensor.
    """
    for key, shape in shapes.items():
        module, _, last = key.rpartition(".")
        if last != "weight" or _OPTIMIZER.match(key) or _STATELESS.fullmatch(module):
            continue
        yield module + STATE, shape[: -1 if _NORM.fullmatch(module) else -2] or (1,)
        if of_prediction := _PREDICTION.fullmatch(module):  # Megatron saves it of these layers alone
            yield f"{of_prediction[1]}.core_attention{STATE}", (1,)


def is_local(state: str) -> bool:
    """Return whether local layers have an extra state; ``state`` is its key."""
    module = state.partition(STATE)[0]
    return not (_NORM.fullmatch(module) or module.endswith("core_attention"))


_STATES: Final = "__extra_states.distcp"
_BUCKETS: Final = "optimizer.distributed."
"""In keys of an optimizer whose state lies in buckets, in the order of the parameters of the model that saved it."""


def convert(source: Path, target: Path, kind: LayerKind, step: int | None = None) -> Path:
    """Write a checkpoint of these layers and return its folder, which is whole or does not exist.

    ``source`` is a checkpoint, a run, or a folder of Megatron-LM's; ``target`` becomes the same, with this one checkpoint.
    Raises RunError with MS602 for a checkpoint that cannot be converted, and with MS603 where nothing can be written.
    """
    checkpoint = checkpoint_at(source, step)
    _require_convertible(checkpoint, kind)
    index = _read_index(checkpoint)
    if target.exists():
        raise _refusal(target, f"{target} already exists", "give a folder that does not exist")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        inside = partial / checkpoint.relative_to(source)
        inside.mkdir(parents=True)
        _write(index, checkpoint, inside, kind)
        if source != checkpoint:
            _write_surroundings(source, partial, checkpoint)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        text, fix = f"{target} is not writable: {error.strerror}", "give a writable folder with enough space"
        raise RunError([Problem("MS603", text, where=str(target), fix=advice(fix))]) from error
    return target / checkpoint.relative_to(source)


def _require_convertible(checkpoint: Path, kind: LayerKind) -> None:
    before = layers_of(checkpoint)
    try:
        backend = json.loads((checkpoint / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend", "torch_dist")
    except (OSError, ValueError):
        backend = None
    if backend != "torch_dist" or before is None:
        text = f"{checkpoint} is not a checkpoint of a transformer in the format torch_dist"
        raise _refusal(checkpoint, text, "save it with --ckpt-format torch_dist")
    if before == kind:
        raise _refusal(checkpoint, f"{checkpoint} already contains {NAMES[kind]}", "load it without conversion")


def _refusal(where: Path, text: str, fix: str) -> RunError:
    return RunError([Problem("MS602", text, where=str(where), fix=advice(fix))])


def _read_index(checkpoint: Path) -> Any:
    """Read the index, and refuse an optimizer whose state does not go by the names of parameters."""
    try:
        index = read_index(checkpoint)
    except UNREADABLE as error:
        raise RunError([damaged(checkpoint, [f"{INDEX} cannot be read: {error}"])]) from error
    if any(_BUCKETS in key for key in index.state_dict_metadata):
        text = f"{checkpoint} stores optimizer state in buckets, in the parameter order of the layers that saved it"
        raise _refusal(checkpoint, text, "save it with --dist-ckpt-optim-fully-reshardable, or with --no-save-optim")
    return index


def _write(index: Any, checkpoint: Path, folder: Path, kind: LayerKind) -> None:
    """Fill the folder of the new checkpoint."""
    for path in checkpoint.iterdir():
        if path.name not in (INDEX, MANIFEST, _STATES) and path.is_file():
            _link(path, folder / path.name)
    _rename(index, kind)
    content = io.BytesIO()
    if kind == "transformer-engine":
        _add_states(index, content)
        (folder / _STATES).write_bytes(content.getvalue())
    elif (checkpoint / _STATES).is_file():
        _link(checkpoint / _STATES, folder / _STATES)
    with (folder / INDEX).open("wb") as file:
        pickle.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
    if (checkpoint / MANIFEST).is_file():
        replace(read_manifest(checkpoint), files=file_sizes(folder)).write(folder)


def _rename(index: Any, kind: LayerKind) -> None:
    """Give the tensors of an index the names that these layers have, and drop the states that local ones do not have."""
    parameters = index.state_dict_metadata.keys()

    def key_of(key: str) -> str | None:
        if STATE in key:
            return key if kind == "transformer-engine" or is_local(key) else None
        return renamed(key, parameters, kind)

    stored = {at: key for at in index.storage_data if (key := key_of(at.fqn)) is not None}
    index.storage_data = {replace(at, fqn=key): index.storage_data[at] for at, key in stored.items()}
    for name in ("mcore_data", "planner_data"):
        if isinstance(getattr(index, name, None), dict):
            setattr(index, name, _with_keys(getattr(index, name), key_of))
    index.state_dict_metadata = _with_keys(index.state_dict_metadata, key_of)
    if hasattr(index, "all_local_plans"):  # what each rank wrote, under the old names; a later save compares its own with it
        index.all_local_plans = None


def _with_keys(values: dict[str, Any], key_of: Callable[[str], str | None]) -> dict[str, Any]:
    return {new: value for key, value in values.items() if (new := key_of(key)) is not None}


def _add_states(index: Any, content: io.BytesIO) -> None:
    """Add the extra states that an index lacks; all are one empty state, which ``content`` gets."""
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    torch.save([torch.empty(0, dtype=torch.uint8)], content)
    size = content.tell()
    sample = next(iter(index.storage_data.values()))
    stored = replace(sample, relative_path=_STATES, offset=0, length=size)
    if hasattr(stored, "transform_descriptors"):
        stored = replace(stored, transform_descriptors=None)
    shapes = {key: tuple(kept.size) for key, kept in index.state_dict_metadata.items() if hasattr(kept, "size")}
    for key, shape in states(shapes):
        for offset in itertools.product(*map(range, shape)):
            name = f"{key}/shard_{_dotted(offset)}_{_dotted(shape)}"
            if name not in index.state_dict_metadata:
                index.state_dict_metadata[name] = BytesStorageMetadata()
                index.storage_data[MetadataIndex(name)] = stored


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _link(source: Path, target: Path) -> None:
    """Link a file, which nothing changes once it is written; on another file system, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_surroundings(source: Path, target: Path, checkpoint: Path) -> None:
    """Write what a folder of checkpoints has beside them: the job of a run, or Megatron-LM's name of the newest one."""
    if checkpoint.parent.name == FOLDER:
        shutil.copy2(source / "job.yaml", target / "job.yaml")
        return
    step = checkpoint.name.removeprefix("iter_")
    (target / TRACKER).write_text(str(int(step)) if step.isdigit() else step, encoding="utf-8")
