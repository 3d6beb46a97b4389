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
# # KL estimators: value, variance and gradient
#
# A KL penalty keeps the policy `p` near a reference `q`. A run sees one token at a time, so the KL
# is estimated from the log-probs of the token that was drawn. Several estimators are in use, and
# their values say little about their gradients. Over a vocabulary of 16 tokens everything can be
# summed exactly, so nothing here is a matter of chance.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po

VOCABULARY, SEED = 16, 0
DISTANCES = np.geomspace(0.05, 4, 25)  # spread of the logits that lie between p and q
BLUE, RED, GREEN, PINK = '#0072B2', '#D55E00', '#009E73', '#CC79A7'

rng = np.random.default_rng(SEED)
logits_p, direction, older = rng.normal(size=(3, VOCABULARY))


def kl(logits, other):
    """KL(p || q) of two rows of logits, summed over the vocabulary."""
    logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(logp) * (logp - logq))


# %% [markdown]
# ## The estimators
#
# With `x = log q/p` of the drawn token: `k1 = -x`, `k2 = x^2 / 2`, `k3 = exp(x) - 1 - x`.
# DeepSeek-V3.2 weighs k3 by `p / old`, where `old` drew the token. They are penalties of the
# library, evaluated here at every token of the vocabulary at once.

# %%
ESTIMATORS = {
    'k1': po.losses.kl_to_reference(1.0, estimator='k1'),
    'k2': po.losses.kl_to_reference(1.0, estimator='k2'),
    'k3': po.losses.kl_to_reference(1.0, estimator='k3'),
    'weighted k3': po.losses.kl_to_reference(1.0, unbiased=True),
}
COLOURS = dict(zip(ESTIMATORS, (BLUE, GREEN, RED, PINK), strict=True))


def estimates(name, logits, reference, old):
    """Value of the estimator at each token: [VOCABULARY]."""
    new, ref, past = (jax.nn.log_softmax(x)[None] for x in (logits, reference, old))
    inputs = po.LossInputs(
        logp_new=new,
        logp_ref=ref,
        logp_old=past,
        mask=jnp.ones((1, VOCABULARY)),
        advantages=jnp.zeros((1, VOCABULARY)),
    )
    return ESTIMATORS[name](inputs, inputs.logp_new - inputs.logp_old)[0]


def moments(name, reference, old):
    """Mean and standard deviation of the value of one token drawn from `old`."""
    values, chance = estimates(name, logits_p, reference, old), jax.nn.softmax(old)
    mean = jnp.sum(chance * values)
    return mean, jnp.sqrt(jnp.sum(chance * (values - mean) ** 2))


def gradients(name, reference, old):
    """Mean gradient in the logits over tokens drawn from `old`, and its deviation.

    What a run computes: the derivative of the estimate, not of the chance to draw the token.
    """
    slopes = jax.jacobian(estimates, argnums=1)(name, logits_p, reference, old)
    chance = jax.nn.softmax(old)[:, None]
    mean = jnp.sum(chance * slopes, axis=0)
    return mean, jnp.sqrt(jnp.sum(chance * (slopes - mean) ** 2))


@jax.jit
def table(distance, drift):
    """All of it for q at a distance from p, and old at a drift from p."""
    reference, old = logits_p + distance * direction, logits_p + drift * older
    exact, slope = jax.value_and_grad(kl)(logits_p, reference)
    found = {n: (*moments(n, reference, old), *gradients(n, reference, old)) for n in ESTIMATORS}
    # The gradient of KL(q || p), for comparison.
    return exact, slope, found, jax.grad(lambda x: kl(reference, x))(logits_p)


sweep = jax.vmap(table, (0, None))(jnp.asarray(DISTANCES), 0.0)  # on-policy: old = p

# %% [markdown]
# ## Value and variance, on-policy
#
# k1 and k3 are unbiased; k2 is right where p and q are near. k1 takes either sign, so its deviation
# is the larger while the KL is small: k3's falls with the KL itself, k1's with its root.

# %%
exact, slope, found, forward = jax.device_get(sweep)
for name in ('k1', 'k3', 'weighted k3'):
    np.testing.assert_allclose(found[name][0], exact, rtol=2e-3, atol=2e-6)
bias = found['k2'][0] / exact - 1
assert abs(bias[0]) < 0.05 < abs(bias[-1])
small = exact < 0.05
assert np.all(found['k3'][1][small] < 0.5 * found['k1'][1][small])
print(
    f'k2 is off by {bias[0]:+.1%} at a KL of {exact[0]:.1e}, by {bias[-1]:+.0%} at {exact[-1]:.2f}'
)


def power(y):
    """Exponent of y as a power of the KL, where that is small."""
    return np.polyfit(np.log(exact[:10]), np.log(y[:10]), 1)[0]


np.testing.assert_allclose(power(found['k1'][1]), 0.5, atol=0.02)
np.testing.assert_allclose(power(found['k3'][1]), 1.0, atol=0.02)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout='constrained')
left.axhline(1, color='k', lw=4, alpha=0.15, zorder=0)
for name, style in (('k1', '-'), ('k2', '-'), ('k3', '--')):
    left.plot(exact, found[name][0] / exact, style, color=COLOURS[name], label=name)
    right.plot(exact, found[name][1], style, color=COLOURS[name], label=name)
left.set(xscale='log', xlabel='exact KL (nats)', ylabel='mean of the estimate / exact KL')
right.set(xscale='log', yscale='log', xlabel='exact KL (nats)')
right.set_ylabel('its deviation, one token')
left.set_title('k2 alone is biased', fontsize=10)
right.set_title('k1 is noisy where the KL is small', fontsize=10)
left.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Gradient, on-policy
#
# The gradient that a penalty in the loss sends through log-probs is another matter.
#
# - k1 sends none: its mean over tokens is exactly 0, whatever p and q are. It belongs in the
#   reward, where it does work, not in the loss.
# - k2, whose value is biased, has the exact gradient of KL(p || q).
# - k3, whose value is right, has the gradient of KL(q || p), the other direction.
# - weighted k3 has both right.

# %%


def error(name, other):
    """Distance of an estimator's mean gradient from another, relative to that."""
    return np.linalg.norm(found[name][2] - other, axis=1) / np.linalg.norm(other, axis=1)


assert np.abs(found['k1'][2]).max() < 1e-6
for name in ('k2', 'weighted k3'):
    assert error(name, slope).max() < 1e-4
assert error('k3', forward).max() < 1e-4
assert error('k3', slope)[0] < 0.05 and error('k3', slope)[-1] > 0.5
middle = int(np.searchsorted(exact, 0.25))
print(f'k3 at a KL of {exact[middle]:.2f}: gradient off by {error("k3", slope)[middle]:.0%}')

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout='constrained')
for name, style in zip(ESTIMATORS, ('-', '-', '-', '--'), strict=True):
    left.plot(exact, error(name, slope), style, color=COLOURS[name], label=name)
    right.plot(exact, found[name][3], style, color=COLOURS[name], label=name)
left.set(xscale='log', xlabel='exact KL (nats)', ylabel='error / size of the exact gradient')
right.set(xscale='log', yscale='log', xlabel='exact KL (nats)')
right.set_ylabel('deviation of the gradient, one token')
left.set_title('Mean gradient against that of KL(p || q)', fontsize=10)
right.set_title('Its noise', fontsize=10)
left.legend(frameon=False, fontsize=8, loc=(0.04, 0.5))
plt.show()

# %% [markdown]
# ## Off-policy
#
# After some updates tokens come from an older policy. Then k1 and k3 are off in value, k1, k2 and
# k3 in gradient. The weight of weighted k3, differentiated with the rest, mends both exactly, at
# the price of noise where p / old is large.

# %%
DRIFTS = np.linspace(0, 1, 21)
off = jax.jit(jax.vmap(table, (None, 0)))(1.0, jnp.asarray(DRIFTS))
exact, slope, found, forward = jax.device_get(off)
np.testing.assert_allclose(found['weighted k3'][0], exact, rtol=1e-5)
assert error('weighted k3', slope).max() < 1e-4
assert abs(found['k1'][0][-1] / exact[-1] - 1) > 0.3
assert abs(found['k3'][0][-1] / exact[-1] - 1) > 0.15
assert error('k2', slope)[0] < 1e-4 and error('k2', slope)[-1] > 0.3

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout='constrained')
for name, style in zip(ESTIMATORS, ('-', '-', '-', '--'), strict=True):
    left.plot(DRIFTS, found[name][0] / exact, style, color=COLOURS[name], label=name)
    right.plot(DRIFTS, error(name, slope), style, color=COLOURS[name])
left.axhline(1, color='k', lw=4, alpha=0.15, zorder=0)
left.set(xlabel='drift: spread of the logits between p and old', ylabel='mean / exact KL')
right.set(xlabel='drift', ylabel='error of the gradient / its size', ylim=(-0.05, 1.6))
left.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## The token that the policy has given up
#
# k3's gradient multiplies `grad log p` by `1 - q/p`, which has no bound: at `p = 1e-4`, `q = .5` it
# is -4999. One such token outweighs a batch. The weighted form has `p/old log(p/q)` in its place,
# which goes to 0 with p: -.0028 where old gave the token .3.

# %%
REFERENCE, OLD = 0.5, 0.3


@jax.jit
def coefficients(p):
    """What multiplies grad log p: {estimator: [n]}."""
    inputs = po.LossInputs(
        logp_new=jnp.log(p)[None],
        logp_ref=jnp.full((1, len(p)), jnp.log(REFERENCE)),
        logp_old=jnp.full((1, len(p)), jnp.log(OLD)),
        mask=jnp.ones((1, len(p))),
        advantages=jnp.zeros((1, len(p))),
    )

    def total(penalty, logp):
        return jnp.sum(penalty(inputs.replace(logp_new=logp), logp - inputs.logp_old))

    return {n: jax.grad(total, 1)(e, inputs.logp_new)[0] for n, e in ESTIMATORS.items()}


p = np.geomspace(1e-6, 0.99, 200)
curves = coefficients(jnp.asarray(np.append(p, 1e-4)))
np.testing.assert_allclose(curves['k3'][-1], -4999, rtol=1e-3)
np.testing.assert_allclose(curves['weighted k3'][-1], -0.0028, atol=5e-5)
np.testing.assert_allclose(curves['weighted k3'][:-1], p / OLD * np.log(p / REFERENCE), atol=1e-5)

figure, axis = plt.subplots(figsize=(7, 3.4), layout='constrained')
for name, curve in curves.items():
    axis.plot(p, np.abs(curve[:-1]), color=COLOURS[name], label=name)
axis.axvline(REFERENCE, color='0.8', zorder=0)
axis.annotate('q', (REFERENCE, 2e3), xytext=(3, 0), textcoords='offset points', color='0.4')
axis.set(xscale='log', yscale='log', xlabel='p of the token', ylim=(1e-5, 1e6))
axis.set_ylabel('|coefficient of grad log p|')
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# Try another `SEED`, a `VOCABULARY` of 2, or a larger `DRIFTS`: how soon does the noise of weighted
# k3 (`found['weighted k3'][3]`) overtake that of k2?
