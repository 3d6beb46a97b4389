"""Reward models: scores, batches of them beside other rewards, calibration, preferences."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import models, preferences, recipe, reward_judge, reward_model, rewards, sharding
from policyopt.data.tokenizer import CharTokenizer, arithmetic_tokenizer
from policyopt.preferences import Pair, bradley_terry
from policyopt.reward_judge import ModelJudge, Use
from policyopt.reward_model import RewardModel
from policyopt.rewards import Calibration, Case, JudgeConfig, Local, Round, Spec, Step, Verdict
from policyopt.rewards.scored import TEMPLATE
from tests import decoder_reference
from tests.test_quickstart import get_config

NAN = math.nan
TOKENIZER = arithmetic_tokenizer()
SHAPE = models.ModelConfig(
    vocab_size=16,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    mlp_dim=32,
    tied=True,
    reward_head=True,
    max_length=40,
)
MODEL = models.build(SHAPE, TOKENIZER)


@pytest.fixture(scope='module')
def params():
    found = jax.jit(MODEL.init)(jax.random.key(0))
    return {**found, 'reward': jax.random.normal(jax.random.key(1), (16,))}


def by_hand(params, ids):
    """Score of each token, in numpy."""
    hidden, _ = decoder_reference.forward(params, np.array(ids), SHAPE)
    return hidden @ np.asarray(params['reward'], np.float64)


def rows(seed, lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 16, n).tolist() for n in lengths]


# ============================================================================ scores


def test_the_score_is_that_of_the_last_token(params):
    """Whatever the width, and whatever stands in the padding."""
    ids = rows(0, [5])[0]
    wanted = by_hand(params, ids)
    score, every = reward_model.make_score(MODEL), reward_model.make_score(MODEL, every=True)
    tokens, length = reward_model.pad([ids, ids[:3]], 4, 16)
    tokens[0, 5:], tokens[1, 3:] = 9, 7
    got = score(params, tokens, length)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[:2], wanted[[4, 2]], atol=1e-5)
    np.testing.assert_allclose(every(params, tokens, length)[0, :5], wanted, atol=1e-5)
    assert reward_model.make_score(models.build(SHAPE, None)) is score


def test_the_head_is_float32_on_a_narrow_trunk(params):
    narrow = models.build(dataclasses.replace(SHAPE, dtype='bfloat16'), TOKENIZER)
    tokens, length = reward_model.pad(rows(1, [4]), 1, 16)
    found = reward_model.make_score(narrow)(params, tokens, length)
    hidden = narrow.hidden(params, tokens, valid=np.arange(16)[None] < 4).hidden
    assert hidden.dtype == jnp.bfloat16 and found.dtype == jnp.float32
    wanted = np.asarray(hidden[0, 3], np.float64) @ np.asarray(params['reward'], np.float64)
    np.testing.assert_allclose(found[0], wanted, rtol=3e-2, atol=1e-2)


def test_widths_are_few_and_wide_enough():
    assert [reward_model.width_of(n) for n in (0, 1, 16, 17, 32, 33)] == [16, 16, 16, 32, 32, 64]


def test_scores_of_many_rows_keep_their_order(params):
    found = rows(2, [3, 20, 5, 17, 9])
    got = reward_model.scores(MODEL, params, found, 2)
    np.testing.assert_allclose(got, [by_hand(params, ids)[-1] for ids in found], atol=1e-5)


def test_calibration_against_polyfit():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(50) * 3 + 1, rng.random(50)
    got = reward_model.calibrate(x, y)
    slope, intercept = np.polyfit(x, y, 1)
    wanted = [50, x.mean(), x.std(), slope, intercept]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert got(2.0, 'standard') == pytest.approx((2 - x.mean()) / x.std())
    assert got(2.0, 'truth') == pytest.approx(slope * 2 + intercept)
    with pytest.raises(ValueError, match='all 3 scores are 2.0'):
        reward_model.calibrate(np.full(3, 2.0))
    with pytest.raises(ValueError, match='knows no true rewards'):
        reward_model.calibrate(x)(1.0, 'truth')


# ============================================================================ judging


def case(prompt, answer, steps=()):
    example = {'answer': '3', **({'steps': list(steps)} if steps else {})}
    ids = TOKENIZER.encode(answer) + [TOKENIZER.eos_id]
    return Case(answer, ids, example, prompt, tuple(TOKENIZER.encode(prompt)))


def judge_of(params, reward, batch=4, every=False, calibration=None, inner=Local):
    judge = ModelJudge(inner(reward), [Use('', TEMPLATE, every)], TOKENIZER, batch)
    judge.give(RewardModel(MODEL, params, calibration))
    return judge


CASES = [case('1+2=', '3'), case('10+11=', '21'), case('4+4=', '9'), case('9=', '9' * 17)]


def test_cases_are_scored_in_batches_and_judged_with_their_scores(params):
    wanted = [by_hand(params, [*c.prompt_ids, *c.tokens])[-1] for c in CASES]
    parts = {'model': rewards.reward_model(), 'length': lambda text, *_: Verdict(len(text), 'long')}
    reward = rewards.weighted_sum(parts, {'model': 2.0, 'length': 0.5})
    with judge_of(params, reward) as judge:
        judging = Round(judge)
        for i in (2, 0, 3, 1):  # as an engine's rows end
            judging.add([i], [CASES[i]])
        found = judging.verdicts(4)
    for verdict, score, each in zip(found, wanted, CASES, strict=True):
        assert verdict.value == pytest.approx(2 * score + 0.5 * len(each.text), abs=1e-4)
        assert [part.reason for part in verdict.parts] == ['scored', 'long']


def test_a_score_does_not_depend_on_its_company(params):
    """The same bits alone, among others and at another place of a batch."""
    with judge_of(params, rewards.reward_model()) as judge:
        alone = [Round(judge) for _ in CASES]
        values = []
        for judging, each in zip(alone, CASES, strict=True):
            judging.add([0], [each])
            values.append(judging.verdicts(1)[0].value)
        together = Round(judge)
        together.add([3, 2, 1, 0], CASES[::-1])
        assert [v.value for v in together.verdicts(4)] == values


def test_the_caller_waits_for_nothing_but_verdicts(params):
    """Full batches are on their way at once, others when their verdicts are asked for."""
    with judge_of(params, rewards.reward_model(), batch=2) as judge:
        futures = judge.submit(CASES[:3])
        assert [f.result(timeout=60).reason for f in futures[:2]] == ['scored', 'scored']
        assert not futures[2].done()
        judge.flush()
        assert futures[2].result(timeout=60).reason == 'scored'


def test_scales_of_a_calibrated_model(params):
    known = Calibration(9, 0.5, 2.0, 0.25, 1.0)
    raw = by_hand(params, [*CASES[0].prompt_ids, *CASES[0].tokens])[-1]
    for scale, wanted in (('standard', (raw - 0.5) / 2), ('truth', 1 + raw / 4)):
        reward = rewards.reward_model(scale=scale)
        with judge_of(params, reward, calibration=known) as judge:
            (future,) = judge.submit(CASES[:1])
            judge.flush()
            assert future.result(timeout=60).value == pytest.approx(wanted, abs=1e-5)
    with judge_of(params, rewards.reward_model(scale='standard')) as judge:
        (future,) = judge.submit(CASES[:1])
        judge.flush()
        assert 'the reward model is not calibrated' in future.result(timeout=60).reason


def test_steps_are_scored_at_their_last_tokens(params):
    stepped = case('1+2=', '3+4-5', [Step('3+', 1), Step('4-', 3), Step('5', 5)])
    wanted = by_hand(params, [*stepped.prompt_ids, *stepped.tokens])[[5, 7, 9]]
    for total, value in (('last', wanted[-1]), ('mean', wanted.mean()), ('min', wanted.min())):
        reward = rewards.reward_model(per='step', total=total)
        with judge_of(params, reward, every=True) as judge:
            (future,) = judge.submit([stepped])
            judge.flush()
            found = future.result(timeout=60)
        np.testing.assert_allclose(found.steps, wanted, atol=1e-5)
        assert found.value == pytest.approx(value, abs=1e-5)


def test_rows_that_are_too_long_have_no_reward(params):
    with judge_of(params, rewards.reward_model()) as judge:
        judging = Round(judge)
        judging.add([0, 1], [case('1', '2' * 50), CASES[0]])
        long, short = judging.verdicts(2)
    assert long.reason == 'too_long: 52 tokens' and math.isnan(long.value)
    assert short.reason == 'scored'


def test_a_model_that_gives_no_number_costs_the_row(params):
    broken = {**params, 'reward': jnp.full(16, jnp.nan)}
    with judge_of(broken, rewards.reward_model()) as judge:
        judging = Round(judge)
        judging.add([0], CASES[:1])
        assert judging.verdicts(1)[0].kind == 'nonsense'


def test_a_judge_that_fails_fails_the_run(params):
    class Gone(Local):
        def submit(self, cases):
            raise rewards.JudgeError('gone')

    with judge_of(params, rewards.reward_model(), inner=Gone) as judge:
        judging = Round(judge)
        judging.add([0], CASES[:1])
        with pytest.raises(rewards.JudgeError, match='gone'):
            judging.verdicts(1)
    early = ModelJudge(Local(rewards.reward_model()), [Use('', TEMPLATE, False)], TOKENIZER, 2)
    with early, pytest.raises(RuntimeError, match='is not trained yet'):
        early.submit(CASES)


def test_workers_judge_with_scores(params):
    """Processes without jax, which the scores reach as part of the example."""
    parts = {'model': Spec('reward_model'), 'form': Spec('boxed')}
    spec = Spec('weighted_sum', {'parts': parts, 'weights': {'model': 1.0, 'form': 3.0}})
    judge = ModelJudge(
        rewards.make_judge(spec, JudgeConfig(workers=1, deadline=60.0)),
        reward_judge.uses(spec),
        TOKENIZER,
        2,
    )
    with judge:
        judge.give(RewardModel(MODEL, params, None))
        judging = Round(judge)
        judging.add(range(4), CASES)
        found = judging.verdicts(4)
    wanted = [by_hand(params, [*c.prompt_ids, *c.tokens])[-1] for c in CASES]
    np.testing.assert_allclose([v.value for v in found], wanted, atol=1e-5)
    assert found[0].parts[1].reason == 'no_box'


# ============================================================================ folders


@pytest.fixture(scope='module')
def folder(params, tmp_path_factory):
    path = tmp_path_factory.mktemp('models') / 'reward'
    models.save(MODEL, params, path)
    known = Calibration(9, 0.5, 2.0)
    (path / 'calibration.json').write_text(json.dumps(known._asdict()))
    return str(path)


def make(reward, kw, tokenizer=TOKENIZER, **config):
    spec = rewards.read(reward, kw, Spec('policyopt.rewards.scorers.exact'))
    return reward_judge.make_judge(spec, JudgeConfig(workers=0, **config), tokenizer)


def test_a_model_from_a_folder_scores_the_policys_ids(folder, params):
    """Also where its tokenizer is read from a file: the same ids are the same tokenizer."""
    written = json.loads(pathlib.Path(folder, 'config.json').read_text())
    assert written['architectures'] == ['LlamaForSequenceClassification']
    with make('reward_model', dict(path=folder)) as judge:
        judging = Round(judge)
        judging.add(range(4), CASES)
        found = judging.verdicts(4)
    wanted = [by_hand(params, [*c.prompt_ids, *c.tokens])[-1] for c in CASES]
    np.testing.assert_allclose([v.value for v in found], wanted, atol=1e-5)


def test_another_tokenizer_gets_the_text(folder, params):
    other = CharTokenizer('=+9876543210-*')
    text = [Case(c.text, other.encode(c.text), c.example, c.prompt) for c in CASES[:3]]
    with make('reward_model', dict(path=folder, template='{prompt}{answer}-'), other) as judge:
        judging = Round(judge)
        judging.add(range(3), text)
        found = judging.verdicts(3)
    wanted = [by_hand(params, TOKENIZER.encode(c.prompt + c.text + '-'))[-1] for c in text]
    np.testing.assert_allclose([v.value for v in found], wanted, atol=1e-5)
    for kw, its, message in (
        (dict(per='step'), other, "tokenizer is not the policy's: where a step ends"),
        (dict(template='{prompt} {answer}'), TOKENIZER, "no effect: .* has the policy's tokenizer"),
    ):
        judge = make('reward_model', dict(path=folder, **kw), its)
        with judge, pytest.raises(ValueError, match=message):
            judge.submit(text)


def test_what_can_not_be_is_refused_at_the_start(folder, tmp_path):
    for kw, message in (
        (dict(path=str(tmp_path)), 'is no reward model: .* legal is a folder'),
        (dict(path=folder, scale='truth'), "'truth', but .* a calibration without true rewards"),
        (dict(path=folder, scale='standart'), 'Did you mean `standard`'),
        (dict(path=folder, total='mean'), "no effect with per='answer'"),
        (dict(path=folder, template='{answer}'), 'legal is a text with {prompt} and {answer}'),
    ):
        with pytest.raises(ValueError, match=message):
            make('reward_model', kw)
    plain = models.build(dataclasses.replace(SHAPE, reward_head=False), TOKENIZER)
    models.save(plain, jax.jit(plain.init)(jax.random.key(0)), tmp_path / 'plain')
    with pytest.raises(ValueError, match='has no reward head'):
        make('reward_model', dict(path=str(tmp_path / 'plain')))
    with pytest.raises(ValueError, match='judge.batch is 8, but no reward model'):
        make('graded', {}, batch=8)
    (tmp_path / 'plain' / 'calibration.json').write_text('{"rows": 1, "mean": 0, "std": 0}')
    with pytest.raises(ValueError, match='is no calibration of a reward model'):
        rewards.scored.read_calibration(tmp_path / 'plain')


# ============================================================================ in a config

DENSE = dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32)
PREFERENCES = dict(problems=64, answers=4, batch=16, epochs=2, optimizer=dict(learning_rate=1e-3))
AUDITED = dict(reward=dict(reward='reward_model', scale='truth'), truth='graded')


def config(**changes):
    found = get_config('tiny', model=DENSE, router={}, replay={}, ema=None, dynamic_sampling=False)
    return {**found, 'reward': 'audited', 'reward_kw': AUDITED, **changes}


def test_a_config_needs_its_model_and_its_steps():
    steps = {**get_config('tiny')['rollout'], 'steps': dict(marker='+')}
    for changes, message in (
        ({}, 'a reward_model without a path, and config.preferences is None'),
        (dict(preferences=PREFERENCES, reward='graded', reward_kw={}), 'preferences has no effect'),
        (
            dict(reward='by_step', reward_kw=dict(step='graded')),
            'has by_step, a reward of steps, but config.rollout.steps is None',
        ),
        (dict(reward='graded', reward_kw={}, rollout=steps), 'neither algorithm nor reward reads'),
        (
            dict(preferences={**PREFERENCES, 'flip': 0.7}),
            r'preferences.flip must lie in \[0, 0.5\]',
        ),
        (dict(preferences={**PREFERENCES, 'held_out': 1.0}), 'held_out is 1.0; legal is in'),
    ):
        with pytest.raises(ValueError, match=message):
            recipe.prepare(config(**changes))
    setup = recipe.prepare(config(preferences=PREFERENCES))
    assert isinstance(setup.judge, ModelJudge) and isinstance(setup.measure, Local)
    plain = recipe.prepare(config(reward='graded', reward_kw={}))
    assert plain.measure is plain.judge


# ============================================================================ preferences


def test_the_loss_of_bradley_and_terry_by_hand():
    chosen, rejected = np.float32([1.0, 0.0, -2.0]), np.float32([0.0, 0.5, -2.0])
    loss, margin = bradley_terry(chosen, rejected)
    # -log sigmoid(1) = .31326, -log sigmoid(-.5) = .97408, -log sigmoid(0) = .69315
    assert float(loss) == pytest.approx((0.31326169 + 0.97407698 + 0.69314718) / 3, abs=1e-6)
    np.testing.assert_allclose(margin, [1, -0.5, 0])
    slope = jax.grad(lambda c: bradley_terry(c, rejected)[0])(chosen)
    np.testing.assert_allclose(slope, -1 / (1 + np.exp(margin)) / 3, atol=1e-6)
    shifted, _ = bradley_terry(chosen + 10, rejected + 10)
    assert float(shifted) == pytest.approx(float(loss), abs=1e-6)
    far, _ = bradley_terry(np.float32([-200.0]), np.float32([0.0]))
    assert float(far) == pytest.approx(200)


def test_a_pair_of_weight_zero_matters_to_nothing():
    weights = np.float32([0.5, 0, 0.5])

    def loss(c):
        return bradley_terry(c, jnp.float32([0.0, jnp.inf, 1.0]), weights)[0]

    found = jnp.float32([1.0, jnp.nan, 0.0])
    value, slope = jax.value_and_grad(loss)(found)
    assert float(value) == pytest.approx(0.5 * (0.31326169 + 1.31326169), abs=1e-6)
    assert np.isfinite(slope).all() and slope[1] == 0


def test_pairs_are_of_different_value_and_of_one_problem():
    values = np.array([[1, 0, 0, NAN], [0, 0, 0, 0], [0.2, 0.9, 0.9, 0.5]])
    texts = [['a', 'b', 'b', 'c'], ['a'] * 4, ['a', 'b', 'c', 'd']]
    found = preferences.make_pairs(values, texts, 99, 0)
    wanted = [(0, 0, 1), (2, 1, 0), (2, 1, 3), (2, 2, 0), (2, 2, 3), (2, 3, 0)]
    assert found == [Pair(*pair) for pair in wanted]
    few = preferences.make_pairs(values, texts, 2, 1)
    assert len(few) == 3 and set(few) <= set(found)
    assert preferences.make_pairs(values, texts, 2, 1) == few
    turned = preferences.flipped(found, 0.5, 3)
    changed = [a != b for a, b in zip(turned, found, strict=True)]
    assert sum(changed) == 3
    assert all(
        {a.chosen, a.rejected} == {b.chosen, b.rejected} for a, b in zip(turned, found, strict=True)
    )


def test_agreement_against_loops():
    rng = np.random.default_rng(0)
    pairs = [Pair(p, 0, 1 + i) for p in range(30) for i in range(1 + p % 3)]
    scores = {(p, a): float(rng.standard_normal() + (a == 0)) for p in range(30) for a in range(4)}
    scores[0, 0] = scores[0, 1]
    got = preferences.agreement(pairs, scores, seed=1)
    margins = [scores[p.problem, p.chosen] - scores[p.problem, p.rejected] for p in pairs]
    right = [0.5 if m == 0 else float(m > 0) for m in margins]
    assert got.accuracy == pytest.approx(np.mean(right))
    assert got.loss == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]))
    assert (got.pairs, got.problems) == (60, 30)
    rng, shares = np.random.default_rng(5), []
    for _ in range(2000):
        drawn = rng.integers(30, size=30)
        hits = [r for d in drawn for p, r in zip(pairs, right, strict=True) if p.problem == d]
        shares.append(np.mean(hits))
    np.testing.assert_allclose([got.low, got.high], np.quantile(shares, [0.025, 0.975]), atol=0.02)
    with pytest.raises(ValueError, match='no pair'):
        preferences.agreement([], {})


# ============================================================================ on several devices


def test_a_model_is_split_over_devices_like_the_others(folder, params):
    """Rows over two devices, widths over two, vocabulary over two: the same scores, whole."""
    axes = (('data', 2), ('fsdp', 2), ('tensor', 2))
    mesh = sharding.make_mesh(axes)
    spec = rewards.read('reward_model', dict(path=folder), Spec('policyopt.rewards.scorers.exact'))
    config = JudgeConfig(workers=0, batch=4)
    judge = reward_judge.make_judge(spec, config, TOKENIZER, mesh, dict(MODEL.rules))
    with sharding.use(mesh), judge:
        judging = Round(judge)
        judging.add(range(4), CASES)
        found = judging.verdicts(4)
        split = judge._given[folder].params['dense']['mlp']['gate']
    assert len(split.sharding.device_set) == 8 and not split.is_fully_replicated
    wanted = [by_hand(params, [*c.prompt_ids, *c.tokens])[-1] for c in CASES]
    np.testing.assert_allclose([v.value for v in found], wanted, atol=1e-5)
