"""Lock-step sampling: what is drawn, what is recorded of it, and that scoring agrees."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from policyopt import models, scoring
from policyopt.models.transformer import Hidden
from policyopt.sampling import SamplingConfig, decode, pad_prompts, sample

EOS = 1
KEY = jax.random.key(1)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A model whose logits depend on the last token only: row `token` of params [V,V]."""

    calls: list = dataclasses.field(default_factory=list, compare=False)
    tokenizer: object = dataclasses.field(default=None, compare=False)
    name: str = ''

    def init_cache(self, batch, size):
        return jnp.zeros(batch, jnp.int32)

    def extend(self, params, cache, tokens, count):
        jax.debug.callback(lambda: self.calls.append(1))
        return Hidden(params[tokens], None, {}), cache + count

    def logits(self, params, hidden):
        return hidden


def always(token, vocab=4):
    """Logits that give `token` whatever came before."""
    return jnp.zeros((vocab, vocab)).at[:, token].set(50.0)


def tiny_model(**changes):
    fields = dict(
        vocab_size=16, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_dim=24
    )
    config = models.ModelConfig(**fields | changes)
    model = models.build(config)
    return model, jax.jit(lambda key: jax.tree.map(lambda x: 3 * x, model.init(key)))(KEY)


RAGGED = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [2], [12, 13]]


def test_draws_have_the_exact_distribution():
    logits = jnp.array([[0.3, -1.0, 2.0, 0.0], [5.0, -3.0, 0.0, 0.0]] * 2)
    for temperature in (1.0, 2.5):
        rows = 20_000
        config = SamplingConfig(max_new_tokens=1, temperature=temperature)
        drawn = sample(Chain(), logits, [[0]] * rows, jax.random.key(7), config)
        counts = np.bincount(np.asarray(drawn.tokens[:, 1]), minlength=4)
        p = np.exp(np.asarray(logits[0], np.float64) / temperature)
        p /= p.sum()
        assert stats.chisquare(counts, rows * p).pvalue > 1e-4
        np.testing.assert_allclose(
            drawn.logp_behavior[:, 1], np.log(p)[np.asarray(drawn.tokens[:, 1])], atol=1e-6
        )


def test_temperature_is_in_the_log_prob():
    """Logits [2,0], T=2, token 0: log-prob -.3133."""
    model, logits = Chain(), jnp.array([[2.0, 0.0]] * 2)
    drawn = sample(model, logits, [[0]] * 64, jax.random.key(0), SamplingConfig(1, temperature=2.0))
    first = np.asarray(drawn.tokens[:, 1]) == 0
    assert first.any() and not first.all()
    np.testing.assert_allclose(drawn.logp_behavior[first, 1], -0.3133, atol=5e-5)


def test_changing_the_temperature_compiles_nothing():
    model, params = Chain(name='compile'), jnp.zeros((4, 4))
    before = decode._decode._cache_size()
    for temperature in (1.0, 0.5, 0.0):
        sample(model, params, [[0]], jax.random.key(0), SamplingConfig(2, temperature=temperature))
    assert decode._decode._cache_size() == before + 1


def test_greedy_takes_the_most_probable_token_with_log_prob_zero():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [0.0, 0.0, 0.0, 9.0], [0.0] * 4, [5.0, 0, 0, 0]])
    config = SamplingConfig(max_new_tokens=4, temperature=0.0)
    drawn = sample(Chain(), logits, [[0], [3]], jax.random.key(0), config)
    assert drawn.tokens.tolist() == [[0, 1, 3, 0, 1], [3, 0, 1, 3, 0]]
    assert not np.any(drawn.logp_behavior)


def test_mask_comes_from_lengths_with_pad_id_equal_to_eos_id():
    """[5,6,eos] with pad id == eos id: mask [1,1,1]."""
    chain = jnp.zeros((8, 8)).at[4, 5].set(50.0).at[5, 6].set(50.0).at[6, 0].set(50.0)
    config = SamplingConfig(max_new_tokens=5, eos_id=0)
    drawn = sample(Chain(), chain, [[4], [6]], jax.random.key(0), config)
    assert drawn.tokens.tolist() == [[4, 5, 6, 0, 0, 0], [6, 0, 0, 0, 0, 0]]
    assert drawn.mask.tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert drawn.length.tolist() == [4, 2] and drawn.prompt_length.tolist() == [1, 1]
    assert not np.any(drawn.truncated)


def test_first_token_may_be_end_of_sequence():
    """All rows end at once: one trained token, length 1."""
    config = SamplingConfig(max_new_tokens=3, eos_id=EOS)
    drawn = sample(Chain(), always(EOS), [[2, 3], [2]], jax.random.key(0), config)
    assert drawn.mask.sum(axis=1).tolist() == [1, 1]
    assert (drawn.length - drawn.prompt_length).tolist() == [1, 1]


def test_rows_at_the_limit_are_truncated():
    config = SamplingConfig(max_new_tokens=3, eos_id=EOS)
    drawn = sample(Chain(), always(2), [[3]], jax.random.key(0), config)
    assert drawn.truncated.tolist() == [True] and drawn.tokens.tolist() == [[3, 2, 2, 2]]
    # Without any end of sequence known, id 1 is a token like others.
    drawn = sample(Chain(), always(EOS), [[3]], jax.random.key(0), SamplingConfig(3))
    assert drawn.length.tolist() == [4] and drawn.truncated.tolist() == [True]
    # The tokenizer's end of sequence is used where the config names none.
    named = Chain(tokenizer=SimpleNamespace(eos_id=EOS), name='tokenizer')
    drawn = sample(named, always(EOS), [[3]], jax.random.key(0), SamplingConfig(3))
    assert drawn.length.tolist() == [2]


@pytest.mark.parametrize(('token', 'passes'), [(2, 4), (EOS, 1)])
def test_no_forward_pass_without_a_reader(token, passes):
    model = Chain(name=f'count {token}')
    config = SamplingConfig(max_new_tokens=4, eos_id=EOS)
    jax.block_until_ready(sample(model, always(token), [[3, 3]], jax.random.key(0), config))
    jax.effects_barrier()
    assert len(model.calls) == passes


def test_version_is_recorded_on_drawn_tokens():
    config = SamplingConfig(max_new_tokens=2, eos_id=EOS)
    drawn = sample(Chain(), always(EOS), [[3, 3], [3]], jax.random.key(0), config, version=7)
    assert drawn.version.tolist() == [[-1, -1, 7, -1], [-1, 7, -1, -1]]


SCORE = jax.jit(scoring.score, static_argnums=0)


def largest_logit(model, params, tokens):
    logits = jax.jit(lambda p, t: model.apply(p, t).logits)(params, tokens)
    return max(1.0, float(jnp.max(jnp.abs(logits))))


@pytest.mark.parametrize('moe', [False, True])
def test_first_ratio_is_one(moe):
    """Scoring a rollout with its own weights: log-ratio median 2e-6 and maximum 2e-5 at most.

    Both scaled by the largest logit over the temperature, where that is above 1.
    """
    changes = {}
    if moe:
        changes = dict(moe=models.moe.MoEConfig(experts=4, top_k=2), expert_dim=8)
    model, params = tiny_model(**changes)
    config = SamplingConfig(max_new_tokens=8, temperature=0.7, eos_id=EOS)
    for width in (6,) if moe else (6, 13):  # rows padded by 0 and by 7
        gaps, lengths = [], set()
        for seed in range(6):
            prompts = pad_prompts(RAGGED, width)
            drawn = sample(model, params, prompts, jax.random.key(seed), config)
            assert (drawn.routing is not None) == moe
            scores = SCORE(model, params, drawn, temperature=0.7)
            gap = np.abs(np.asarray(scores.logp_new - drawn.logp_behavior))
            gaps.extend(gap[np.asarray(drawn.mask) > 0])
            length = np.asarray(drawn.length)
            lengths |= set(length - np.asarray(drawn.prompt_length))
            if moe:  # experts of every token that was fed, -1 on the last and on padding
                fed = np.arange(drawn.tokens.shape[1]) < length[:, None] - 1
                assert np.all((np.asarray(drawn.routing) >= 0).all(axis=(2, 3)) == fed)
        assert len(lengths) > 2  # rows end at their own time
        scale = largest_logit(model, params, drawn.tokens) / 0.7
        assert np.median(gaps) <= 2e-6 * scale and max(gaps) <= 2e-5 * scale


def test_rows_alone_and_batched_agree():
    model, params = tiny_model()
    config = SamplingConfig(max_new_tokens=8, temperature=0.7, eos_id=EOS)
    keys = jax.random.split(jax.random.key(5), len(RAGGED))
    tokens, length = pad_prompts(RAGGED)
    together = sample(model, params, (tokens, length), keys, config)
    for row in range(len(RAGGED)):
        one = slice(row, row + 1)
        alone = sample(model, params, (tokens[one], length[one]), keys[one], config)
        n = int(alone.length[0])
        assert n == together.length[row]
        assert alone.tokens[0, :n].tolist() == together.tokens[row, :n].tolist()
        np.testing.assert_allclose(
            alone.logp_behavior[0, :n], together.logp_behavior[row, :n], atol=2e-5
        )


def test_same_key_same_bits_and_rows_follow_their_keys():
    model, params = tiny_model()
    config = SamplingConfig(max_new_tokens=8, eos_id=EOS)
    prompts = pad_prompts(RAGGED)
    first = sample(model, params, prompts, jax.random.key(2), config)
    again = sample(model, params, prompts, jax.random.key(2), config)
    other = sample(model, params, prompts, jax.random.key(3), config)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), first, again))
    assert not np.array_equal(first.tokens, other.tokens)
    order = np.array([2, 0, 3, 1])
    keys = decode.row_keys(jax.random.key(2), 4)[order]
    moved = sample(model, params, (prompts[0][order], prompts[1][order]), keys, config)
    assert np.array_equal(moved.tokens, first.tokens[order])
    assert np.array_equal(moved.logp_behavior, first.logp_behavior[order])


def test_uniform_at_the_edges_draws_a_possible_token():
    logp = jnp.log(jnp.array([[0.0, 0.5, 0.0, 0.5, 0.0]]))
    inverse_cdf = decode.logits_lib.inverse_cdf
    below_one = np.nextafter(np.float32(1), np.float32(0))
    for uniform, token in [(0.0, 1), (0.4999, 1), (0.5, 3), (below_one, 3)]:
        assert inverse_cdf(logp, jnp.array([uniform], jnp.float32)).tolist() == [token]


def test_errors_name_row_and_field():
    model, config = Chain(), SamplingConfig(2)
    with pytest.raises(ValueError, match='prompt 1 has 0 tokens'):
        sample(model, always(2), [[1], []], jax.random.key(0), config)
    with pytest.raises(ValueError, match='prompt 0 has 3 tokens; legal is 1 to 2'):
        pad_prompts([[1, 2, 3], [1]], width=2)
    with pytest.raises(TypeError, match=r'jax.random.key\(seed\)'):
        sample(model, always(2), [[1]], jax.random.PRNGKey(0), config)
    with pytest.raises(ValueError, match='temperature is -1'):
        SamplingConfig(2, temperature=-1.0)
    with pytest.raises(ValueError, match='temperature is nan'):
        SamplingConfig(2, temperature=float('nan'))
    with pytest.raises(ValueError, match='max_new_tokens is 0'):
        SamplingConfig(0)
    with pytest.raises(AssertionError):
        sample(model, always(2), [[1], [1]], jax.random.split(jax.random.key(0), 3), config)
