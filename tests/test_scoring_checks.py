"""Records that cannot be replayed are named on the host, with their position."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import scoring


def test_check_routing_names_the_position():
    moe = types.SimpleNamespace(experts=6, top_k=2)
    config = types.SimpleNamespace(moe=moe, kinds=('dense', 'moe', 'moe', 'moe'))
    routing = np.random.default_rng(0).integers(-1, 6, (2, 4, 3, 2)).astype(np.int8)
    batch = types.SimpleNamespace(tokens=np.zeros((2, 4), int), routing=routing)
    scoring.check_routing(batch, config)
    for id_ in (6, -2):
        batch.routing = routing.copy()
        batch.routing[1, 2, 0] = [3, id_]
        batch.routing[1, 3] = id_
        with pytest.raises(
            ValueError, match=rf'row 1, position 2: mixture layer 0 .*\[3, {id_}\].* 2 such'
        ):
            scoring.check_routing(batch, config)
    for wrong, message in (
        (routing[:, :, :2], r'shape \(2, 4, 2, 2\); .* \(2, 4, 3, 2\).* 3 mixture layers'),
        (routing[..., :1], r'shape \(2, 4, 3, 1\).*top_k=2'),
        (routing[:, :3], r'shape \(2, 3, 3, 2\)'),
        (routing.astype(np.float32), 'dtype float32; legal: an integer type'),
    ):
        batch.routing = wrong
        with pytest.raises(ValueError, match=message):
            scoring.check_routing(batch, config)
    with pytest.raises(ValueError, match='no mixture-of-experts layer'):
        scoring.check_routing(batch, types.SimpleNamespace(moe=None))
    scoring.check_routing(types.SimpleNamespace(tokens=batch.tokens, routing=None), config)


def test_check_support_names_the_position():
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    support = np.array([[[1, -1], [2, 9], [3, 0]], [[4, 0], [0, 5], [6, -1]]])
    mask = np.array([[0, 1, 1], [0, 1, 1]])
    batch = types.SimpleNamespace(tokens=tokens, support=support, mask=mask)
    scoring.check_support(batch)
    scoring.check_support(batch, vocab_size=10)
    scoring.check_support(types.SimpleNamespace(tokens=tokens, support=None, mask=mask))
    with pytest.raises(ValueError, match='row 0, position 1: .*outside the vocabulary of 9'):
        scoring.check_support(batch, vocab_size=9)
    for change, message in (
        ([6, 7], r'row 1, position 1: the taken token is not in its support. Token 5, .*\[6, 7\]'),
        ([5, 5], 'row 1, position 1: the support names a token twice'),
        ([-1, -1], 'row 1, position 1: the taken token is not in its support'),
    ):
        batch.support = support.copy()
        batch.support[1, 1] = change
        with pytest.raises(ValueError, match=message):
            scoring.check_support(batch)
        batch.mask = mask * [[1, 1, 1], [1, 0, 1]]  # off the mask nothing is asked
        scoring.check_support(batch)
        batch.mask = mask


def test_check_reference_names_the_position():
    logp = np.array([[0.0, -1.0, -np.inf], [-np.inf, -2.0, np.nan]])
    scoring.check_reference(logp, np.array([[1, 1, 0], [0, 1, 0]]))
    with pytest.raises(ValueError, match='row 0, position 2: .*logp_ref=-inf.* 2 such positions'):
        scoring.check_reference(logp, np.array([[1, 1, 1], [0, 1, 1]]))
    with pytest.raises(ValueError, match='row 1, position 2: .*logp_ref=nan'):
        scoring.check_reference(jnp.asarray(logp), jnp.array([[1, 1, 0], [0, 1, 1]]))
