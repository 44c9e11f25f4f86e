"""Values of the communicating kernels for NPU on 2 x 2 gloo processes, with plain formulas behind torch_npu's operators."""

import torch

from tests.npu_contract import communicating
from tests.npu_contract.cases import CASES

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def test_values_are_those_of_the_reference_on_every_rank(pool):
    cases = [case for case in CASES if case.group]
    runs = [(case, dtype) for case in cases for dtype in case.types]
    for results in pool.call(communicating.runs, 4, [str(case) for case in cases]):
        for (case, dtype), (called, given, expected) in zip(runs, results, strict=True):
            assert called == case.forward, case
            assert [x.dtype for x in given] == [x.dtype for x in expected], case
            for a, b in zip(given, expected, strict=True):
                scale = max(1.0, float(b.double().abs().max())) if b.numel() else 1.0
                bound = TOLERANCE[dtype]
                torch.testing.assert_close(
                    a.double(), b.double(), rtol=bound, atol=bound * scale, msg=lambda m, case=case: f"{case}: {m}"
                )
