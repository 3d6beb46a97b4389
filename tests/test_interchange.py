"""Rollouts as files: what is written is what is read, and what doesn't line up is refused."""

import base64
import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import policyopt as po
from policyopt import interchange, learner, models, packing, rollout, scoring
from policyopt.sampling import SamplingConfig, sample
from policyopt.types import Estimates
from tests.learning import none
from tests.test_sharding import CONFIG

MODEL = models.build(CONFIG)
DENSE = dataclasses.replace(CONFIG, moe=None, expert_dim=0, moe_layers=None)
LAYERS, TOP_K = CONFIG.kinds.count('moe'), CONFIG.moe.top_k


@pytest.fixture(scope='module')
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope='module')
def drawn(params):
    """Eight answers of a mixture of experts, from the three most probable tokens."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [2]] * 2
    config = SamplingConfig(max_new_tokens=5, top_k=3, eos_id=1)
    found = jax.device_get(sample(MODEL, params, prompts, jax.random.key(1), config))
    rewards = np.array([0, 1, math.nan, 0.5, 1, 0, 0, 2], np.float32)
    group = np.arange(8, dtype=np.int32) % 4
    return dataclasses.replace(
        found,
        rewards=rewards,
        group=group,
        version=np.where(found.mask > 0, 3, -1).astype(np.int32),
    )


@pytest.fixture(scope='module')
def row(drawn):
    """The row of the longest prompt, as JSON has it."""
    rows = list(interchange.to_rows(drawn))
    return json.loads(json.dumps({k: packing.packed(v) for k, v in rows[2].items()}))


FIELDS = ('tokens', 'mask', 'length', 'prompt_length', 'rewards', 'group', 'logp_behavior')
FIELDS += ('truncated', 'finish', 'routing', 'version')


@pytest.mark.parametrize('suffix', interchange.SUFFIXES)
def test_what_is_written_is_read(suffix, drawn, tmp_path):
    path = tmp_path / f'rows{suffix}'
    assert interchange.write(path, interchange.to_rows(drawn)) == 8
    again = interchange.to_rollout(interchange.read(path), CONFIG, width=drawn.tokens.shape[1])
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(again, name), getattr(drawn, name), err_msg=name)
    np.testing.assert_array_equal(np.sort(again.support), np.sort(drawn.support))
    assert again.segment is None and again.routing.dtype == drawn.routing.dtype


@pytest.mark.slow
def test_a_rollout_from_elsewhere_trains_with_replay(drawn, params, tmp_path):
    """The same update as on the rollout itself, and a first ratio of 1."""
    path = tmp_path / 'rows.jsonl'
    interchange.write(path, interchange.to_rows(drawn))
    again = interchange.to_rollout(interchange.read(path), CONFIG, width=drawn.tokens.shape[1])
    algorithm = po.algorithms.reinforce()
    optimizer = learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-3))
    learn = learner.make_learner(MODEL, algorithm, optimizer, diagnose=none)
    ends = []
    for rows in (drawn, again):
        judged = np.isfinite(rows.rewards)
        rows = jax.tree.map(lambda x, judged=judged: x[judged], rows)
        rows = dataclasses.replace(rows, segment=None)
        estimates = Estimates(*algorithm.advantages(rows))
        batch = rollout.to_batch(rows, *estimates)
        state, _, logp_new = learn.update(
            learn.init(jax.tree.map(np.copy, params), jax.random.key(2)), batch
        )
        on = rows.mask > 0
        np.testing.assert_allclose(logp_new[on], rows.logp_behavior[on], atol=2e-6)
        ends.append(jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *ends)


def test_bare_base64_is_what_serving_engines_return(row, drawn):
    experts = packing.unpacked(row['routed_experts']).astype('<i4')
    bare = base64.b64encode(experts.tobytes()).decode()
    again = interchange.to_rollout([{**row, 'routed_experts': bare}], CONFIG)
    np.testing.assert_array_equal(again.routing[0], drawn.routing[2][: again.tokens.shape[1]])


def test_observations_are_off_the_mask(row):
    """Their log-probs and kept sets do not count, and may be empty."""
    count = len(packing.unpacked(row['ids']))
    mask = [1] + [0] * (count - 1)
    kept, offsets = [packing.unpacked(row[f'kept_{n}']) for n in ('ids', 'offsets')]
    changed = {
        **row,
        'mask': mask,
        'logprobs': [packing.unpacked(row['logprobs'])[0], *[math.nan] * (count - 1)],
        'kept_ids': kept[: offsets[1]],
        'kept_offsets': [0] + [int(offsets[1])] * count,
    }
    again = interchange.to_rollout([changed], CONFIG)
    assert again.mask.sum() == 1 and (again.support >= 0).any(-1).sum() == 1
    (back,) = interchange.to_rows(again)
    np.testing.assert_array_equal(back['mask'], mask)


def experts(row, change):
    return {'routed_experts': change(packing.unpacked(row['routed_experts']))}


WRONG = {
    'no number': (lambda r: {'reward': 'n/a'}, "reward is 'n/a'; legal is a finite number"),
    'infinite reward': (lambda r: {'reward': math.inf}, 'reward is inf'),
    'text as group': (lambda r: {'group': 'a'}, "group is 'a'; legal is a number from 0"),
    'part of a group': (lambda r: {'group': 1.5}, 'group is 1.5'),
    'half a mask': (lambda r: {'mask': [0.5] * 5}, 'mask is 0.5 to 0.5; legal is 0 or 1'),
    'wide version': (lambda r: {'version': 2**40}, 'version is 1099511627776; legal is -1 to'),
    'part of an expert': (lambda r: experts(r, lambda x: x + 0.5), 'routed_experts is of float64'),
    'part of an id': (lambda r: {'kept_ids': [1.5]}, 'kept_ids is of float64; legal is whole'),
    'unsigned offsets': (
        lambda r: {
            'kept_offsets': {
                'dtype': 'uint32',
                'shape': [6],
                'base64': base64.b64encode(np.array([0, 5, 2, 3, 4, 15], '<u4').tobytes()).decode(),
            }
        },
        'kept_offsets is 0 ... 15',
    ),
    'unknown': (lambda r: {'log_probs': []}, "'log_probs' is unknown.*`logprobs`"),
    'missing': (lambda r: {'group': ...}, "'group' is missing"),
    'vocabulary': (lambda r: {'ids': [0, CONFIG.vocab_size]}, f'0 to {CONFIG.vocab_size - 1}'),
    'no answer': (lambda r: {'ids': []}, 'one token id or more'),
    'prompt in logprobs': (
        lambda r: {'logprobs': [0.0] * 4 + list(packing.unpacked(r['logprobs']))},
        'one for each of ids: these cover the prompt, too',
    ),
    'positive logprobs': (
        lambda r: {'logprobs': -packing.unpacked(r['logprobs']) + 1},
        'logprobs is not finite or above 0',
    ),
    'finish': (lambda r: {'finish': 'stopped'}, "finish is 'stopped'; legal is .*eos.*length"),
    'experts of the last token': (
        lambda r: experts(r, lambda x: np.concatenate([x, x[-1:]])),
        'the last token was never fed',
    ),
    'experts of the answer': (
        lambda r: experts(r, lambda x: x[4:]),
        r'those of the prompt are missing \(offset 0',
    ),
    'experts cut': (lambda r: experts(r, lambda x: x[:-1]), 'routed_experts is of . tokens'),
    'layers': (lambda r: experts(r, lambda x: x[:, :-1]), f'the {LAYERS} mixture layers'),
    'top_k': (lambda r: experts(r, lambda x: x[..., :1]), f'top_k={TOP_K}'),
    'no expert': (lambda r: experts(r, lambda x: x + CONFIG.moe.experts), 'legal is 0 to'),
    'twice': (lambda r: experts(r, lambda x: x * 0), 'an expert twice'),
    'no dtype': (lambda r: {'routed_experts': {'shape': [1]}}, 'base64 with dtype and shape'),
    'offsets': (
        lambda r: {'kept_offsets': packing.unpacked(r['kept_offsets'])[:-1]},
        'kept_offsets is of shape',
    ),
    'offsets end': (
        lambda r: {'kept_ids': packing.unpacked(r['kept_ids'])[:-1]},
        'increasing from 0 to',
    ),
    'shifted by one': (
        lambda r: {'kept_ids': np.roll(packing.unpacked(r['kept_ids']), 3)},
        r'without the token drawn at token \d',
    ),
    'offsets alone': (lambda r: {'kept_ids': None}, 'both or none'),
    'all masked': (lambda r: {'mask': [0] * len(packing.unpacked(r['ids']))}, 'mask is all 0'),
}


@pytest.mark.parametrize('name', WRONG)
def test_what_does_not_line_up_is_refused(name, row):
    change, message = WRONG[name]
    changed = {k: v for k, v in {**row, **change(row)}.items() if v is not ...}
    with pytest.raises(interchange.InterchangeError, match=message) as error:
        interchange.to_rollout([row, changed], CONFIG, name='rows.jsonl')
    assert 'rows.jsonl, row 1' in str(error.value)


def test_rows_agree_on_what_they_have(row):
    with pytest.raises(interchange.InterchangeError, match='row 1: it has no routed_experts'):
        bare = {k: v for k, v in row.items() if k != 'routed_experts'}
        interchange.to_rollout([row, bare], CONFIG)
    with pytest.raises(interchange.InterchangeError, match='legal is none: the model is dense'):
        interchange.to_rollout([row], DENSE)
    with pytest.raises(interchange.InterchangeError, match='legal is up to 5'):
        interchange.to_rollout([row], CONFIG, width=5)
    with pytest.raises(interchange.InterchangeError, match='there is no row'):
        interchange.to_rollout([], CONFIG)


def test_files_that_are_none(tmp_path, capsys):
    for name, text, message in (
        ('a.txt', '', r'names that end in .jsonl or .array_record'),
        ('none.jsonl', None, 'can not be read'),
        ('none.array_record', None, 'can not be read'),
        ('half.jsonl', '{"ids": [1', 'row 0: it is no JSON'),
        ('list.jsonl', '[1]', 'row 0: it is no JSON object'),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(interchange.InterchangeError, match=message):
            interchange.read(tmp_path / name)
    assert interchange.main([str(tmp_path / 'half.jsonl'), str(tmp_path / 'b.jsonl')]) == 2
    assert 'row 0' in capsys.readouterr().err and not (tmp_path / 'b.jsonl').exists()


def test_a_saved_minibatch_becomes_rows(drawn, tmp_path, capsys):
    source, target = tmp_path / 'update_000001_1.npz', tmp_path / 'rows.array_record'
    batch = rollout.to_batch(drawn, np.zeros_like(drawn.mask))
    origin = po.batches.Origin(1, 1, 1, None, {}, {})
    po.batches.save_minibatch(source, origin, logp_new=batch.logp_old, **vars(batch))
    assert interchange.main([str(source), str(target)]) == 0
    assert '8 rows' in capsys.readouterr().out
    again = interchange.to_rollout(interchange.read(target), CONFIG, width=drawn.tokens.shape[1])
    np.testing.assert_array_equal(again.tokens, drawn.tokens)
    scoring.check_support(again, CONFIG.vocab_size)
    scoring.check_routing(again, CONFIG)
