"""What importing it does elsewhere, the cpu platform does here."""

import torch_npu as torch_npu
