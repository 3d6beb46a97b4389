"""Loss parts, one file a slot, and how they compose."""

from typing import Any

from policyopt import checks
from policyopt.losses import controllers, diagnostics
from policyopt.losses.aggregates import (
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from policyopt.losses.compose import (
    adaptive,
    add,
    policy_loss,
    positive_nll,
    required_inputs,
    scale,
    value_loss,
)
from policyopt.losses.gates import (
    detached_weight,
    masked_importance,
    off_policy_sequence,
    truncated_importance,
    trust_mask,
)
from policyopt.losses.penalties import entropy, kl_to_old, kl_to_reference
from policyopt.losses.ratios import (
    arithmetic_mean_ratio,
    behavior_ratio,
    clipped_sequence_ratio,
    segment_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
    unnormalised_sequence_ratio,
)
from policyopt.losses.surrogates import (
    clipped,
    dual_clipped,
    masked_weight,
    reinforce,
    soft_gated,
    truncated_weight,
    unclipped,
)

__all__ = [
    'adaptive',
    'add',
    'arithmetic_mean_ratio',
    'behavior_ratio',
    'clipped',
    'clipped_sequence_ratio',
    'constant_length',
    'controllers',
    'detached_weight',
    'diagnostics',
    'dual_clipped',
    'entropy',
    'kl_to_old',
    'kl_to_reference',
    'masked_importance',
    'masked_weight',
    'off_policy_sequence',
    'policy_loss',
    'positive_nll',
    'prompt_mean',
    'reinforce',
    'required_inputs',
    'scale',
    'segment_ratio',
    'sequence_mean',
    'sequence_ratio',
    'sequence_sum',
    'sequence_token_ratio',
    'soft_gated',
    'token_mean',
    'token_ratio',
    'truncated_importance',
    'truncated_weight',
    'trust_mask',
    'unclipped',
    'unnormalised_sequence_ratio',
    'value_loss',
]

_SLOTS = ('ratio', 'surrogate', 'gate', 'penalty', 'aggregate', 'loss')


def __getattr__(name: str) -> Any:
    checks.unknown_name('losses', name, globals(), _SLOTS)
