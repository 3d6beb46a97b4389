"""What the steps of the RL stage share, and the points between them that are saved and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from policyopt import base, data, evaluate, hosts, profiling, recipe, stopping
from policyopt import rollout as rollout_lib
from policyopt import workdir as workdir_lib
from policyopt.checkpoint import Checkpoints, Progress
from policyopt.learner import Learner, TrainState
from policyopt.recipe import Setup
from policyopt.reference import Reference, make_reference
from policyopt.rewards import Ledger, Page
from policyopt.state import kept, merged
from policyopt.stream import Stream
from policyopt.workdir import RECORDS, SAMPLES, TIMINGS


class Loop(NamedTuple):
    """What the steps of the RL stage share.

    Attributes:
      learner, collect: of the run.
      source: batches of problems.
      workdir: folder of the run.
      checkpoints: of the run; None where the config wants none.
      stop: whether the process was asked to end.
      save_batches: RL steps whose minibatches are saved.
      profile: which steps are traced.
      ledger: of verdicts; None where there are no checkpoints to go on from.
      stream: of answers that are drawn ahead; None where the config is not asynchronous.
    """

    learner: Learner
    collect: rollout_lib.Collect
    source: Iterator[list[data.Item]]
    workdir: Path
    checkpoints: Checkpoints | None
    stop: stopping.Stop
    save_batches: Sequence[int] = ()
    profile: profiling.Profile | None = None
    ledger: Ledger | None = None
    stream: Stream | None = None

    def page(self, stage: str, number: int, step: int) -> Page | None:
        """Where the verdicts of a stage's step are, which is done again with RL step `step`."""
        return self.ledger and self.ledger.page(stage, number, step)

    @property
    def records(self) -> Path:
        """File of results."""
        return self.workdir / RECORDS

    @property
    def timings(self) -> Path:
        """File of wall-clock figures."""
        return self.workdir / TIMINGS

    @property
    def samples(self) -> Path:
        """File of answers to held-out problems."""
        return self.workdir / SAMPLES


class Point(NamedTuple):
    """Where the RL stage stands.

    Attributes:
      state: of the learner.
      reference: the reference policy; None where no term reads one.
      step: RL steps done.
      skipped: skipped updates in a row.
      before: held-out accuracy at the start of the stage.
      warm_steps: steps of the warm start.
      base: what the adapters belong to, see `base.base_of`; None without adapters.
    """

    state: TrainState
    reference: Reference | None
    step: int
    skipped: int
    before: evaluate.Accuracy
    warm_steps: int
    base: dict[str, Any] | None = None


def make_loop(
    setup: Setup,
    workdir: Path,
    checkpoints: Checkpoints | None,
    stop: stopping.Stop,
    save_batches: Sequence[int] = (),
    profile: profiling.Profile | None = None,
) -> Loop:
    """Build what the steps of the RL stage share."""
    c = setup.config
    learner = recipe.make_learner(setup)
    replay = [name for name in ('support', 'routing') if getattr(c.replay, name)]
    collect = rollout_lib.make_collector(
        setup.model,
        setup.algorithm,
        setup.judge,
        c.rollout,
        c.sampling,
        setup.task.prompt_width,
        values=learner.values,
        replay=replay,
    )
    source = data.batches(setup.task.train, c.rollout.prompts, c.seed + 1)
    ledger = None if checkpoints is None else Ledger(checkpoints.workdir)
    stream = None
    if c.asynchronous is not None:
        stream = Stream(
            setup.model,
            c.rollout,
            c.sampling,
            setup.task.prompt_width,
            setup.judge,
            c.asynchronous,
            setup.generators,
            ledger,
        )
    shared = (learner, collect, source, workdir, checkpoints, stop, save_batches, profile)
    return Loop(*shared, ledger, stream)


def new_point(
    setup: Setup, loop: Loop, params: Any, before: evaluate.Accuracy, warm_steps: int
) -> Point:
    """The start of the RL stage."""
    c = setup.config
    reference = make_reference(
        params, c.reference_every, 'logp_ref' in setup.needed, fresh=warm_steps == 0
    )
    critic = recipe.critic_params(setup, params)
    state = loop.learner.init(params, jax.random.key(c.seed + 1), critic)
    belongs = base.base_of(setup.model, c.model.get('path'), params)
    return Point(state, reference, 0, 0, before, warm_steps, belongs)


def save(loop: Loop, point: Point) -> None:
    """Save a point, and how far its metrics and problems have come."""
    if loop.checkpoints is None:
        return
    notes: dict[str, Any] = {'before': point.before, 'warm_steps': point.warm_steps}
    if point.base is not None:
        notes['base'] = point.base
    notes['samples'] = workdir_lib.position(loop.samples)
    rollouts = None
    if loop.stream is not None:
        rollouts, notes['stream'] = loop.stream.save()
    progress = Progress(
        step=point.step,
        source=loop.source.get_state(),  # type: ignore[attr-defined]
        records=workdir_lib.position(loop.records),
        skipped=point.skipped,
        notes=notes,
    )
    held = point.reference and point.reference.params
    loop.checkpoints.save(kept(point.state), held, progress, rollouts)
    if loop.ledger is not None and (whole := loop.checkpoints.steps()):
        loop.ledger.prune(whole[0])


def resume(setup: Setup, loop: Loop) -> Point:
    """The point of the last usable checkpoint; metrics and problems go back to it."""
    assert loop.checkpoints is not None

    # Whether there was a warm start decides what the reference of adapters holds.
    warm = int(setup.config.warm_start is not None)
    point = new_point(setup, loop, recipe.first_params(setup), evaluate.Accuracy(0, 0), warm)
    held = point.reference and point.reference.params
    saved = loop.checkpoints.restore(lambda: (kept(point.state), held))
    progress = saved.progress
    base.check_base(loop.workdir, progress.notes, point.base)
    hosts.by_first(lambda: _cut(loop, progress))
    if loop.stream is not None:
        rollouts, notes = saved.rollouts or {}, progress.notes['stream']
        loop.stream.restore(rollouts, notes, loop.source, point.state.key)
    loop.source.set_state(progress.source)  # type: ignore[attr-defined]
    reference = point.reference and dataclasses.replace(point.reference, params=saved.reference)
    params = merged(point.state.params, saved.train.params)
    state = dataclasses.replace(saved.train, params=params)
    correct, total, *lists = progress.notes['before']
    before = evaluate.Accuracy(correct, total, *map(tuple, lists))
    print(f'resumed after RL step {progress.step} of {setup.config.steps}', flush=True)
    warm_steps = progress.notes['warm_steps']
    return Point(state, reference, progress.step, progress.skipped, before, warm_steps, point.base)


def _cut(loop: Loop, progress: Progress) -> None:
    """Cut the files of results to what a checkpoint knows of."""
    workdir_lib.cut(loop.records, progress.records)
    workdir_lib.cut(loop.samples, progress.notes.get('samples', 0))
