"""The matrix: every pair of features, and every feature in every layout, judged by runs against unmodified Megatron."""
