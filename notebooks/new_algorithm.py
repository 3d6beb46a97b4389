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
# # A new algorithm in ten lines, through the contract suite
#
# An algorithm is a value: parts in slots. Here is one that exists nowhere, what it makes of a
# token, the laws that it must keep to train under this library, and what the laws say of mistakes
# that are easy to make.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po
from policyopt import contract, losses

BLUE, RED, GREEN, GREY = '#0072B2', '#D55E00', '#009E73', '#999999'

# %% [markdown]
# ## Ten lines
#
# A clip has an edge: a token just inside counts fully, one just outside not at all. This surrogate
# lets go smoothly instead, and on the wrong side only: its weight is the ratio u while the ratio
# moves against the reward, and `u exp(-(log u)^2 / 2 width^2)` where it has moved with it. The
# weight is detached, so the objective is REINFORCE's with a weight. The upper side is wider than
# the lower one.


# %%
def fading(low=0.2, high=0.28):
    def surrogate(log_ratio, advantages):
        width = jnp.where(advantages > 0, high, low)
        ahead = jnp.maximum(log_ratio * jnp.sign(advantages), 0)  # moved with the reward
        weight = jnp.exp(jnp.clip(log_ratio, -60, 60) - 0.5 * (ahead / width) ** 2)
        return jax.lax.stop_gradient(weight) * advantages * log_ratio

    return surrogate


def mine(low=0.2, high=0.28):
    return po.Algorithm(
        advantages=po.advantages.group_mean_baseline(),
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=fading(low, high),
            aggregate=losses.token_mean(),
        ),
    )


# %% [markdown]
# What it makes of a token, beside the clip: the derivative of each objective in the log-ratio.

# %%
ratio = np.linspace(0.4, 1.8, 281)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout='constrained')
for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
    for surrogate, label, colour in (
        (losses.clipped(0.2, 0.28), 'clipped(.2, .28)', GREY),
        (fading(), 'fading(.2, .28)', RED),
    ):
        slope = jax.vmap(jax.grad(surrogate), (0, None))(jnp.log(ratio), advantage)
        axis.plot(ratio, slope, color=colour, label=label)
    axis.axvline(1, color='0.85', zorder=0)
    axis.axhline(0, color='0.85', zorder=0)
    axis.set(title=f'advantage {advantage:+.0f}', xlabel='ratio, new / old')
axes[0].set_ylabel('weight of grad log-prob')
axes[0].legend(frameon=False, fontsize=8)
plt.show()

slope = jax.grad(fading())
assert np.isclose(slope(0.0, 1.0), 1) and np.isclose(slope(0.0, -1.0), -1)
np.testing.assert_allclose(slope(0.28, 1.0), np.exp(0.28 - 0.5), rtol=1e-5)  # one width ahead
np.testing.assert_allclose(slope(-0.28, 1.0), np.exp(-0.28), rtol=1e-5)  # behind: the ratio

# %% [markdown]
# ## The laws
#
# `contract.check` puts an algorithm through the laws of the test suite, on random inputs with
# prompts, gaps, padding and empty rows. It is what the tests of every named algorithm call.

# %%
for name, law in contract.LAWS.items():
    print(f'{name:14} {law.__doc__.splitlines()[0]}')

# %%
kept = contract.check(mine())
assert kept == tuple(contract.LAWS)
kept

# %% [markdown]
# ## Mistakes, and the law that finds each
#
# 1. A weight that is not 1 at ratio 1, which is a learning rate in disguise.
# 2. A loss by hand that multiplies by the mask: what stands in the padding, a NaN say, gets
#   through.
# 3. A mean over whatever rows are given, which changes with the number of microbatches.
# 4. A loss that depends on what prompts are numbered.
# 5. An exp without a bound.


# %%
def algorithm(**parts):
    slots = dict(
        ratio=losses.token_ratio(), surrogate=losses.reinforce(), aggregate=losses.token_mean()
    )
    return mine()._replace(loss=losses.policy_loss(**slots | parts))


def by_hand(apply):
    aggregate = losses.token_mean()
    return mine()._replace(
        loss=po.LossTransform(weigh=lambda batch: aggregate(batch.mask), apply=apply)
    )


def times_mask(inputs, weights):
    terms = weights * inputs.advantages * inputs.logp_new * inputs.mask
    return po.LossOutput(-jnp.sum(terms), {})


def mean_of_part(inputs, weights):
    terms = po.masked.select(inputs.mask, inputs.advantages * inputs.logp_new)
    return po.LossOutput(-jnp.mean(terms), {})


def by_number(mask, group):
    return mask / jnp.maximum(jnp.sum(mask), 1) * jnp.where(group > 0, 2.0, 1.0)[:, None]


WRONG = {
    'on_policy': algorithm(surrogate=lambda log_ratio, advantages: 2 * advantages * log_ratio),
    'off_mask': by_hand(times_mask),
    'microbatches': by_hand(mean_of_part),
    'arrangement': algorithm(aggregate=by_number),
    'huge_ratios': algorithm(surrogate=lambda x, a: jnp.exp(2 * x) / 2 * a),
}
for law, wrong in WRONG.items():
    try:
        contract.check(wrong, laws=[law], seeds=[1])
    except AssertionError as error:
        print(str(error).splitlines()[0])
        assert str(error).startswith(f'{law}, seed 1:')
    else:
        raise AssertionError(f'{law} did not find its mistake')

# %% [markdown]
# ## It learns
#
# The laws say that an algorithm is sound, not that it is any good. The smallest place where it can
# learn: one state, 8 actions, of which one is right, 16 draws a step, three updates on each.

# %%
RIGHT, ACTIONS, DRAWS, UPDATES = 3, 8, 16, 3
test = mine()


@jax.jit
def step(logits, key):
    drawn = jax.random.categorical(key, logits, shape=(DRAWS, 1))
    mask = jnp.ones((DRAWS, 1), jnp.int32)
    rewards = (drawn[:, 0] == RIGHT).astype(jnp.float32)
    rolled = po.Rollout(tokens=drawn, mask=mask, rewards=rewards, group=jnp.zeros(DRAWS, jnp.int32))
    logp_old = jax.nn.log_softmax(logits)[drawn]

    def loss(logits):
        inputs = po.LossInputs(
            logp_new=jax.nn.log_softmax(logits)[drawn],
            logp_old=logp_old,
            mask=mask,
            advantages=test.advantages(rolled).advantages,
        )
        return test.loss.apply(inputs, test.loss.weigh(inputs)).loss

    for _ in range(UPDATES):
        logits = logits - 0.5 * jax.grad(loss)(logits)
    return logits, rewards.mean()


logits, curve = jnp.zeros(ACTIONS), []
for key in jax.random.split(jax.random.key(0), 150):
    logits, reward = step(logits, key)
    curve.append(float(reward))
chance = float(jax.nn.softmax(logits)[RIGHT])
print(f'right answer: {1 / ACTIONS:.0%} before, {chance:.0%} after {len(curve)} steps')
assert chance > 0.9 and curve[0] < 0.4

# %% [markdown]
# To train a model with it, save it as `experiments/mine.py` and name it by its import path:
#
#     python -m policyopt.train --workdir=runs/mine \
#         --config=configs/quickstart.py:algorithm=experiments.mine.mine
#
# A test of yours that calls `contract.check(mine())` keeps it sound. Next: `gates=[...]` and
# `penalties=[...]` of `policy_loss`, coefficients that adapt (`losses.adaptive`), other advantages;
# the README has the tables.
