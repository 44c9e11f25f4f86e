"""Which of these tests can run: those against torch_npu only where `python -m tests.npu_contract` has loaded it.

There the environment is made for torch_npu, so what starts processes runs only elsewhere.
"""

import sys

_LOADED = "torch_npu" in sys.modules
collect_ignore = ["test_communicating_numerics.py"] if _LOADED else ["test_contract.py", "test_profiler.py"]
