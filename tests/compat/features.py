"""Features as somebody wrote them for MindSpeed: only the old names, nothing of the framework."""

from argparse import ArgumentParser, Namespace

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.patch_utils import MindSpeedPatchesManager


class ScaleMlpFeature(MindSpeedFeature):
    """Scale the output of every MLP."""

    def __init__(self):
        super().__init__("scale-mlp", optimization_level=2)

    def register_args(self, parser: ArgumentParser):
        group = parser.add_argument_group(title=self.feature_name)
        group.add_argument("--scale-mlp", action="store_true", help="scale the output of every MLP")
        group.add_argument("--scale-mlp-factor", type=int, default=3, help="the factor")

    def validate_args(self, args: Namespace):
        if args.scale_mlp and args.scale_mlp_factor < 1:
            raise AssertionError("--scale-mlp-factor must be positive")

    def register_patches(self, patch_manager: MindSpeedPatchesManager, args: Namespace):
        from tests.compat.glue import scaled

        if getattr(args, self.feature_name, None):
            patch_manager.register_patch("tests.compat.targets.double", scaled(args.scale_mlp_factor))


class AlwaysFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("always", optimization_level=0)

    def register_patches(self, patch_manager, args):
        from tests.compat.targets import bracket_wrapper

        patch_manager.register_patch("tests.compat.targets.double", bracket_wrapper)


class SchemeFeature(MindSpeedFeature):
    """Quantize by a scheme."""

    def __init__(self):
        super().__init__("quant-engine", optimization_level=2)

    def register_args(self, parser):
        parser.add_argument("--quant-scheme", type=str, default=None, choices=["w4a16", "w4a4"], help="the scheme")


class DeadCheckFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("dead-check")

    def register_args(self, parser):
        parser.add_argument("--dead-check", action="store_true")

    def validate_args(self, args):
        self.incompatible_check(args, "fused_ema_adamw")


class CheckingFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("checking")

    def register_args(self, parser):
        parser.add_argument("--checking", action="store_true")
        parser.add_argument("--checking-layers", type=int, nargs="+", default=None, help="layers")

    def validate_args(self, args):
        if args.num_layers % 2:
            raise ValueError("an odd number of layers")


class ExcludingFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("excluding")

    def register_args(self, parser):
        parser.add_argument("--excluding", action="store_true")

    def validate_args(self, args):
        self.incompatible_check(args, "scale_mlp")


class DependingFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("depending")

    def register_args(self, parser):
        parser.add_argument("--depending", action="store_true")

    def validate_args(self, args):
        self.dependency_check(args, "sequence_parallel")


class ForcingFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("forcing", optimization_level=0)

    def register_patches(self, patch_manager, args):
        from tests.compat.targets import quadruple

        patch_manager.register_patch("tests.compat.targets.double", quadruple, force_patch=True)


class ReplacingFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("replacing", optimization_level=0)

    def register_patches(self, patch_manager, args):
        from tests.compat.targets import triple

        patch_manager.register_patch("tests.compat.targets.double", triple)


class BrokenFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("broken")

    def register_args(self, parser):
        raise RuntimeError("no arguments today")
