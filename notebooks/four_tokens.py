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
# # From a rollout to a gradient, by hand on four tokens
#
# Two answers to one prompt: the first right, in three tokens, the second wrong, in one. Every
# number that a loss makes of them is computed here twice, once by the library and once in plain
# numpy. Change the probabilities or the algorithm and run it again.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po

mask = np.array([[1, 1, 1], [1, 0, 0]])
p_old = np.array([[0.50, 0.40, 0.90], [0.20, 1.00, 1.00]], np.float32)
p_new = np.array([[0.55, 0.55, 0.90], [0.18, 1.00, 1.00]], np.float32)

# %% [markdown]
# ## Rewards to advantages
#
# GRPO subtracts the mean reward of the prompt's answers and divides by their standard deviation.

# %%
rollout = po.Rollout(
    tokens=np.zeros((2, 3), np.int32),
    mask=mask,
    rewards=np.array([1.0, 0.0], np.float32),
    group=np.array([0, 0], np.int32),
)
advantages = po.advantages.group_zscore()(rollout).advantages
by_hand = (np.array([1, 0]) - 0.5) / np.std([1, 0], ddof=1)
np.testing.assert_allclose(advantages[:, 0], by_hand, rtol=1e-5)
advantages

# %% [markdown]
# ## Ratios
#
# The second token of the right answer became likelier by 1.375: above 1 + .28, so DAPO's clip stops
# it. GSPO looks at the whole answer instead, at the geometric mean of its ratios.

# %%
inputs = po.LossInputs(
    logp_new=np.log(p_new), logp_old=np.log(p_old), mask=mask, advantages=advantages
)
token_ratios = np.exp(po.losses.token_ratio()(inputs))
sequence_ratios = np.exp(po.losses.sequence_ratio()(inputs))
np.testing.assert_allclose(sequence_ratios[0, 0], (1.1 * 1.375 * 1.0) ** (1 / 3), rtol=1e-5)
token_ratios, sequence_ratios

# %% [markdown]
# ## Weights and loss
#
# The loss is the sum of weight times token loss. DAPO gives every token a quarter; GSPO gives every
# answer a half, shared among its tokens.

# %%
algorithms = {'dapo': po.algorithms.dapo(), 'gspo': po.algorithms.gspo(low=0.2, high=0.28)}
weights = {name: alg.loss.weigh(inputs) for name, alg in algorithms.items()}
np.testing.assert_allclose(weights['dapo'], mask / 4)
np.testing.assert_allclose(weights['gspo'], mask / np.array([[3], [1]]) / 2, rtol=1e-6)

# %% [markdown]
# ## The gradient
#
# What each token's log-prob receives. DAPO: minus weight times ratio times advantage, and exactly 0
# for the clipped token. GSPO: the same for all tokens of an answer.

# %%
gradients = {
    name: jax.grad(
        lambda x, a=alg, w=weights[name]: a.loss.apply(inputs.replace(logp_new=x), w).loss
    )(inputs.logp_new)
    for name, alg in algorithms.items()
}
a = by_hand[0]
dapo = -np.array([[1.1 * a, 0, 1.0 * a], [0.9 * -a, 0, 0]]) / 4
np.testing.assert_allclose(gradients['dapo'], dapo, rtol=1e-4, atol=1e-6)
gspo = -np.array([[sequence_ratios[0, 0] * a / 3] * 3, [0.9 * -a, 0, 0]]) / 2
np.testing.assert_allclose(gradients['gspo'], gspo, rtol=1e-4, atol=1e-6)

figure, axis = plt.subplots(figsize=(7, 3), layout='constrained')
labels = ['right, token 1', 'right, token 2', 'right, token 3', 'wrong, token 1']
for shift, (name, colour) in enumerate((('dapo', '#0072B2'), ('gspo', '#D55E00'))):
    push = -np.asarray(gradients[name])[mask == 1]
    axis.bar(np.arange(4) + 0.4 * shift - 0.2, push, 0.4, color=colour, label=name)
axis.axhline(0, color='k', lw=0.8)
axis.set_xticks(range(4), labels)
axis.set(ylabel='push on log-prob', title='Minus the gradient of each token')
axis.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# The wrong answer's token fell by a factor .9 and is pushed further down. At .15 the ratio falls
# below 1 - .2, and both algorithms let go of it.

# %%
lower = np.log(np.where(p_new == np.float32(0.18), np.float32(0.15), p_new))
for name, algorithm in algorithms.items():
    slope = jax.grad(
        lambda x, a=algorithm, w=weights[name]: a.loss.apply(inputs.replace(logp_new=x), w).loss
    )(lower)
    assert slope[1, 0] == 0 and slope[0, 0] != 0
