"""Unmodified transformers models on a hybrid KV pool.

    generator = HybridGenerator(model, max_tokens=4096, max_requests=8)
    tokens = generator.generate(prompts, max_new_tokens=64)

Importing this does not import transformers; using it does.
"""

from swa_compile.hf.bridge import Bridge
from swa_compile.hf.errors import UnsupportedModel
from swa_compile.hf.families import FAMILIES
from swa_compile.hf.generator import HybridGenerator
from swa_compile.hf.sampling import Sampling
from swa_compile.hf.speculation import SpeculativeGenerator
from swa_compile.hf.tokens import Token

__all__ = [
    "FAMILIES",
    "Bridge",
    "HybridGenerator",
    "Sampling",
    "SpeculativeGenerator",
    "Token",
    "UnsupportedModel",
]
