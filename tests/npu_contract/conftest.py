"""Which of these tests can run: those against torch_npu only where `python -m tests.npu_contract` has loaded it."""

from __future__ import annotations

import sys

collect_ignore = [] if "torch_npu" in sys.modules else ["test_contract.py"]
