"""How operators call torch_npu, against the real torch_npu on a machine without an NPU; see README.md."""
