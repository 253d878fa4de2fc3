"""Reference models, written the natural way."""

from swa_compile.models.hybrid import HybridConfig, HybridTransformer

__all__ = ["HybridConfig", "HybridTransformer"]
