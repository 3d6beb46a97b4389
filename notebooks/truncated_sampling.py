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
# # Why truncated sampling breaks the ratio, and the replay that repairs it
#
# Top-p and top-k drop the improbable tokens and draw from the rest. A learner that scores the drawn
# tokens over the whole vocabulary then compares two different distributions: its ratio new / old is
# not 1 before the first update. Keeping the ids that the sampler kept, and scoring on those, makes
# it 1 again. First by hand on one distribution, then on a model.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po

TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ROWS, TOKENS, KEPT = 64, 32, 32  # answers, their length, most ids that are kept for a token
DRIFT = 0.02  # of an update: noise on each parameter, relative to the spread of its tensor
BLUE, RED, GREEN, GREY = '#0072B2', '#D55E00', '#009E73', '#999999'

# %% [markdown]
# ## By hand
#
# Six tokens; top-p .8 keeps the shortest prefix of the most probable ones with that mass, here
# three tokens with .85. They are drawn with probabilities that are divided by .85.

# %%
p = np.array([0.40, 0.25, 0.20, 0.08, 0.05, 0.02])
kept = np.cumsum(p) - p < 0.8
mass = p[kept].sum()
sampled = np.where(kept, p / mass, 0)
assert kept.tolist() == [True] * 3 + [False] * 3 and np.isclose(mass, 0.85)
ratio = p[kept] / sampled[kept]
np.testing.assert_allclose(ratio, mass)
ratio

# %% [markdown]
# So the same policy seems to have made each drawn token less likely, by the mass that was kept. Two
# things follow from it at once.
#
# - The ratios of an answer multiply: 100 tokens look like a policy that has left by .85^100, 1e-7.
# - A clip with a lower bound above .85 takes the answers with A < 0 for done with, and drops them.
#   Those with A > 0 lose nothing but may now grow further before they are stopped.

# %%
assert 0.85**100 < 1e-7
advantages = np.array([1.0, -1.0])
surrogate = po.losses.clipped(0.1, 0.1)
log_ratio = jnp.full(2, jnp.log(mass))
slopes = jax.grad(lambda x: surrogate(x, jnp.asarray(advantages)).sum())(log_ratio)
np.testing.assert_allclose(slopes, [mass, 0.0], rtol=1e-5)
slopes

# %% [markdown]
# Dividing by the policy's own mass of the kept ids repairs it: `log p - log sum of p over kept`.
# That is what *support replay* computes, under whatever parameters, from the ids that were
# recorded. The gradient is then that of the distribution that was really drawn from: raising a
# token lowers the other kept ones, and no probability is taken from tokens that can't be drawn.

# %%
logits = jnp.log(jnp.asarray(p))


def logp(logits, token, support=None):
    ids = jnp.arange(len(p)) if support is None else support
    return logits[token] - jax.nn.logsumexp(logits[ids])


support = np.flatnonzero(kept)
np.testing.assert_allclose(np.exp(logp(logits, 0, support)) / sampled[0], 1, rtol=1e-6)
full, replayed = jax.grad(logp)(logits, 0), jax.grad(logp)(logits, 0, support)
np.testing.assert_allclose(full, np.eye(6)[0] - p, atol=1e-6)
np.testing.assert_allclose(replayed, np.eye(6)[0] - sampled, atol=1e-6)
assert np.all(np.asarray(replayed)[~kept] == 0) and np.all(np.asarray(full)[~kept] < 0)

figure, axis = plt.subplots(figsize=(7, 3), layout='constrained')
at = np.arange(6)
axis.bar(at - 0.2, full, 0.4, color=RED, label='scored on the whole vocabulary')
axis.bar(at + 0.2, replayed, 0.4, color=BLUE, label='scored on the kept ids')
axis.axvspan(2.5, 5.5, color='0.93', zorder=0)
axis.text(4, 0.2, 'never drawn', ha='center', color='0.4')
axis.axhline(0, color='k', lw=0.8)
axis.set(xlabel='token', ylabel='gradient in its logit', title='grad log-prob of token 0')
axis.legend(frameon=False, fontsize=8, loc='upper right')
plt.show()

# %% [markdown]
# ## A model
#
# A transformer with random weights (and an embedding large enough for distributions that are
# neither flat nor certain) draws answers at several top-p. The same parameters score them.

# %%
model = po.models.build(
    po.models.ModelConfig(
        vocab_size=32, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=64
    )
)
params = jax.jit(model.init)(jax.random.key(0))
params = params | {'embed': 20 * params['embed']}
prompts = [[row % 32, 7 * row % 32] for row in range(ROWS)]


def drawn(top_p):
    config = po.SamplingConfig(max_new_tokens=TOKENS, top_p=top_p, support_size=KEPT, eos_id=-1)
    return po.sample(model, params, prompts, jax.random.key(1), config)


score = jax.jit(
    lambda params, rollout, replay: (
        po.score(model, params, rollout, entropy=False, replay_support=replay).logp_new
    ),
    static_argnums=2,
)
rollouts = {top_p: drawn(top_p) for top_p in TOP_P}
mask = np.asarray(rollouts[TOP_P[0]].mask) != 0


def log_ratio(params, top_p, replay):
    """log new / sampled of the drawn tokens: [ROWS, TOKENS]."""
    rollout = rollouts[top_p]
    found = score(params, rollout, replay) - rollout.logp_behavior
    return np.asarray(found, np.float64)[mask].reshape(ROWS, TOKENS)


plain = {top_p: log_ratio(params, top_p, False) for top_p in TOP_P}
replayed = {top_p: log_ratio(params, top_p, True) for top_p in TOP_P}
for top_p in TOP_P:
    assert np.abs(replayed[top_p]).max() < 2e-5
    kept = np.asarray(rollouts[top_p].logp_full - rollouts[top_p].logp_behavior)[mask]
    np.testing.assert_allclose(plain[top_p].ravel(), kept, atol=2e-5)

# %% [markdown]
# With the kept ids replayed every ratio is 1 to float32 rounding. Without, it is the kept mass,
# which is top-p at least and differs from token to token: where the policy is nearly certain, one
# token alone has more than top-p. Over an answer of 32 tokens it adds up.

# %%
ratios = {top_p: np.exp(x) for top_p, x in plain.items()}
answers = {top_p: np.exp(x.sum(1)) for top_p, x in plain.items()}
means = np.array([[ratios[t].mean(), answers[t].mean()] for t in TOP_P])
assert np.all(np.diff(means, axis=0) > 0)  # the more is kept, the nearer to 1
for top_p in TOP_P:
    assert ratios[top_p].min() > top_p - 1e-5
np.testing.assert_allclose(means[TOP_P.index(0.9)], [0.95, 0.25], atol=0.02)

figure, axis = plt.subplots(figsize=(7, 3.4), layout='constrained')
low, high = np.array([np.quantile(ratios[t], (0.05, 0.95)) for t in TOP_P]).T
axis.fill_between(TOP_P, low, high, color=RED, alpha=0.15, lw=0, label='5 to 95 % of tokens')
axis.plot(TOP_P, means[:, 0], 'o-', ms=4, color=RED, label='a token, without replay')
axis.plot(TOP_P, means[:, 1], 's--', ms=4, color=RED, label=f'product of {TOKENS} tokens, without')
axis.plot(TOP_P, np.ones(len(TOP_P)), 'o-', ms=4, color=BLUE, label='with replay, both')
axis.set(xlabel='top-p', ylabel='ratio before any update', ylim=(0, 1.05))
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## What the clip sees
#
# Half of the answers get A = 1, half A = -1, and nothing has moved. `policy/frozen` is the share of
# tokens whose gradient the clip has stopped.

# %%
advantages = jnp.broadcast_to(jnp.where(jnp.arange(ROWS) % 2 == 0, 1.0, -1.0)[:, None], mask.shape)


@jax.jit
def frozen(logp_new, rollout):
    """Share of tokens that GSPO and GRPO stop; of those with A < 0, that GSPO stops."""
    inputs = po.LossInputs(
        logp_new=logp_new,
        logp_old=rollout.logp_behavior,
        logp_ref=rollout.logp_behavior,
        mask=rollout.mask,
        advantages=advantages,
    )
    found = []
    for algorithm in (po.algorithms.gspo(), po.algorithms.grpo()):
        metrics = algorithm.loss.apply(inputs, algorithm.loss.weigh(inputs)).metrics
        found += [metrics['policy/frozen'].value, metrics['policy/frozen_low'].value]
    return jnp.stack(found[:3])


def stopped(replay, params=params):
    found = [frozen(score(params, rollouts[t], replay), rollouts[t]) for t in TOP_P]
    return np.asarray(found)


without, with_replay = stopped(False), stopped(True)
assert np.all(with_replay == 0)
assert np.all(without[:, 1] > 0.96) and np.all(np.abs(without[:, 0] - 0.5) < 0.02)
assert np.all(without[TOP_P.index(0.8) :, 2] == 0)  # what is kept is .8 or more
np.testing.assert_allclose(without[0, 2], 0.08, atol=0.02)

figure, axis = plt.subplots(figsize=(7, 3.4), layout='constrained')
axis.plot(TOP_P, without[:, 0], 'o-', ms=4, color=RED, label='GSPO 3e-4, 4e-4, without replay')
axis.plot(TOP_P, without[:, 2], 's--', ms=4, color=RED, label='GRPO .2, without replay')
axis.plot(TOP_P, with_replay[:, 0], 'o-', ms=4, color=BLUE, label='both with replay')
axis.set(xlabel='top-p', ylabel='share of tokens that the clip stops', ylim=(-0.02, 0.55))
axis.set_title('Before any update', fontsize=10)
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# GSPO stops all answers with A < 0 at every top-p, so that only praise is left to learn from.
# GRPO's clip of .2 lets everything pass while .8 or more is kept, and below stops the tokens that
# were drawn from little.
#
# ## After an update
#
# Noise on the parameters stands for an update. With replay the spread of log-ratios is the update's
# doing. Without, most of it is the kept mass, and what the clip should watch is buried.

# %%
rng = np.random.default_rng(0)
updated = jax.tree.map(lambda x: x + DRIFT * np.std(x) * rng.normal(size=x.shape), params)

moved = {replay: log_ratio(updated, 0.9, replay) for replay in (True, False)}
spread = {replay: x.mean(1).std() for replay, x in moved.items()}  # of GSPO's log-ratio
known = np.corrcoef(moved[False].mean(1), plain[0.9].mean(1))[0, 1] ** 2
print(f'spread of log s: {spread[True]:.4f} with replay, {spread[False]:.4f} without')
print(f'without replay, {known:.0%} of its variance was there before the update')
assert abs(moved[True].mean()) < 0.003 and moved[False].mean() < -0.04
assert 3 < spread[False] / spread[True] < 6 and 0.85 < known < 0.95

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout='constrained')
bins = np.linspace(-0.2, 0.1, 61)
for replay, colour, label in ((True, BLUE, 'with replay'), (False, RED, 'without')):
    left.hist(moved[replay].ravel(), bins, histtype='step', lw=1.5, color=colour, label=label)
    x, y = plain[0.9].mean(1), moved[replay].mean(1)
    right.scatter(np.exp(x), np.exp(y), s=12, color=colour, label=label)
left.set(yscale='log', xlabel='log ratio of a token after the update', ylabel='tokens')
left.legend(frameon=False, fontsize=8, loc='upper left')
right.set(xlabel='mean mass kept (an answer)', ylabel='ratio s of the answer after the update')
right.axhline(1, color='0.8', lw=0.8, zorder=0)
plt.show()

# %% [markdown]
# ## In a run
#
# The sampler records the ids that it kept (`Rollout.support`, [B,T,K]), which stays small since
# truncated sampling here keeps K ids at most, and `replay.support=True` of a config scores on them;
# the metric `replay/support` says for which share of the tokens it did. A config may have
# `logp_old='recomputed'` instead: the first ratio is 1 then without replay, since both sides are
# scored alike, but it is the ratio of a policy that did not draw the tokens, and `old / behaviour`
# keeps the kept mass.
#
# Try: a smaller embedding (`10 *`), which makes the policy less certain and the kept mass smaller;
# `DRIFT = 0.1`; another clip, as `po.algorithms.gspo(low=0.05, high=0.05)`.
