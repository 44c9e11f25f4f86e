"""Small copies of the installed megatron-core, to be edited: only the files in which patch targets are looked up."""

import shutil
from pathlib import Path

from mindspeed.engine.inspection.contract_reading import read_contract
from mindspeed.engine.inspection.contracts import BASELINE, CORE, part_of
from mindspeed.engine.inspection.megatron_copies import package_root
from mindspeed.engine.inspection.releases import recorded_section
from mindspeed.engine.inspection.source import files_consulted, trees_kept

PARALLEL_STATE = "parallel_state.py"


def copy_megatron(folder: Path) -> Path:
    """Copy what is needed into ``folder/megatron`` and return ``folder/megatron/core``."""
    root = package_root("core")
    assert root is not None
    with files_consulted() as files, trees_kept():
        recorded = recorded_section(BASELINE, "targets")
        assert recorded is not None
        for target in recorded[1]:
            if part_of(target) == CORE:
                read_contract(target)
    paths = {Path(file).relative_to(root) for file in files if Path(file).is_relative_to(root)}
    packages = {parent / "__init__.py" for path in paths for parent in path.parents if parent != Path()}
    for path in paths | packages | {Path("core/package_info.py")}:
        if (root / path).is_file():
            (folder / "megatron" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, folder / "megatron" / path)
    return folder / "megatron" / "core"


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that occurs in a file."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
