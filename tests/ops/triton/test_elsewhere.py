import pytest


def test_triton_kernels_equal_their_references():
    pytest.skip("triton is not installed here: `make test-triton` interprets and compiles all kernels")
