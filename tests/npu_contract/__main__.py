"""``python -m tests.npu_contract FOLDER [pytest arguments]``: this folder's tests with the torch_npu that lies in FOLDER."""

import sys
from pathlib import Path

from tests.npu_contract import stubs


def main() -> int:
    folder, *arguments = sys.argv[1:]
    stubs.load(Path(folder))
    import pytest

    if arguments == ["--write-schemas"]:
        from tests.npu_contract import schemas

        schemas.FILE.write_text(schemas.as_text(schemas.of_wheel({call.operator for call in schemas.calls()})))
        return 0
    return pytest.main([str(Path(__file__).parent), "-q", *arguments])


if __name__ == "__main__":
    sys.exit(main())
