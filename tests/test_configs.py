"""One config for each algorithm: what it says, that it can start, and that its toy trains."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import policyopt as po
from policyopt import batches, evaluate, metrics, recipe, rollout, settings, train
from policyopt.models.tokenizer import Tokenizer as Saved
from tests import pages

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / 'configs'
NAMES = po.algorithms.names()

# What is published: prompts, answers of each, minibatches, tokens of an answer, learning rate (None
# where it is not, or not known here), and the terms' own numbers.
PUBLISHED = {
    'grpo': (16, 64, 1, 1024, 1e-6, dict(beta=0.04)),
    'dr_grpo': (None, 8, None, 3000, None, dict(eps=0.2, length=3000)),
    'dapo': (512, 16, 16, 20480, 1e-6, dict(low=0.2, high=0.28, max_length=20480, cache=4096)),
    'gspo': (None, None, 4, None, None, dict(low=3e-4, high=4e-4)),
    'gspo_token': (None, None, 4, None, None, dict(low=3e-4, high=4e-4)),
    'reinforce': (None, None, 1, None, None, {}),
    'vapo': (512, 16, 16, None, 1e-6, dict(low=0.2, high=0.28, alpha=0.05, nll=0.1)),
    'vc_ppo': (None, None, None, None, None, dict(lam=0.95, critic_lam=1.0)),
    'ppo_clip': (8192, 1, 16, None, 1e-6, dict(eps=0.2, lam=0.95, gamma=1.0)),
    'trpo': (None, None, 1, None, None, dict(delta=0.01)),
    'rloo': (256, 2, 2, None, 1e-6, dict(beta=0.03)),
    'reinforce_pp': (None, None, None, None, None, dict(eps=0.2, beta=1e-3)),
    'sapo': (None, None, None, None, None, dict(tau_positive=1.0, tau_negative=1.05)),
    'gmpo': (None, None, None, None, None, dict(clip=0.4)),
    'minirl': (None, None, None, None, None, dict(low=0.2, high=0.27)),
    'magistral': (None, None, None, None, None, dict(high=0.28)),
    'cispo': (None, None, None, None, None, dict(cap=5.0)),
}


def module(name):
    spec = importlib.util.spec_from_file_location(f'config_{name}', FOLDER / f'{name}.py')
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def get_config(name, argument='tiny=true'):
    return module(name).get_config(argument).to_dict()


def test_there_is_one_file_for_each_algorithm():
    others = {'long_answers', 'pods', 'quickstart', 'rlhf', 'smollm2', 'turns'}
    assert {p.stem for p in FOLDER.glob('*.py')} == {*NAMES, *others}
    for name in NAMES:
        assert get_config(name)['algorithm'] == f'policyopt.algorithms.{name}'


@pytest.mark.parametrize('name', NAMES)
def test_docstrings_say_what_it_is_what_it_costs_and_how_to_run_it(name):
    found = module(name)
    assert re.search(r'arXiv:\d{4}\.\d{5}|Williams 1992', found.__doc__)
    assert 'Published' in found.__doc__ and 'chosen here' in found.__doc__
    text = found.get_config.__doc__
    flag = f'python -m policyopt.train --config=configs/{name}.py:'
    assert f'{flag}model=PATH,data=FILE.jsonl \\' in text and f'{flag}tiny=true' in text
    assert 'Cost:' in text and 'Expected:' in text
    for argument in re.findall(rf'configs/{name}\.py:(\S+)', text):
        settings.parse_argument(argument, model='', data='', tiny=False)
    # The tokens it names are those of the config.
    c = get_config(name, 'model=M,data=D')
    rows = c['rollout']['prompts'] * c['rollout']['group_size']
    words = text.replace('\n    ', ' ')
    assert f'{rows:,} answers of up to {c["sampling"]["max_new_tokens"]:,} tokens' in words
    if found := re.search(r'at most (\d+|a) million', words):
        million = 1 if found[1] == 'a' else int(found[1])
        assert rows * c['sampling']['max_new_tokens'] / 1e6 == pytest.approx(million, rel=0.1)


@pytest.mark.parametrize('name', PUBLISHED)
def test_numbers_are_the_published_ones(name):
    prompts, answers, minibatches, tokens, rate, terms = PUBLISHED[name]
    c = get_config(name, 'model=M,data=D')
    found = (
        c['rollout']['prompts'],
        c['rollout']['group_size'],
        c['minibatches'],
        c['sampling']['max_new_tokens'],
        c['optimizer'].get('learning_rate'),
    )
    for value, wanted in zip(found, (prompts, answers, minibatches, tokens, rate), strict=True):
        assert wanted is None or value == wanted
    assert terms.items() <= c['algorithm_kw'].items()


def test_readme_has_a_row_for_each_config_and_its_numbers():
    """Numbers in bold are the published ones."""
    table = (ROOT / 'README.md').read_text().split('| config |')[1].split('\n\n')[0]
    rows = [line.strip('| ').split(' | ') for line in table.splitlines() if line.startswith('| `')]
    assert tuple(sorted(row[0].strip('`') for row in rows)) == NAMES
    for name, _, both, *rest in rows:
        name = name.strip('`')
        c = get_config(name, 'model=M,data=D')
        cells = [*both.split(' x '), *rest]
        values = (c['rollout']['prompts'], c['rollout']['group_size'], c['minibatches'])
        values += (c['sampling']['max_new_tokens'], c['optimizer'].get('learning_rate'))
        published = PUBLISHED.get(name, (None,) * 6)
        for cell, value, known in zip(cells, values, published, strict=False):
            bare = cell.strip('*').replace(',', '')
            assert (bare == '-' and value is None) or float(bare) == value, (name, cell)
            assert cell.startswith('**') == (known is not None), (name, cell)


def test_numbers_beside_the_table():
    dapo, magistral = (get_config(n, 'model=M,data=D') for n in ('dapo', 'magistral'))
    assert dapo['reward'] == 'math_equivalence' and dapo['reward_kw'] == dict(right=1, wrong=-1)
    assert magistral['reward'] == 'magistral' and get_config('dapo')['reward_kw']['wrong'] == -1
    assert dapo['optimizer']['warmup_steps'] == 20 * 16  # rollout steps of 16 updates
    vapo, ppo = (get_config(n, 'model=M,data=D') for n in ('vapo', 'ppo_clip'))
    assert vapo['critic']['pretrain']['max_steps'] == 50
    assert vapo['critic']['optimizer']['learning_rate'] == 2e-6
    assert ppo['critic']['optimizer']['learning_rate'] == 2e-6 and 'pretrain' not in ppo['critic']
    assert get_config('gspo', 'model=M,data=D')['replay']['routing'] is None
    assert get_config('minirl')['replay']['routing'] == 'recompute'
    assert get_config('deepseek_v32')['replay'] == dict(support=True, routing='rollout')


@pytest.mark.parametrize('name', NAMES)
def test_toy_is_legal_and_small(name):
    setup = recipe.prepare(get_config(name))
    c = setup.config
    assert c.steps == 2 and c.rollout.prompts * c.rollout.group_size == 32
    assert setup.width == 10 and len(setup.task.held_out) == 16
    whole = get_config(name, 'model=M,data=D')
    assert c.epochs == whole['epochs'] and (c.minibatches > 1) == (whole['minibatches'] > 1)
    assert c.logp_old == whole.get('logp_old', 'sampler')
    for section in ('critic', 'length_buckets', 'reference_every'):
        assert (getattr(c, section) is None) == (section not in whole)
    assert (c.rollout.engine is None) == ('engine' not in whole['rollout'])


@pytest.fixture(scope='module')
def given(tmp_path_factory):
    """The argument that names a model folder with a tokenizer, and a file of 1000 problems."""
    folder = tmp_path_factory.mktemp('model')
    for name in ('config.json', 'model.safetensors'):
        shutil.copy(ROOT / 'tests' / 'data' / 'hf' / 'qwen3_moe' / name, folder / name)
    vocabulary = {t: i for i, t in enumerate(['<pad>', '<s>', '</s>', '<unk>', *'0123456789+='])}
    inner = Tokenizer(models.WordLevel(vocabulary, '<unk>'))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex('.'), 'isolated')
    Saved(inner, bos_id=1, eos_id=2, pad_id=0).save(folder)
    file = folder / 'problems.jsonl'
    rows = [dict(prompt=f'{i}+{i}=', answer=2 * i) for i in range(1000)]
    file.write_text('\n'.join(map(json.dumps, rows)))
    return f'model={folder},data={file}'


@pytest.mark.parametrize('name', NAMES)
def test_recipe_can_start_on_a_model_and_a_file(name, given):
    config = get_config(name, given)
    config['rollout']['prompts'] = min(config['rollout']['prompts'], 512)  # the file has 1000
    config['microbatches'] = min(config['microbatches'], 8)
    setup = recipe.prepare(config)
    assert setup.config.algorithm == f'policyopt.algorithms.{name}'
    assert len(setup.task.held_out) == 64 and setup.model.config.moe.experts == 8
    own = setup.config.critic is not None and setup.config.critic.own
    assert own == (name in ('ppo_clip', 'vc_ppo', 'vapo')) == (setup.critic_model is not None)
    assert setup.model.config.value_head == (name == 'ppo_penalty')


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        (None, r'no model and no data; give --config=FILE.py:model=PATH,data=FILE.jsonl'),
        ('model=x', 'the config has no data; give'),
        ('tiny=true,model=x', 'leave out model and data'),
        ('modle=x', 'Did you mean `model`'),
        ('tiny=maybe', "tiny is 'maybe'; legal is bool"),
    ],
)
def test_arguments_that_say_too_little_or_too_much(argument, message):
    for name in ('dapo', 'vapo'):
        with pytest.raises(ValueError, match=message):
            module(name).get_config(argument)


def test_impossible_combinations_fail_before_any_compile():
    def changed(name, **sections):
        config = get_config(name)
        for section, values in sections.items():
            config[section] = config[section] | values if isinstance(values, dict) else values
        return config

    for config, message in (
        (
            changed('sapo', length_buckets=dict(widths=(4, 8))),
            'the widest must hold a whole row, 10 tokens',
        ),
        (changed('sapo', microbatches=2), 'microbatches=2 has no effect with length_buckets'),
        (
            changed('sapo', replay=None) | dict(replay=dict(routing='recompute')),
            'needs config.logp',
        ),
        (changed('grpo') | dict(logp_old='recomputd'), "'recomputed'. Did you mean `recomputed`"),
        (
            changed('grpo') | dict(replay=dict(routing='None')),
            "routing is 'None'; legal is 'rollout', 'recompute' or None$",
        ),
        (changed('grpo', ema=1.5), r'ema=1.5; legal is above 0 and below 1'),
        (changed('sapo', sampling=dict(eos_id=99)), 'eos_id has 99, which is no token'),
        (
            changed('grpo') | dict(router=dict(load_balance=0.1)),
            'for a model without experts',
        ),
        (
            changed('grpo') | dict(logp_old='recomputed', replay=dict(routing='recompute')),
            'for a model without experts',
        ),
        (changed('magistral', algorithm_kw=dict(cache=None)), 'max_length=4 and cache=None'),
        (changed('trpo') | dict(length_buckets=dict(token_budget=80, widths=(10,))), 'legal is'),
    ):
        with pytest.raises(ValueError, match=message):
            recipe.prepare(config)


def test_terms_that_recipes_add():
    """RLOO's KL inside the reward, and a tenth of DAPO's penalty in Magistral's."""
    rollout = po.Rollout(
        tokens=np.zeros((2, 3), np.int32),
        mask=np.array([[0, 1, 1], [0, 1, 0]]),
        length=np.array([3, 2]),
        prompt_length=np.array([1, 1]),
        rewards=np.array([1.0, 0.0], np.float32),
        group=np.zeros(2, np.int32),
        logp_behavior=np.array([[0, -1, -2], [0, -1, 9]], np.float32),
        logp_ref=np.array([[0, -1.5, -2], [0, -0.5, 9]], np.float32),
    )
    shaped = po.algorithms.rloo(beta=0.1).shape(rollout).rewards
    np.testing.assert_allclose(shaped, [1 - 0.1 * 0.5, 0.1 * 0.5], rtol=1e-6)
    assert po.algorithms.rloo().shape(rollout) is rollout
    shaped = po.algorithms.magistral(max_length=3, cache=2).shape(rollout).rewards
    np.testing.assert_allclose(shaped, [1 - 0.1 * 0.5, 0.0], rtol=1e-6)


# ============================================================================ training


def run(config, workdir):
    """Train; the records of each stage by name, and the rows of the last step."""
    result = train.run(train.start(config, workdir), workdir)
    records = metrics.read(workdir / 'metrics.jsonl')
    stages = {
        name: [r for r in records if r['stage'] == name]
        for name in ('value_pretraining', 'rl', 'evaluation', 'result')
    }
    assert [r['step'] for r in stages['rl']] == [1, 2]
    assert [r['step'] for r in stages['evaluation']] == [0, 1, 2]
    assert stages['result'][0]['after'] == result.after.value
    assert not pages.undocumented_of(workdir)
    for record in stages['rl']:
        assert all(v is not None for v in record.values()), record  # all finite
        assert record['skipped'] == 0 and record['update_norm'] > 0
        assert abs(record['kl_behavior/k3']) < 1
    rows = batches.load_batch(workdir / 'batches' / 'batch_000002.npz')
    assert rows['mask'].shape[0] == config['rollout']['prompts'] * config['rollout']['group_size']
    return stages, rows


def watch(monkeypatch):
    """Calls of a run in order, [(name, what it was given or, for adapt, made)], as numpy arrays."""
    calls = []
    make_learner, make_collector = recipe.make_learner, rollout.make_collector
    held_out = evaluate.held_out

    def collector(*args, **kw):
        inner = make_collector(*args, **kw)

        def collect(state, reference, source, key, version=0, **kw):
            seen = dict(policy=state.params, reference=reference, version=version)
            calls.append(('collect', jax.device_get(seen)))
            return inner(state, reference, source, key, version=version, **kw)

        return collect

    def learner(setup):
        inner = make_learner(setup)

        def recompute(params, batch):
            made = inner.recompute(params, batch)
            calls.append(('recompute', np.asarray(made.logp_old)))
            return made

        def update(state, batch):
            calls.append(('update', np.asarray(batch.logp_old)))
            return inner.update(state, batch)

        def adapt(state, found):
            made = inner.adapt(state, found)
            calls.append(('adapt', jax.device_get(made.ema)))
            return made

        return inner._replace(recompute=recompute, update=update, adapt=adapt)

    def accuracy(setup, params, page=None):
        calls.append(('evaluate', jax.device_get(params)))
        return held_out(setup, params, page)

    monkeypatch.setattr(recipe, 'make_learner', learner)
    monkeypatch.setattr(rollout, 'make_collector', collector)
    monkeypatch.setattr(evaluate, 'held_out', accuracy)
    return calls


def given_to(calls, name):
    return [what for called, what in calls if called == name]


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def lock_step(config):
    """The config with the plain sampler and one microbatch, which compile fastest."""
    config['rollout'] |= dict(engine=None, chunks=1)
    config['length_buckets'] = None
    return config


def test_toy_of_deepseek_v32(tmp_path, monkeypatch):
    """Experts, both replays, a reference with syncs, the engine, chunks and length buckets."""
    config = get_config('deepseek_v32')
    assert config['rollout']['chunks'] == 2 and config['reference_every'] == 1
    calls = watch(monkeypatch)
    stages, rows = run(config, tmp_path)
    one, two = given_to(calls, 'collect')
    assert (one['version'], two['version']) == (0, 1)
    assert same(one['reference'], one['policy']) and same(two['reference'], two['policy'])
    assert not same(one['policy'], two['policy'])
    first = stages['rl'][0]
    assert first['moe/replayed'] > 0.5 and first['kl_reference/k3'] >= 0
    ratio = np.abs(rows['logp_new'] - rows['logp_old'])[rows['mask'] > 0]
    assert np.median(ratio) < 0.1 and ratio.max() > 1e-5


@pytest.mark.slow
def test_toy_of_minirl(tmp_path, monkeypatch):
    """Experts that the trainer chose itself are replayed, against recomputed log-probs."""
    config = lock_step(get_config('minirl'))
    calls = watch(monkeypatch)
    stages, rows = run(config, tmp_path)
    # Recomputed before the first update, once for each minibatch, and then fixed.
    step = ['collect', 'recompute', 'recompute', 'update', 'update', 'adapt', 'evaluate']
    assert [name for name, _ in calls][-2 * len(step) :] == step * 2
    assert same(given_to(calls, 'update'), given_to(calls, 'recompute'))
    assert stages['rl'][0]['moe/replayed'] > 0.5
    chosen = rows['mask'] > 0
    np.testing.assert_allclose(rows['logp_old'][chosen], rows['logp_behavior'][chosen], atol=2e-5)
    assert np.any(rows['logp_old'] != rows['logp_behavior'])  # scored again
    first = chosen & (rows['minibatch'][:, None] == 1)
    np.testing.assert_allclose(rows['logp_new'][first], rows['logp_old'][first], atol=2e-5)


def test_toy_of_vapo(tmp_path):
    """A critic of its own, pretrained; decoupled GAE; NLL of right answers."""
    config = lock_step(get_config('vapo'))
    # Whatever two steps say has settled.
    config['critic']['pretrain'] = dict(max_steps=3, window=1, looks=1, tolerance=1e9)
    stages, _ = run(config, tmp_path)
    assert [r['value/settled'] for r in stages['value_pretraining']] == [0, 1]
    assert stages['value_pretraining'][0]['value/loss'] > 0
    for record in (stages['value_pretraining'][0], stages['rl'][0]):
        assert {'value/explained_variance', *(f'value/explained_at/{i}' for i in range(10))} <= {
            *record
        }


@pytest.mark.slow
def test_toy_of_ppo_penalty_with_a_moving_average(tmp_path, monkeypatch):
    """The critic on the policy's trunk, several passes, a controller, averaged parameters."""
    config = get_config('ppo_penalty') | dict(ema=0.5)
    calls = watch(monkeypatch)
    stages, _ = run(config, tmp_path)
    betas = [r['controller/beta'] for r in stages['rl']]
    assert betas[0] == 1 and betas[1] in (0.5, 1, 2)
    averages = given_to(calls, 'adapt')  # once per rollout
    assert len(averages) == 2 and same(given_to(calls, 'evaluate')[-2:], averages)
    assert not same(averages[0], given_to(calls, 'collect')[1]['policy'])
    assert 'value/explained_variance' in stages['rl'][0] and not stages['value_pretraining']


def test_toy_of_dapo(tmp_path):
    """Prompts that are all right or all wrong are drawn again; rewards are 1 and -1."""
    stages, rows = run(lock_step(get_config('dapo')), tmp_path)
    assert max(r['rollout/rounds'] for r in stages['rl']) > 1
    judged = np.isfinite(rows['rewards'])
    for group in set(rows['group'][judged].tolist()):
        right = rows['positive'][judged & (rows['group'] == group)]
        assert 0 < right.mean() < 1
    assert rows['rewards'][judged].min() < 0


@pytest.mark.slow
def test_toy_of_trpo(tmp_path):
    """The natural-gradient step through the same loop."""
    stages, _ = run(get_config('trpo'), tmp_path)
    assert all(0 <= r['trust_region/kl'] <= 0.011 for r in stages['rl'])


@pytest.mark.slow
def test_toy_of_gspo_step(tmp_path):
    """Ratios of segments."""
    stages, _ = run(lock_step(get_config('gspo_step')), tmp_path)
    assert all(np.isfinite(r['grad_norm']) and r['grad_norm'] > 0 for r in stages['rl'])


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted({*NAMES} - {'deepseek_v32', 'trpo'}))  # trained above
def test_toy_of(name, tmp_path):
    config = get_config(name)
    stages, _ = run(config, tmp_path)
    pretrain = (config.get('critic') or {}).get('pretrain')
    assert len(stages['value_pretraining']) == (pretrain['max_steps'] if pretrain else 0)


@pytest.mark.slow
def test_recipe_trains_a_loaded_model(given, tmp_path):
    """Two steps of DeepSeek-V3.2's recipe on a Hugging Face folder and a file, in small."""
    config = get_config('deepseek_v32', given) | dict(steps=2, minibatches=2)
    config['task'] |= dict(prompt_width=10)
    config['sampling'] |= dict(max_new_tokens=6, support_size=16)
    config['length_buckets'] = dict(token_budget=64, widths=(14, 16))
    config['rollout'] |= dict(prompts=4, group_size=2)
    config['rollout']['engine'] = dict(slots=4, prefill_width=8, bucket=16)
    config['evaluation'] |= dict(every=1, batch=16)
    config['optimizer'] |= dict(warmup_steps=0)
    stages, rows = run(config, tmp_path)
    assert stages['rl'][0]['moe/replayed'] > 0.5 and rows['mask'].sum() > 8


# ============================================================================ the command line


def command(*arguments):
    line = [sys.executable, '-m', 'policyopt.train', *arguments]
    return subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ('config', 'flag', 'message'),
    [
        ('quickstart.py:tiny', 'config.optimizer.learning_rat=1', 'Did you mean `learning_rate`'),
        ('quickstart.py:tiny', 'config.optimizr.learning_rate=1', 'Did you mean "optimizer"'),
        (
            'quickstart.py:tiny',
            'config.steps=many',
            "invalid literal for int() with base 10: 'many'",
        ),
        ('grpo.py', 'config.steps=2', 'the config has no model and no data; give'),
    ],
)
def test_wrong_flag_ends_in_one_line(config, flag, message, tmp_path):
    done = command(f'--config=configs/{config}', f'--workdir={tmp_path / "run"}', f'--{flag}')
    assert done.returncode == 1 and not (tmp_path / 'run').exists()
    lines = [line for line in done.stderr.splitlines() if not line.startswith(('I', 'W'))]
    assert len(lines) == 1 and message in lines[0], done.stderr


def test_help_is_true():
    text = command('--help').stdout
    assert '--config' in text and '--workdir' in text
    assert {'configs/quickstart.py', 'configs/grpo.py'} == set(re.findall(r'configs/\w+\.py', text))
    section = re.search(r"--config\.(\w+)='(\{.*?\})'", ' '.join(text.split()))
    config = get_config('grpo') | {section[1]: eval(section[2]), 'microbatches': 1}
    with pytest.raises(
        ValueError, match='must hold a whole row'
    ):  # read, and too short for the toy
        recipe.prepare(config)
