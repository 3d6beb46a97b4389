# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Surrogates and gates side by side, with their gradients
#
# A surrogate is what a loss maximises for a token: a function of its ratio u = new / old and its
# advantage A. What trains is its derivative in log-prob, the weight of `grad log p`. All surrogates
# agree at u = 1, where the weight is A; they differ in how they let go of a token whose probability
# has moved. A gate multiplies the result and has no gradient. Change the numbers below and look.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po
from policyopt import losses

LOW, HIGH = 0.2, 0.28  # clip range: DAPO's
CAP = 2.0  # of CISPO's weight; MiniMax has 5
TAU = 1.0, 1.05  # of SAPO's gate, by the sign of A
DUAL = 2.5  # where the dual clip stops tokens with A < 0
RATIO = np.linspace(0.02, 4, 996)
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')

SURROGATES = {
    'reinforce': losses.reinforce(),
    'unclipped (TRPO)': losses.unclipped(),
    'clipped (PPO, GRPO, DAPO, GSPO)': losses.clipped(LOW, HIGH),
    'dual_clipped': losses.dual_clipped(LOW, HIGH, DUAL),
    'soft_gated (SAPO)': losses.soft_gated(*TAU),
    'truncated_weight (CISPO)': losses.truncated_weight(CAP),
    'masked_weight': losses.masked_weight(LOW, HIGH),
}

# %% [markdown]
# ## Objective and weight
#
# Left what is maximised, right the weight of `grad log p`, above for A = 1, below for A = -1. For
# detached weights (CISPO, masked) the height of the objective means nothing, and its slope is not
# that of the curve: the weight is held fixed in the derivative.


# %%
@jax.jit
def curves(log_ratio, advantage):
    """{name: (objective [n], derivative in log-prob [n])}."""
    return {
        name: jax.vmap(jax.value_and_grad(surrogate), (0, None))(log_ratio, advantage)
        for name, surrogate in SURROGATES.items()
    }


found = {a: jax.device_get(curves(jnp.log(RATIO), a)) for a in (1.0, -1.0)}
figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout='constrained')
for row, advantage in zip(axes, found, strict=True):
    for axis, which in zip(row, (0, 1), strict=True):
        for number, name in enumerate(SURROGATES):
            style = ('-', '--', '-', ':', '-', '-', ':')[number]
            curve = found[advantage][name][which]
            axis.plot(RATIO, curve, style, color=COLOURS[number], label=name, lw=1.6)
        axis.axvline(1, color='0.85', zorder=0)
        axis.axhline(0, color='0.85', zorder=0)
        axis.set_title(('objective', 'weight of grad log p')[which] + f', A = {advantage:+.0f}')
    row[0].set_ylim(*sorted((-1.5 * advantage, 3.5 * advantage)))
    row[1].set_ylim(*sorted((-0.3 * advantage, 3.2 * advantage)))
for axis in axes[1]:
    axis.set_xlabel('ratio u')
handles, labels = axes[0, 0].get_legend_handles_labels()
figure.legend(handles, labels, loc='outside lower center', ncols=4, frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# What the curves say, in numbers:
#
# - the weight at u = 1 is A for every one;
# - a clip is exactly 0 beyond its bound on the side that was rewarded, and u A elsewhere: a token
#   whose probability moved *against* the reward keeps its full weight, and with A < 0 that has no
#   bound, unless the dual clip ends it at `DUAL`;
# - SAPO's weight is `u sech^2(tau/2 (u - 1)) A`: it fades on both sides, rewarded or not;
# - CISPO never lets go: its weight is u, at most `CAP`;
# - the masked weight has the clip's gradient and not its objective.

# %%
at = {u: int(np.argmin(np.abs(RATIO - u))) for u in (1.0, 3.0)}
weight = {(name, a): curve[1] for a, each in found.items() for name, curve in each.items()}
for (name, a), slope in weight.items():
    np.testing.assert_allclose(slope[at[1.0]], a, atol=0.01, err_msg=name)
clip = 'clipped (PPO, GRPO, DAPO, GSPO)'
assert np.all(weight[clip, 1.0][RATIO > 1 + HIGH] == 0)
assert np.all(weight[clip, -1.0][RATIO < 1 - LOW] == 0)
inside = RATIO < 1 + HIGH - 1e-6
np.testing.assert_allclose(weight[clip, 1.0][inside], RATIO[inside], rtol=1e-4)
np.testing.assert_allclose(weight[clip, -1.0][at[3.0]], -RATIO[at[3.0]], rtol=1e-4)
assert np.all(weight['dual_clipped', -1.0][RATIO > DUAL + 1e-6] == 0)
for a, tau in zip((1.0, -1.0), TAU, strict=True):
    sech = 1 / np.cosh(tau / 2 * (RATIO - 1))
    np.testing.assert_allclose(
        weight['soft_gated (SAPO)', a], a * RATIO * sech**2, rtol=1e-3, atol=1e-5
    )
cispo = weight['truncated_weight (CISPO)', 1.0]
np.testing.assert_allclose(cispo, np.minimum(RATIO, CAP), rtol=1e-4)
np.testing.assert_allclose(weight['masked_weight', 1.0], weight[clip, 1.0], rtol=1e-4)

# %% [markdown]
# ## The same clip on a token and on an answer
#
# GSPO clips the geometric mean of an answer's ratios. An answer of four tokens, A = 1, of which one
# token's ratio is swept: GRPO stops that token and no other; GSPO keeps all of them until the mean
# passes the bound, and then stops all.

# %%
TOKENS = 4


def answer_gradient(ratio_part):
    """Weights of the other tokens and of the swept one: [n] each."""
    loss = losses.policy_loss(
        ratio=ratio_part, surrogate=losses.clipped(LOW, HIGH), aggregate=losses.sequence_mean()
    )

    def gradient(swept):
        logp_new = jnp.zeros((1, TOKENS)).at[0, 0].set(swept)
        inputs = po.LossInputs(
            logp_new=logp_new,
            logp_old=jnp.zeros((1, TOKENS)),
            mask=jnp.ones((1, TOKENS)),
            advantages=jnp.ones((1, TOKENS)),
        )
        weights = jnp.full((1, TOKENS), 1 / TOKENS)
        slope = jax.grad(lambda x: -loss.apply(inputs.replace(logp_new=x), weights).loss)(logp_new)
        return TOKENS * slope[0, 1], TOKENS * slope[0, 0]

    return jax.device_get(jax.jit(jax.vmap(gradient))(jnp.log(RATIO)))


figure, axis = plt.subplots(figsize=(8, 3.4), layout='constrained')
parts = {'GRPO': losses.token_ratio(), 'GSPO': losses.sequence_ratio()}
swept = {name: answer_gradient(part) for name, part in parts.items()}
for (name, (others, own)), colour in zip(swept.items(), COLOURS, strict=False):
    axis.plot(RATIO, own, color=colour, lw=1.8, label=f'{name}: the swept token')
    axis.plot(RATIO, others, '--', color=colour, lw=1.8, label=f'{name}: each other token')
axis.axvline(1, color='0.85', zorder=0)
axis.set(xlabel="ratio of one token; the others' is 1", ylabel='weight of grad log p')
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()

edge = (1 + HIGH) ** TOKENS  # where the geometric mean of 4, three of them 1, is 1 + HIGH
assert np.all(swept['GRPO'][1][RATIO > 1 + HIGH] == 0) and np.allclose(swept['GRPO'][0], 1)
ahead = RATIO - edge
before, after = ahead < -1e-3, ahead > 1e-3
np.testing.assert_allclose(swept['GSPO'][1][before], RATIO[before] ** (1 / TOKENS), rtol=1e-4)
assert np.all(np.array(swept['GSPO'])[:, after] == 0)
print(f'GSPO lets one token of {TOKENS} go to {edge:.2f} before it stops the answer')

# %% [markdown]
# ## Gates
#
# A gate looks at what the surrogate does not: how far the sampler was from the policy that trains.
# Its factor has no gradient and never touches the denominator.
#
# - `truncated_importance`: rho = old / sampler, at most a cap. Corrects the sampler's distribution.
# - `masked_importance`: rho between two bounds, 0 beyond.
# - `off_policy_sequence`: 0 for a row with A < 0 whose tokens became less likely than when they
#   were sampled by more than delta nats on average (DeepSeek-V3.2).

# %%
DELTA = 0.5
GATES = {
    'truncated_importance(2)': losses.truncated_importance(2.0),
    'masked_importance(.5, 3)': losses.masked_importance(0.5, 3.0),
    'off_policy_sequence(.5), A < 0': losses.off_policy_sequence(DELTA),
}


@jax.jit
def factors(log_rho):
    """Factors of one-token rows with A = -1 whose old / sampler is rho: a list of [n]."""
    column = log_rho[:, None]
    inputs = po.LossInputs(
        logp_new=column,
        logp_old=column,
        logp_behavior=jnp.zeros_like(column),
        mask=jnp.ones_like(column),
        advantages=-jnp.ones_like(column),
    )
    return [gate(inputs, jnp.zeros_like(column))[:, 0] for gate in GATES.values()]


truncated, kept, row = gated = jax.device_get(factors(jnp.log(RATIO)))
figure, axis = plt.subplots(figsize=(8, 3.2), layout='constrained')
for name, factor, style, colour in zip(GATES, gated, ('-', '--', '-.'), COLOURS, strict=False):
    axis.plot(RATIO, factor, style, color=colour, lw=1.8, label=name)
axis.axvline(1, color='0.85', zorder=0)
axis.set(xlabel='rho, of the policy over the sampler', ylabel='factor')
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()

np.testing.assert_allclose(truncated, np.minimum(RATIO, 2), rtol=1e-4)
edges = (np.abs(RATIO - 0.5) < 1e-4) | (np.abs(RATIO - 3) < 1e-4)
between = (RATIO >= 0.5) & (RATIO <= 3)
np.testing.assert_allclose(kept[~edges], np.where(between, RATIO, 0)[~edges], rtol=1e-4)
np.testing.assert_array_equal(row, np.where(np.log(RATIO) < -DELTA, 0, 1))

# %% [markdown]
# Try: `LOW, HIGH = 3e-4, 4e-4`, GSPO's published range, and look at the second figure; `TAU = (4,
# 4)`, which is nearly a clip; `CAP = 1`, with which CISPO never counts a token more than once.
