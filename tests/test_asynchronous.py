"""Answers drawn ahead: versions and their bound, new parameters, what is saved, what is refused."""

import functools
import json
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import policyopt as po
from policyopt import (
    algorithms,
    asynchronous,
    data,
    generators,
    losses,
    metrics,
    models,
    recipe,
    rewards,
    scoring,
    staleness,
    stream,
    train,
)
from policyopt.asynchronous import AsyncConfig
from policyopt.checkpoint import Checkpoints, Progress
from policyopt.rollout import RolloutConfig, make_collector
from policyopt.sampling import EngineConfig, SamplingConfig
from tests import pages
from tests.test_checkpoint import Config, same
from tests.test_quickstart import get_config
from tests.test_resume import check_resume

TOKENIZER = data.arithmetic_tokenizer()
ITEMS = [
    data.Item(prompt=f'{i}+1=', ids=tuple(TOKENIZER.encode(f'{i}+1=')), answer='', entry={'i': i})
    for i in range(9)
]
PROMPTS, GROUP = 3, 2
ENGINE = EngineConfig(slots=4, steps=2, prefill_width=16, bucket=16)  # a program for each thing
CONFIG = RolloutConfig(prompts=PROMPTS, group_size=GROUP, engine=ENGINE)
SAMPLING = SamplingConfig(max_new_tokens=10, banned_ids=(TOKENIZER.encode('*')[0],))


@functools.cache
def model():
    config = models.ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        embed_dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=16,
    )
    return models.build(config, TOKENIZER)


@functools.cache
def params(version):
    return jax.jit(model().init)(jax.random.key(version))


def judge():
    return rewards.Local(lambda text, tokens, example: rewards.Verdict(float(len(tokens) % 2)))


def make(devices=None, config=CONFIG, **settings):
    settings = AsyncConfig(devices=devices, **settings)
    meshes = asynchronous.meshes(settings, model().rules)
    return stream.Stream(model(), config, SAMPLING, 5, judge(), settings, meshes)


def take(of, source, version):
    key = jax.random.fold_in(jax.random.key(5), version)
    return of.take(params(version), source, key, version, metrics.Stopwatch())


def problems():
    return data.batches(ITEMS, PROMPTS, seed=0)


def takes(count, of):
    source = problems()
    return [take(of, source, version) for version in range(count)]


# ============================================================================ ages


def test_ages_are_versions_behind():
    version = np.array([[9, 3, 4, 5], [-1, 5, 5, 5], [9, 9, 9, 9]])
    mask = np.array([[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    found = staleness.ages(version, mask, 5)
    assert found.tolist() == [[-1, 2, 1, 0], [-1, 0, -1, 0], [-1] * 4]
    numbers = staleness.describe(found, 2)
    assert numbers == pytest.approx({
        'staleness': 3 / 5,
        'staleness/max': 2,
        'staleness/mixed': 1 / 2,
        'staleness/0': 3 / 5,
        'staleness/1': 1 / 5,
        'staleness/2': 1 / 5,
    })  # fmt: skip
    assert set(staleness.describe(np.full((2, 3), -1), 1).values()) == {0.0}


def test_rows_of_the_future_are_refused_by_name():
    with pytest.raises(staleness.FutureVersion, match='token 1 of row 0 was drawn by version 4'):
        staleness.ages(np.array([[9, 4]]), np.array([[0, 1]]), 3)
    source, one = problems(), make(staleness=2)
    take(one, source, 2)
    with pytest.raises(staleness.FutureVersion, match='is version 1'):
        take(one, source, 1)


# ============================================================================ the bound


class Scripted:
    """Generators whose groups end after as many calls as they are told."""

    def __init__(self, calls):
        self.slots = self.tokens = 0
        self.seconds = 0.0
        self._calls, self._left = iter(calls), {}

    def advance(self, ask):
        while wanted := ask():
            self._left[wanted.owner] = next(self._calls)
        self._left = {owner: calls - 1 for owner, calls in self._left.items()}
        ended = [owner for owner, calls in self._left.items() if calls <= 0]
        for owner in ended:
            del self._left[owner]
        fields = dict(data=dict.fromkeys(('tokens', 'mask', 'version'), np.zeros(1)), error='none')
        row = types.SimpleNamespace(**fields)
        return [
            generators.Held(0, owner, i, row) for owner in ended for i in range(len(owner.rows))
        ]

    def renew(self, *arguments, **kw):
        pass

    def drop(self, owners):
        for owner in owners:
            self._left.pop(owner, None)


def empty_rows(count):
    rows = np.zeros((count, 1), np.int32)
    return po.Rollout(tokens=rows, mask=rows, version=rows - 1)


@hypothesis.given(
    bound=st.integers(0, 4),
    rounds=st.lists(st.integers(1, 3), min_size=6, max_size=12),
    calls=st.lists(st.sampled_from([1, 1, 2, 3, 9, 30]), min_size=200, max_size=200),
    late=st.sampled_from(['wait', 'drop']),
)
@hypothesis.settings(max_examples=25)
def test_no_group_is_taken_later_than_its_bound(bound, rounds, calls, late):
    """Whatever groups take to end, with one take or several in a version."""
    closed, taken = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, 'Generators', lambda *arguments: Scripted(calls))
        patch.setattr(stream, 'to_rollout', lambda rows, width: empty_rows(len(rows)))
        one = make(staleness=bound, late=late if bound else 'wait')
        close = one._close
        one._close = lambda gone, taken=0: (closed.append((list(gone), taken)), close(gone, taken))
        source = iter(lambda: ITEMS[:PROMPTS], None)
        for version, count in enumerate(rounds):
            for _ in range(count):
                one.take(None, source, jax.random.key(version), version, metrics.Stopwatch())
                gone, many = closed[-1]
                assert len(gone) == many == PROMPTS
                assert [g.number for g in gone] == sorted(g.number for g in gone)
                for group in gone:
                    assert 0 <= version - group.version <= bound and group.number not in taken
                    taken[group.number] = version
                assert len(one._groups) <= bound * PROMPTS
    lost = [group.number for gone, many in closed if not many for group in gone]
    assert (not lost or late == 'drop') and not set(lost) & set(taken)
    assert sorted([*taken, *lost, *(g.number for g in one._groups)]) == list(range(one._next))


# ============================================================================ parameters


def test_rows_go_on_with_new_parameters_and_every_token_has_its_version():
    """Each token's log-prob is that of the version it names; with kept caches nearly so."""
    allowed = po.sampling.allowed_mask(SAMPLING, TOKENIZER.vocab_size)
    named = dict(allowed=allowed, entropy=False)
    score = jax.jit(lambda params, rows: scoring.score(model(), params, rows, **named).logp_new)
    gaps = {}
    for cache in ('recompute', 'keep'):
        found = takes(4, make(staleness=2, cache=cache))
        gaps[cache] = []
        for now, drawn in enumerate(found):
            rollout = drawn.rollout
            ages = staleness.ages(rollout.version, rollout.mask, now)
            assert ages.max() <= 2
            for version in np.unique(np.asarray(rollout.version)):
                if version < 0:
                    continue
                logp = score(params(int(version)), rollout)
                its = (np.asarray(rollout.version) == version) & (np.asarray(rollout.mask) > 0)
                gaps[cache].append(np.abs(logp - rollout.logp_behavior)[its].max())
        mixed = staleness.describe(ages, 2)
        assert mixed['staleness/mixed'] > 0 and mixed['staleness'] > 0
    assert max(gaps['recompute']) <= 2e-5 < 1e-3 < max(gaps['keep'])


@pytest.mark.slow
def test_rows_and_versions_are_the_same_on_devices_of_their_own():
    settings = dict(staleness=2, generators=2, ahead=1)
    shared, apart = takes(3, make(**settings)), make(2, **settings)
    own = takes(3, apart)
    for i, one in enumerate(apart._generators._all):
        for x in (*jax.tree.leaves(one.params), one.engine._table._cache.k):
            assert {d.id for d in x.devices()} == {6 + i}
    for a, b in zip(shared, own, strict=True):
        for name in ('tokens', 'version', 'mask', 'rewards', 'finish'):
            np.testing.assert_array_equal(getattr(a.rollout, name), getattr(b.rollout, name))
        np.testing.assert_allclose(a.rollout.logp_behavior, b.rollout.logp_behavior, atol=2e-5)


# ============================================================================ as without


def test_at_staleness_0_a_step_is_that_of_a_synchronous_run():
    """The same bits from the collector, in several rounds."""
    source, ahead = problems(), problems()
    one = make(staleness=0)
    algorithm = algorithms.dapo(max_length=10, cache=1)
    collect = make_collector(model(), algorithm, judge(), CONFIG, SAMPLING, 5)
    for version in range(2):
        state = types.SimpleNamespace(params=params(version))
        found = [
            collect(state, None, its, jax.random.key(version), version, stream=of)
            for its, of in ((source, None), (ahead, one))
        ]
        assert found[0].metrics == found[1].metrics and found[0].metrics['rollout/rounds'] > 1
        same(found[0].batch, found[1].batch)
        same(found[0].rollout, found[1].rollout)
    assert one.describe() | {'async/idle': 0} == {
        'async/idle': 0,
        'async/dropped': 0,
        'async/waiting': 0,
        'async/running': 0,
    }


@pytest.mark.slow
def test_at_staleness_0_a_run_is_a_synchronous_run(tmp_path):
    """Metrics and parameters, to the bit; a mixture of experts, with both replays."""
    records = {}
    for name, settings in (('without', None), ('with', dict(staleness=0))):
        config = tiny_run(asynchronous=settings, model=get_config('tiny')['model'], router={})
        config['steps'] = 2
        config['sampling'] |= dict(top_p=0.95, support_size=8)
        config['replay'] = dict(support=True, routing='rollout')
        train.run(train.start(config, tmp_path / name), tmp_path / name)
        records[name] = [
            {k: v for k, v in r.items() if not k.startswith(('async', 'staleness'))}
            for r in metrics.read(tmp_path / name / 'metrics.jsonl')
        ]
    assert records['with'] == records['without']
    assert records['with'][1]['loss'] != 0


# ============================================================================ checkpoints


def test_what_is_open_goes_on_to_the_bit_from_what_is_saved():
    source = problems()
    whole = make(staleness=2, generators=2)
    for version in range(2):
        take(whole, source, version)
    for _ in range(3):
        whole._advance()  # as `run_ahead` does
    whole.describe()
    state = source.get_state()
    arrays, notes = whole.save()
    arrays, notes = {k: x.copy() for k, x in arrays.items()}, json.loads(json.dumps(notes))
    assert len(notes['ended']) > 0 < len(notes['running'])
    wanted = [take(whole, source, version) for version in (2, 3)]

    again, other = make(staleness=2, generators=2), problems()
    again.restore(arrays, notes, other, jax.random.key(0))
    other.set_state(state)
    for version in (2, 3):
        found = take(again, other, version)
        same(found.rollout, wanted[version - 2].rollout)
    assert again.describe() == whole.describe()


def test_rollouts_are_in_the_checkpoint_and_checked(tmp_path):
    tree, rng = {'x': jax.numpy.arange(3.0)}, np.random.default_rng(0)
    arrays = {
        'tokens': rng.integers(0, 9, 13).astype(np.int32),
        'routing': rng.integers(-1, 8, (13, 1, 2)).astype(np.int8),
        'nothing': np.zeros((0, 3), np.float32),
    }
    with Checkpoints(tmp_path, 9, Config()) as checkpoints:
        checkpoints.save(tree, None, Progress(0, None, 0))
        checkpoints.save(tree, None, Progress(1, None, 0), {})
        checkpoints.save(tree, None, Progress(2, None, 0), arrays)
        checkpoints.wait()
        found = checkpoints.restore(lambda: (tree, None)).rollouts
        same(found, {k: x for k, x in arrays.items() if x.size})
    for path in (tmp_path / 'checkpoints' / '2' / 'rollouts').rglob('*'):
        if path.is_file() and path.parent.name == 'd':
            path.write_bytes(path.read_bytes()[:-1] + b'?')
    with Checkpoints(tmp_path, 9, Config()) as checkpoints:
        assert checkpoints.restore(lambda: (tree, None)).progress.step == 1
        assert (tmp_path / 'damaged' / '2-0').is_dir()
        assert checkpoints.restore(lambda: (tree, None)).rollouts == {}


def tiny_run(**changes):
    """A config of a run that learns from the first token; sampled answers of up to 10 tokens."""
    base = dict(
        warm_start=None,
        model=dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32),
        router={},
        replay={},
        dynamic_sampling=False,
        reward='tests.reward_functions.odd',
        reward_kw={},
        rollout=dict(
            prompts=8,
            group_size=4,
            engine=dict(slots=16, steps=2, prefill_width=8, bucket=32),
        ),
        sampling=dict(max_new_tokens=10, temperature=1.0),
        algorithm_kw=dict(gates=[dict(gate='truncated_importance', cap=2.0)]),
        logp_old='recomputed',
        optimizer__learning_rate=1e-2,
        steps=4,
        checkpoint=dict(every=1, keep=9),
        evaluation__every=9,
    )
    return get_config('tiny,algorithm=grpo', **(base | changes))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_same_bytes(tmp_path, capsys):
    """With rows under way, judged and not, and verdicts that depend on the clock."""
    config = tiny_run(
        asynchronous=dict(staleness=2, generators=2, late='drop'),
        reward='tests.reward_functions.moody',
        judge=dict(workers=2, deadline=0.2),
    )
    check_resume(config, tmp_path, [2], capsys)
    steps = [r for r in metrics.read(tmp_path / 'whole' / 'metrics.jsonl') if r['stage'] == 'rl']
    assert not pages.undocumented_of(tmp_path / 'whole')
    assert sum(r['rewards/timed_out'] for r in steps) > 0
    assert steps[-1]['staleness'] > 0 < steps[-1]['async/running'] and steps[-1]['loss'] != 0


# ============================================================================ what is refused


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(staleness=-1), r'staleness must lie in \[0, inf\]'),
        (dict(generators=0), r'generators must lie in \[1, inf\]'),
        (dict(staleness=0, late='drop'), "late is 'drop', which has no effect at staleness 0"),
        (dict(staleness=0, cache='keep'), "cache is 'keep', which has no effect at staleness 0"),
        (dict(staleness=0, ahead=2), 'ahead is 2, which has no effect at staleness 0'),
        (dict(mesh=(('data', 1),)), 'no effect without config.asynchronous.devices'),
        (dict(devices=3, generators=2), 'devices is 3; legal are multiples of the 2 generators'),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AsyncConfig(**settings)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(asynchronous=dict(stalenes=1)), 'Did you mean `staleness`'),
        (dict(asynchronous=dict(late='wiat')), 'Did you mean `wait`'),
        (dict(asynchronous=dict(devices=8)), 'devices is 8 of 8 devices'),
        (dict(asynchronous=dict(devices=4, mesh=(('dat', 4),))), 'Did you mean `data`'),
        (dict(asynchronous=dict(devices=4, mesh=(('data', 3),))), 'does not cover 4 devices'),
        (dict(rollout=dict(prompts=8)), 'needs config.rollout.engine'),
        (dict(rollout__chunks=2), 'chunks is 2, which has no effect'),
        (dict(algorithm_kw={}), "Legal are config.logp_old='recomputed' with algorithm_kw.gates"),
        (dict(logp_old='sampler'), "config.logp_old='sampler' makes equal"),
        (dict(algorithm_kw=dict(gates='truncated_import')), 'Did you mean `truncated_importance`'),
    ],
)
def test_configs_that_can_not_be_run_so_are_refused(changes, message):
    config = tiny_run(**(dict(asynchronous=dict(staleness=1)) | changes))
    with pytest.raises(ValueError, match=message):
        recipe.prepare(config)


def test_which_algorithms_correct_for_old_answers():
    def corrects(name, *gates, logp_old='recomputed'):
        kw = dict(length=9) if name == 'dr_grpo' else {}
        kw |= dict(max_length=9, cache=1) if name == 'dapo' else {}
        made = algorithms.resolve(name, gates=list(gates), **kw)
        return asynchronous.corrects(made, logp_old)

    for name in ('grpo', 'gspo_token', 'vapo', 'deepseek_v32', 'minirl'):
        assert corrects(name) == (name in ('deepseek_v32', 'minirl')), name
    for gate in ('truncated_importance', 'masked_importance', 'off_policy_sequence'):
        assert corrects('gspo', gate)
    assert corrects('vapo', 'off_policy_sequence', logp_old='sampler')
    assert not corrects('gspo', 'truncated_importance', logp_old='sampler')


def test_gates_are_read_from_names_and_sections():
    read = losses.gates.read
    assert [g.__name__ for g in read('off_policy_sequence', 'gates')] == ['off_policy_sequence()']
    section = [{'gate': 'truncated_importance', 'cap': 3.0}, losses.masked_importance(0.1)]
    names = [g.__name__ for g in read(section, 'gates')]
    assert names == ['truncated_importance(cap=3.0)', 'masked_importance(0.1)']
    for wrong, message in (
        (['truncated_importanc'], 'Did you mean `truncated_importance`'),
        ([{'cap': 3}], "legal is a name, or {'gate': NAME"),
        ([3], 'legal is a name'),
    ):
        with pytest.raises(ValueError, match=message):
            read(wrong, 'gates')
    with pytest.raises(TypeError, match='Did you mean `cap`'):
        read({'gate': 'truncated_importance', 'kap': 3.0}, 'gates')
