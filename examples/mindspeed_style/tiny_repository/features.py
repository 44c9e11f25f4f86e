"""The features of this repository."""

from argparse import ArgumentParser, Namespace

from mindspeed.features_manager import create_features_list as create_mindspeed_features_list
from mindspeed.features_manager.feature import MindSpeedFeature


class ScaleEmbeddingFeature(MindSpeedFeature):
    """Multiply the output of the embedding."""

    def __init__(self):
        super().__init__(feature_name="scale-embedding", optimization_level=2)

    def register_args(self, parser: ArgumentParser):
        group = parser.add_argument_group(title=self.feature_name)
        group.add_argument("--scale-embedding", action="store_true", help="multiply the output of the embedding")
        group.add_argument("--scale-embedding-factor", type=float, default=2.0, help="the factor")

    def validate_args(self, args: Namespace):
        if args.scale_embedding and args.scale_embedding_factor <= 0:
            raise AssertionError("--scale-embedding-factor must be positive")

    def register_patches(self, patch_manager, args: Namespace):
        from tiny_repository.layers import scale_embedding

        patch_manager.register_patch(
            "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding.forward",
            scale_embedding(args.scale_embedding_factor),
        )


class TruncatedInitFeature(MindSpeedFeature):
    """Start from weights without outliers."""

    def __init__(self):
        super().__init__("truncated-init")

    def register_args(self, parser: ArgumentParser):
        parser.add_argument("--truncated-init", action="store_true", help="start from weights without outliers")

    def register_patches(self, patch_manager, args: Namespace):
        from tiny_repository.layers import truncated_normal

        patch_manager.register_patch("megatron.core.utils.init_method_normal", truncated_normal)


def create_features_list():
    """MindSpeed's features, and ours behind them."""
    return [*create_mindspeed_features_list(), ScaleEmbeddingFeature(), TruncatedInitFeature()]
