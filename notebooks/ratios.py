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
# # What the ratios of a rollout look like
#
# A policy draws answers, is updated a little, and scores its own answers again: `new / old` of each
# token is what every clip, gate and weight looks at. Here are its statistics by token, by segment
# and by sequence, for a dense model and a mixture of experts, with and without replay.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import policyopt as po

ROWS, TOKENS, SEGMENT = 64, 48, 12  # answers, tokens of each, tokens of a segment
DRIFT = 0.02  # of the update: noise on each parameter, relative to the spread of its tensor
SEED = 0  # of that noise
TOP_P = 0.9
BLUE, RED, GREEN, GREY = '#0072B2', '#D55E00', '#009E73', '#999999'

# %% [markdown]
# ## Two policies, and a rollout of each
#
# Two layers, one with a feed-forward layer and one with 8 experts of which each token takes 2. The
# weights are random, with an embedding large enough for distributions that are neither flat nor
# certain. What is drawn goes into a file, log-probs, kept ids and chosen experts included.

# %%
SIZE = dict(vocab_size=32, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2)
MODELS = {
    'dense': po.models.build(po.models.ModelConfig(mlp_dim=64, **SIZE)),
    'mixture': po.models.build(
        po.models.ModelConfig(moe=po.models.MoEConfig(experts=8, top_k=2), expert_dim=32, **SIZE)
    ),
}
SAMPLING = po.SamplingConfig(max_new_tokens=TOKENS, top_p=TOP_P, support_size=16, eos_id=-1)
folder = pathlib.Path(tempfile.mkdtemp())
policies = {}
for name, model in MODELS.items():
    params = jax.jit(model.init)(jax.random.key(0))
    params = params | {'embed': 20 * params['embed']}
    prompts = [[row % 32, 7 * row % 32] for row in range(ROWS)]
    rollout = po.sample(model, params, prompts, jax.random.key(1), SAMPLING)
    arrays = {k: np.asarray(v) for k, v in vars(rollout).items() if v is not None}
    np.savez(folder / f'{name}.npz', **arrays)
    policies[name] = params
{name: path.stat().st_size for name, path in zip(MODELS, sorted(folder.iterdir()), strict=True)}

# %% [markdown]
# From here on the files and the parameters are all that is needed. `scored` gives back log-probs of
# the answers under any parameters, with or without the recorded ids and experts; an expert of -1 is
# one that was not recorded.

# %%
rollouts = {}
for name in MODELS:
    with np.load(folder / f'{name}.npz') as file:
        rollouts[name] = po.Rollout(**{k: jnp.asarray(file[k]) for k in file.files})
mask = np.asarray(rollouts['dense'].mask) != 0
assert mask.sum() == ROWS * TOKENS


def scorer(model, support):
    return jax.jit(
        lambda params, rollout: (
            po.score(model, params, rollout, entropy=False, replay_support=support).logp_new
        )
    )


SCORERS = {(name, s): scorer(MODELS[name], s) for name in MODELS for s in (True, False)}


def scored(name, params, support=True, routing=True):
    """log new / old of the drawn tokens: [ROWS, TOKENS]."""
    rollout = rollouts[name]
    if not routing:
        rollout = rollout.replace(routing=jnp.full_like(rollout.routing, -1))
    found = SCORERS[name, support](params, rollout) - rollouts[name].logp_behavior
    return np.asarray(found, np.float64)[mask].reshape(ROWS, TOKENS)


# %% [markdown]
# ## Before the update
#
# The same parameters score what they drew. With replay the ratio is 1 to float32 rounding, for both
# models. Without the kept ids (shown for the dense one) the scorer uses the whole vocabulary, and
# the ratio of each token is the mass that its nucleus kept, before anything has been learnt: the
# notebook on truncated sampling is about that.

# %%
for name, params in policies.items():
    assert np.abs(scored(name, params)).max() < 2e-5
plain = scored('dense', policies['dense'], support=False)
kept = np.asarray(rollouts['dense'].logp_full - rollouts['dense'].logp_behavior)[mask]
np.testing.assert_allclose(plain.ravel(), kept, atol=2e-5)
np.testing.assert_allclose(np.exp(plain).mean(), 0.95, atol=0.02)

# %% [markdown]
# The experts need no replay yet: the same parameters choose the same ones.

# %%
assert np.abs(scored('mixture', policies['mixture'], routing=False)).max() < 2e-5

# %% [markdown]
# ## After an update
#
# An update is injected: noise of `DRIFT` on every parameter. That moves each model about as far. In
# the mixture the router is moved too, and without replay some tokens go to other experts than those
# that drew them, which no small step of the weights can do.


# %%
def drifted(params, size, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + size * np.std(x) * rng.normal(size=x.shape), params)


after = {name: drifted(params, DRIFT, SEED) for name, params in policies.items()}
log_ratios = {
    'dense': scored('dense', after['dense']),
    'mixture, replayed': scored('mixture', after['mixture']),
    'mixture, live router': scored('mixture', after['mixture'], routing=False),
}
spread = {name: float(x.std()) for name, x in log_ratios.items()}
assert 0.7 < spread['mixture, replayed'] / spread['dense'] < 1.3
assert 1.6 < spread['mixture, live router'] / spread['mixture, replayed'] < 2.5
spread

# %% [markdown]
# The live router doubles the spread (with other seeds of the noise 1.3 to 2.6 times), though it
# changes few experts. Most of the variance comes from the eighth of the tokens whose own experts
# changed; the others get theirs by attention to those.

# %%
route = jax.jit(
    lambda params, tokens: MODELS['mixture'].hidden(params, tokens).routing  # no padding here
)
drawn_with = np.asarray(rollouts['mixture'].routing)  # [B,T,layers,2], of each token that is fed
live = np.asarray(route(after['mixture'], rollouts['mixture'].tokens))
shared = (drawn_with[..., :, None] == live[..., None, :]).sum((-1, -2))
fed = np.roll(mask, -1, axis=1)  # the state that predicts a token is of the token before it
changed = 1 - shared[fed].mean(0) / 2
moved = (shared < 2).any(-1)[fed].reshape(ROWS, TOKENS)
for name in ('mixture, replayed', 'mixture, live router'):
    x = log_ratios[name]
    print(f'{name}: {x[moved].std():.3f} where experts changed, {x[~moved].std():.3f} elsewhere')
print(f'experts changed: {changed} of each layer, in {moved.mean():.1%} of tokens one or more')
wild = log_ratios['mixture, live router']
assert changed.min() > 0.005 and changed.max() < 0.07 and 0.09 < moved.mean() < 0.17
assert 0.6 < np.sum(wild[moved] ** 2) / np.sum(wild**2) < 0.8
assert wild[moved].std() > 3 * wild[~moved].std()
replayed = log_ratios['mixture, replayed']
assert 0.6 < replayed[moved].std() / replayed[~moved].std() < 1.4  # nothing special about them

# %%
colours = dict(zip(log_ratios, (BLUE, GREEN, RED), strict=True))
figure, axis = plt.subplots(figsize=(7, 3.4), layout='constrained')
for name, x in log_ratios.items():
    size = np.sort(np.abs(x), axis=None)[::-1]
    label = f'{name}: standard deviation {spread[name]:.3f}'
    axis.plot(size, (np.arange(size.size) + 1) / size.size, color=colours[name], label=label)
axis.set(xscale='log', yscale='log', xlabel='x', xlim=(1e-3, None))
axis.set_ylabel('tokens with |log new / old| > x')
axis.set_title(
    f'The same update of {DRIFT:.0%}, with and without replay of the experts', fontsize=10
)
axis.legend(frameon=False, fontsize=8, loc='lower left')
plt.show()

# %% [markdown]
# ## Token, segment, sequence
#
# GSPO's ratio of an answer is the geometric mean of its tokens' ratios, and that of a segment is
# the same over a turn or a step. The library has each as a part; here they are means of log-ratios.

# %%
segment = np.broadcast_to(np.arange(TOKENS) // SEGMENT, (ROWS, TOKENS))
x = log_ratios['mixture, live router']
inputs = po.LossInputs(
    logp_new=jnp.asarray(x, jnp.float32),
    logp_old=jnp.zeros(x.shape),
    mask=jnp.ones(x.shape),
    advantages=jnp.ones(x.shape),
    segment=jnp.asarray(segment),
)
by_segment = x.reshape(ROWS, -1, SEGMENT).mean(-1).repeat(SEGMENT, axis=1)
np.testing.assert_allclose(po.losses.segment_ratio()(inputs), by_segment, atol=1e-6)
by_sequence = np.broadcast_to(x.mean(1, keepdims=True), x.shape)
np.testing.assert_allclose(po.losses.sequence_ratio()(inputs), by_sequence, atol=1e-6)

# %% [markdown]
# Means over n tokens are narrower: by the square root of n where the log-ratios of an answer are
# independent, less where they go together. Under noise they almost are independent; a real update
# makes the tokens of an answer go together, and then the curve is flatter (`docs/claims.md` has it
# measured). The product of all ratios, the true importance weight, widens as fast as the mean
# narrows.

# %%
lengths = [n for n in range(1, TOKENS + 1) if TOKENS % n == 0]
widths = {
    name: np.array([x.reshape(ROWS, -1, n).mean(-1).std() for n in lengths])
    for name, x in log_ratios.items()
}
figure, axis = plt.subplots(figsize=(7, 3.6), layout='constrained')
for name, width in widths.items():
    axis.plot(lengths, width, 'o-', ms=4, color=colours[name], label=f'mean, {name}')
    axis.plot(lengths, width[0] / np.sqrt(lengths), ':', color=colours[name])
    slope = np.polyfit(np.log(lengths), np.log(width), 1)[0]
    print(f'{name}: standard deviation falls as n to the power {slope:.2f}')
    assert -0.6 < slope < -0.45
product = widths['dense'] * lengths
axis.plot(lengths, product, 's--', ms=4, color=GREY, label='sum (the product of ratios), dense')
axis.plot([], [], 'k:', label='of independent tokens')
axis.set(xscale='log', yscale='log', xlabel='n, tokens of a segment')
axis.set_ylabel('standard deviation of the log-ratio')
axis.set_xticks(lengths, lengths)
axis.minorticks_off()
axis.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
plt.show()
assert 5 < product[-1] / product[0] < 9  # the root of 48 is 6.9

# %% [markdown]
# ## What a clip makes of it
#
# The same range means different things. GRPO's .2 stops next to nothing, the ranges that GSPO
# publishes, 3e-4 and 4e-4, are for answers of thousands of tokens and stop most of these; ranges
# that stop a tenth of each side are found from the ratios themselves (`policyopt.calibrate`).


# %%
def stopped(x, low, high):
    return float(np.mean((np.exp(x) < 1 - low) | (np.exp(x) > 1 + high)))


print(f'{"":24}{"token .2":>10}{"sequence 3e-4, 4e-4":>22}{"a tenth a side":>18}')
for name, x in log_ratios.items():
    s = x.mean(1)
    low, high = 1 - np.exp(np.quantile(s, 0.1)), np.exp(np.quantile(s, 0.9)) - 1
    shares = stopped(x, 0.2, 0.2), stopped(s, 3e-4, 4e-4)
    print(f'{name:24}{shares[0]:10.2%}{shares[1]:22.0%}{low:10.4f}{high:8.4f}')
    assert shares[0] < 0.02 and shares[1] > 0.6
    assert 0.17 < stopped(s, low, high) < 0.23

# %% [markdown]
# ## What a run records
#
# The same as the metrics of a run (`metrics.jsonl`) have it: quantiles, variance within answers,
# effective sample size of tokens and of whole answers.

# %%
diagnose = jax.jit(po.losses.diagnostics.diagnose)
for name, x in log_ratios.items():
    inputs = inputs.replace(logp_new=jnp.asarray(x, jnp.float32))
    found = diagnose(inputs)
    tails = [float(found['ratio/token_log'].quantile(q)) for q in (0.01, 0.99)]
    np.testing.assert_allclose(tails, np.quantile(x, (0.01, 0.99)), rtol=0.04)
    variance, tokens, answers = (
        float(found[k].value) for k in ('ratio/row_variance', 'ess_old/token', 'ess_old/sequence')
    )
    product = np.exp(x.sum(1))
    np.testing.assert_allclose(answers, product.sum() ** 2 / ROWS / (product**2).sum(), rtol=1e-4)
    print(
        f'{name:22} 1 and 99 %: {tails[0]:+.3f} {tails[1]:+.3f}, variance within answers '
        f'{variance:.1e}, effective sample: {tokens:.1%} of tokens, {answers:.1%} of answers'
    )
    assert tokens > 0.99 and answers < 0.98

# %% [markdown]
# Try: `DRIFT = 0.1`, the update of a learning rate that is too high, where the clip of .2 begins to
# work; `TOP_P = 0.5`; more experts or layers. The asserts pin the numbers of the first settings,
# and will complain. `python -m policyopt.calibrate RUN` and `python -m policyopt.inspect FILE` show
# the same of a run of yours.
