"""How much work a model is."""

from __future__ import annotations

from policyopt.models import ModelConfig


def flops(config: ModelConfig, rows: int, length: int) -> float:
    """Of the matmuls of one forward and backward pass; of attention only what causality leaves."""
    heads, groups, head = config.num_heads, config.num_kv_heads, config.head_dim
    projections = config.embed_dim * head * 2 * (heads + groups)
    weights = config.num_layers * (projections + 3 * config.embed_dim * config.mlp_dim)
    weights += config.vocab_size * config.embed_dim
    scores = config.num_layers * heads * head * (length + 1)  # two products, half of each
    return 6.0 * rows * length * (weights + scores)
