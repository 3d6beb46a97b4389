"""What tests of the slot engine share."""

import functools

import jax

from policyopt import models
from policyopt.models.moe import MoEConfig


def run(engine, params, version=0):
    rows = []
    while engine.busy:
        rows += engine.step(params, version)
    return sorted(rows, key=lambda row: row.id)


def answers(rows):
    return [row.data['tokens'][row.prompt_length :].tolist() for row in rows]


@functools.cache
def tiny(moe=True):
    kwargs = dict(moe=MoEConfig(experts=4, top_k=2), expert_dim=8) if moe else dict(mlp_dim=16)
    config = models.ModelConfig(
        vocab_size=20, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, **kwargs
    )
    model = models.build(config)
    return model, jax.jit(model.init)(jax.random.key(7))
