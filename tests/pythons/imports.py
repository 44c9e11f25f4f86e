"""Imports every module of mindspeed in this Python; prints a JSON list of those that cannot be, each with its reason.

Modules that say which package of an accelerator they miss are no failure: those packages are not there.
"""

import importlib
import json
import pkgutil
import sys
from typing import Final

import mindspeed

RUN: Final = ("mindspeed.__main__", "mindspeed.megatron_adaptor", "mindspeed.workbench.verification.warm")
"""Modules that do something when they are imported."""
ACCELERATORS: Final = ("torch_npu", "triton")


def main() -> None:
    failed: list[str] = []
    names = [module.name for module in pkgutil.walk_packages(mindspeed.__path__, "mindspeed.", onerror=failed.append)]
    for name in names:
        if name in RUN or name.startswith("mindspeed.compat"):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            if not any(f"No module named '{package}'" in str(error) for package in ACCELERATORS):
                failed.append(f"{name}: {type(error).__name__}: {error}")
    print(json.dumps({"modules": len(names), "failed": failed}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
