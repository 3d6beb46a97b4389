"""Length and reward of answers over the plane in which a short run moved the parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import flatten_util

from configs import long_answers
from experiments import policies
from experiments.claim import Claim, Place, Verdict, decide, interval, spread, together
from policyopt import loop as loop_lib
from policyopt import recipe, reinforce, stopping

STEPS, RATE = 8, 5e-4
SIDE = 5  # points of a side of the plane
EXPLAINED, CHANGE = 0.5, 0.1  # what a direction of length is asked for


def config(place: Place) -> dict[str, Any]:
    """Short walks, 20 characters and an end, of which a policy that learnt little writes some
    too short or too long; room for half as many again."""
    c = long_answers.get_config('without=pretraining' + ',tiny=true' * place.fast)
    c.seed = place.seed
    c.task.update(kw=dict(blocks=6, steps=4, begun=2, reach=12), size=4000, held_out=128)
    c.algorithm, c.algorithm_kw, c.critic = 'policyopt.algorithms.grpo', dict(beta=0.0), None
    c.sampling = dict(max_new_tokens=32, temperature=1.0)
    c.rollout = dict(prompts=16, group_size=8)
    c.minibatches, c.optimizer = 4, dict(learning_rate=RATE, warmup_steps=0)
    c.evaluation = dict(every=10**6, batch=128, temperature=1.0, samples=0)
    c.checkpoint = dict(every=0)
    if not place.fast:
        c.warm_start.update(every=20, accuracy=(0.2, 0.5))
    return c.to_dict()


def measure(place: Place) -> dict[str, Any]:
    """Mean length and reward of 128 answers at each point of two planes through the last policy.

    One plane is that of the first two principal components of the policies after each RL step, the
    other has random directions; both reach as far from the last policy as the run came.
    """
    setup = recipe.prepare(config(place))
    params = recipe.first_params(setup) if place.fast else policies.warm(setup, place)
    loop = loop_lib.make_loop(setup, place.folder, None, stopping.Stop())
    point = loop_lib.new_point(setup, loop, params, None, 1)
    flat, back = flatten_util.ravel_pytree(jax.device_get(params))
    key = jax.random.fold_in(point.state.key, 10**6)
    path, run = [np.asarray(flat)], []
    for step in range(1, 1 + (2 if place.fast else STEPS)):
        done = reinforce.rl_step(setup, loop, point, step)
        point = point._replace(state=done.state, step=step)
        path.append(np.asarray(flatten_util.ravel_pytree(jax.device_get(done.state.params))[0]))
        run.append([done.values['length'], done.values['reward']])
    axes, share = components(np.stack(path))
    reach = float(np.linalg.norm(path[-1] - path[0]))
    noise = np.linalg.qr(np.random.default_rng(place.seed).normal(size=axes.T.shape))[0].T
    items = next(loop.source)
    out: dict[str, Any] = {'run': run, 'share': share, 'reach': reach}
    for name, plane in (('components', axes), ('random', noise.astype(np.float32))):
        found = []
        for a, b in grid(2 if place.fast else SIDE):
            moved = back(path[-1] + np.float32(reach) * (a * plane[0] + b * plane[1]))
            state = dataclasses.replace(point.state, params=moved)
            values = loop.collect(state, None, iter([items]), key).metrics
            found.append([values['length'], values['reward']])
        out[name] = found
    centred = (np.stack(path) - path[-1]) @ axes.T / (reach or 1.0)
    out['path'] = centred.tolist()
    return out


def components(path: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """First two principal components of points [n,P]: [2,P], and their shares of the variance."""
    centred = path - path.mean(0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    return axes[:2], (sizes[:2] ** 2 / np.sum(sizes**2)).tolist()


def grid(side: int) -> list[tuple[float, float]]:
    """Points of a square of side 2 about 0."""
    x = np.linspace(-1, 1, side)
    return [(float(a), float(b)) for a in x for b in x]


def linear(found: Any) -> tuple[float, float]:
    """R^2 of length, linear in the plane, and its change along the slope over mean: side to side.

    found [side^2, 2] of lengths and rewards; both 0 where all lengths are equal.
    """
    length = np.asarray(found, np.float64)[:, 0]
    at = np.array(grid(round(len(length) ** 0.5)))
    slope = np.linalg.lstsq(np.c_[at, np.ones(len(at))], length, rcond=None)[0]
    left = length - np.c_[at, np.ones(len(at))] @ slope
    whole = ((length - length.mean()) ** 2).sum()
    if not whole:
        return 0.0, 0.0
    return float(1 - (left**2).sum() / whole), float(2 * np.hypot(*slope[:2]) / length.mean())


def correlation(found: Any) -> float:
    """Correlation of length and reward over the points of a plane; 0 where one is all equal."""
    found = np.asarray(found, np.float64)
    return float(np.corrcoef(found.T)[0, 1]) if np.all(found.std(0) > 0) else 0.0


def judge(seeds: list[Any]) -> Verdict:
    fits = {n: np.array([linear(s[n]) for s in seeds]) for n in ('components', 'random')}
    value, found = interval(fits['components'][:, 0])
    change, changes = interval(fits['components'][:, 1])
    run = spread(seeds, 'run')
    share = spread(seeds, 'share').sum(1).mean()
    reward = np.array([correlation(s['components']) for s in seeds])
    return Verdict(
        together(decide(*found, EXPLAINED), decide(*changes, CHANGE)),
        'R^2 of mean length, linear over the plane of two principal components',
        value,
        found,
        f'Over {STEPS} RL steps on walks of 21 tokens length went from {run[:, 0, 0].mean():.2f} '
        f'to {run[:, -1, 0].mean():.2f} and reward from {run[:, 0, 1].mean():.2f} to '
        f'{run[:, -1, 1].mean():.2f}; two components have {share:.0%} of '
        'the variance of the parameters. In their plane, as far about the last policy as the '
        f'run came, length is linear with an R^2 of {value:.2f} ({EXPLAINED:g} was asked) and '
        f'changes by {change:.1%} [{changes[0]:.1%}, {changes[1]:.1%}] of itself from side to side '
        f'({CHANGE:.0%} was asked), in a random plane by {fits["random"][:, 1].mean():.1%} with an '
        f'R^2 of {fits["random"][:, 0].mean():.2f}. Length and reward correlate by '
        f'{reward.mean():.2f} over the plane. The form of a right answer fixes its length '
        'here, so that length means errors of form, not longer reasoning.',
    )


def turned(numbers: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Points of a plane as [side,side,2] and the run's path in that of components, [steps,2].

    Signs of components are arbitrary: here the run begins to the left, and goes below.
    """
    path = np.array(numbers['path'])
    found = np.array(numbers[name])
    side = round(len(found) ** 0.5)
    found = found.reshape(side, side, 2)
    for axis, ahead in enumerate((path[0, 0] > 0, path[:, 1].mean() > 0)):
        if ahead:
            path[:, axis] *= -1
            found = np.flip(found, axis)
    return found, path


def draw(figure: Any, seeds: list[Any]) -> None:
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for i, name in enumerate(('components', 'random')):
        found, paths = zip(*(turned(numbers, name) for numbers in seeds), strict=True)
        for axis, values, label in zip(
            panels[i], np.moveaxis(np.mean(found, axis=0), 2, 0), ('length', 'reward'), strict=True
        ):
            extent = (-1.25, 1.25, -1.25, 1.25)  # points are in the middle of a cell
            image = axis.imshow(values.T, origin='lower', extent=extent, aspect='auto')
            figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
            axis.set_title(f'{label}, {name}', fontsize=8)
            axis.tick_params(labelsize=7)
            for path in paths if name == 'components' else ():
                axis.plot(*path.T, color='white', lw=0.8, alpha=0.8)


CLAIM = Claim(
    text='One direction in weight space carries the length of answers.',
    source='2506.10910',
    published='a direction of length in the plane of two components',
    minutes=1.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
