"""The role of a norm."""

from __future__ import annotations

from typing import Any

from mindspeed.features.transformer_engine_layers.interface import refuse, refuse_unknown
from mindspeed.features.transformer_engine_layers.modules import LayerNorm, RMSNorm, norm_options


class TENorm:
    """Makes the norm that a configuration names: `LayerNorm` or `RMSNorm`."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False, **newer: Any) -> Any:
        """Return the norm; ``persist_layer_norm`` of the configuration changes nothing here."""
        refuse_unknown("TENorm", newer)
        if has_residual and getattr(config, "fused_residual_rmsnorm", False):
            refuse("TENorm", "does not add the residual (fused_residual_rmsnorm)", "remove fused_residual_rmsnorm")
        kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            refuse("TENorm", f"does not support normalization {config.normalization}", "use LayerNorm or RMSNorm")
        centered = bool(config.layernorm_zero_centered_gamma)
        norm = kinds[config.normalization](hidden_size, eps, zero_centered_gamma=centered, **norm_options(config))
        norm.config = config
        return norm
