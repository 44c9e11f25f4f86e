"""What processes under an older Python need beside a Megatron that asks for Python 3.12."""

import sys
from pathlib import Path
from typing import Final

FOLDERS: Final = [str(Path(__file__).parent / "megatron" / "versions" / "python311")] if sys.version_info < (3, 12) else []
"""Folders that go first on the path: a stand-in for ``typing.override``; none where Python has it."""
