"""Read the index of a distributed checkpoint without running anything that the file names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Final

INDEX: Final = ".metadata"

_CLASSES: Final = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""Classes in the indexes of torch and Megatron, besides dtypes. Creating one has no side effect."""


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        text = f"the index refers to {module}.{name}, which no torch checkpoint contains; it was not executed"
        raise pickle.UnpicklingError(text)


def read_index(checkpoint: Path) -> Any:
    """Return the index of a checkpoint, a ``Metadata`` of torch.

    Raises one of `checkpoints.UNREADABLE` for a damaged one, and for one that names anything else than an index does.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    with (checkpoint / INDEX).open("rb") as file:
        index = _IndexReader(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise pickle.UnpicklingError("the file is not an index of torch")
    for stored in index.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            text = f"the index has a tensor in {stored.relative_path}, which is not a file of the checkpoint"
            raise pickle.UnpicklingError(text)
    return index
