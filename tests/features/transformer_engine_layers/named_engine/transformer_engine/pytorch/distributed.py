from contextlib import nullcontext
from typing import Any


class CudaRNGStatesTracker:
    def reset(self) -> None: ...

    def add(self, name: str, seed: int) -> None: ...


def activation_recompute_forward(*arguments: Any, **options: Any) -> Any:
    return nullcontext()
