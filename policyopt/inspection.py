"""A saved minibatch taken apart: its loss by token and part, gradient shares, and what is unusual.

The log-probs are computed anew where a checkpoint holds just the parameters that the update saw,
and are those of the file otherwise. The loss is the run's own: its parts by
`LossTransform.explain`, and

    share_t = |d loss / d logp_new_t| / sum over tokens of the same

by differentiating `LossTransform.apply`, so that it holds for any composition. Entropy bonus, value
loss and router losses reach the parameters by other ways than logp_new and have no share.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import (
    batches,
    checkpoint,
    masked,
    microbatches,
    policy,
    recipe,
    scoring,
    settings,
    sharding,
    state,
    unusual,
)
from policyopt import critic as critic_lib
from policyopt.losses import compose
from policyopt.sampling import allowed_mask
from policyopt.state import Both, TrainState, both_of
from policyopt.types import Algorithm, Scores, Terms, TokenBatch
from policyopt.updates import loss_inputs
from policyopt.workdir import SETTINGS


class InspectError(ValueError):
    """A minibatch that can't be looked at; the message says why, and what to do."""


class LogProbs(NamedTuple):
    """Where logp_new comes from.

    Attributes:
      source: 'recomputed', 'recorded' or 'missing'.
      checkpoint: step of the checkpoint that was looked at, None without one.
      gap: largest difference to those recorded, where both are finite; None without either.
      text: the same in words.
    """

    source: str
    checkpoint: int | None
    gap: float | None
    text: str


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A minibatch taken apart; arrays are numpy's, [B,T] unless said otherwise.

    Attributes:
      path, workdir: of the file and of its run.
      origin: where the minibatch comes from.
      setup: the run's.
      batch: the minibatch, after the algorithm's `prepare`.
      logp_new: what the loss is taken at.
      logp: where that comes from.
      log_ratio: the algorithm's own; logp_new - logp_old where its loss does not say.
      ratio: exp of it.
      loss: of the whole minibatch, without router losses.
      slope: d loss / d logp_new.
      share: |slope| over its sum; NaN where that is, which the sum leaves out.
      terms: name -> Terms of the loss; {} where it does not say.
      nonfinite: fields with numbers that are not finite, in the order in which they are computed.
      marks: name -> bool, see unusual.TOKEN_MARKS.
      row_marks: name -> [B] bool, see unusual.ROW_MARKS.
      notes: what else to know.
    """

    path: Path
    workdir: Path
    origin: batches.Origin
    setup: recipe.Setup
    batch: TokenBatch
    logp_new: np.ndarray
    logp: LogProbs
    log_ratio: np.ndarray
    ratio: np.ndarray
    loss: float
    slope: np.ndarray
    share: np.ndarray
    terms: dict[str, Terms]
    nonfinite: tuple[unusual.NonFinite, ...]
    marks: dict[str, np.ndarray]
    row_marks: dict[str, np.ndarray]
    notes: tuple[str, ...]

    @property
    def mask(self) -> np.ndarray:
        """Tokens that the loss is about: bool."""
        return np.asarray(self.batch.mask) != 0


def load(path: Path, workdir: Path | None = None) -> Inspection:
    """Take a minibatch apart that `policyopt.train` saved.

    Args:
      path: batches/update_*.npz or batches/offending_*.npz of a run's folder.
      workdir: that folder, where the file lies elsewhere.

    Raises:
      batches.BatchError: a file that is not there, not whole or of another kind.
      InspectError: no run beside it, or another one.
      ValueError, TypeError: a config that no longer describes a run.
    """
    arrays, origin = batches.load_minibatch(path)
    workdir = workdir or path.resolve().parent.parent
    setup = _setup(path, workdir, origin)
    recorded = arrays.pop('logp_new', None)
    fields = {f.name for f in dataclasses.fields(TokenBatch)}  # type: ignore[arg-type]
    known: dict[str, Any] = {name: x for name, x in arrays.items() if name in fields}
    batch = TokenBatch(**known)
    notes: list[str] = []
    scores, logp = _scores(setup, workdir, origin, batch, recorded, notes)
    batch, scores = _filled(setup, batch, scores, notes)
    found = decompose(setup.algorithm, batch, scores, origin.controllers)
    return examine(path, workdir, origin, setup, batch, logp, found, tuple(notes))


def _setup(path: Path, workdir: Path, origin: batches.Origin) -> recipe.Setup:
    """What the run of a minibatch uses; InspectError where the folder is not its run's."""
    file = workdir / SETTINGS
    if not file.is_file():
        raise InspectError(
            f'{path}: there is no {SETTINGS} in {workdir}; name the folder of its run by --workdir'
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise InspectError(f'{file}: not a readable config ({error})') from None
    setup = recipe.prepare(config)
    changed = settings.differences(origin.config, settings.flat(setup.config))
    if broken := [x for x in changed if checkpoint.breaks(x)]:
        more = f' and {len(broken) - 1} more' if len(broken) > 1 else ''
        raise InspectError(
            f'{path} is of another run than {workdir}: its {broken[0]}{more}; name the folder of '
            'its run by --workdir'
        )
    return setup


# ============================================================================ log-probs


def _scores(
    setup: recipe.Setup,
    workdir: Path,
    origin: batches.Origin,
    batch: TokenBatch,
    recorded: Any,
    notes: list[str],
) -> tuple[Scores, LogProbs]:
    """Scores of the minibatch, and where logp_new comes from."""
    saved = policy.steps_of(workdir)
    step = max((s for s in saved if s < origin.step), default=min(saved, default=None))
    scores = None
    if step is not None:
        try:
            train = jax.device_get(policy.read(workdir, setup, step)[0])
        except checkpoint.CheckpointError as error:
            notes.append(f'the checkpoint of step {step} is not usable: {error}')
        else:
            seen = checkpoint.fingerprint(train.params)
            if setup.model.adapters is not None:  # checkpoints hold them alone
                whole = state.merged(recipe.first_params(setup), train.params)
                train = dataclasses.replace(train, params=whole)
            scores = rescored(setup, train, batch)
            if seen == origin.params:
                return scores, _recomputed(step, scores, batch, recorded)
    kind, what = 'recorded', 'as recorded in the file'
    if recorded is None:
        kind, what = 'missing', 'none recorded'
        recorded = np.full(batch.mask.shape, np.nan, np.float32)
    here = f'that of step {step} has others' if scores else 'there is none to be used'
    why = f'no checkpoint holds the parameters that the update saw ({here})'
    if origin.params is None:
        why = 'which parameters the update saw is not known: later ones of its step moved them'
    text = f'{what}; {why}'
    if scores is not None:
        other = sorted(setup.needed & {'entropy', 'values'})
        if other:
            notes.append(f'{" and ".join(other)}: of the checkpoint of step {step}, not recorded')
        scores = dataclasses.replace(scores, logp_new=recorded)
        return scores, LogProbs(kind, step, None, text)
    return Scores(logp_new=recorded), LogProbs(kind, None, None, text)


def _recomputed(
    step: int, scores: Scores, batch: TokenBatch, recorded: np.ndarray | None
) -> LogProbs:
    text = f'computed from the checkpoint of step {step}, whose parameters are those it saw'
    if recorded is None:
        return LogProbs('recomputed', step, None, text)
    mask = np.asarray(batch.mask) != 0
    finite = [np.isfinite(x) for x in (scores.logp_new, recorded)]
    both = mask & finite[0] & finite[1]
    gap = float(np.max(np.abs(scores.logp_new - recorded), where=both, initial=0))
    text += f'; those recorded differ by {gap:.2g} at most' if gap else '; those recorded are equal'
    if apart := int(np.sum(mask & (finite[0] != finite[1]))):
        text += f', and at {apart} tokens one is finite and the other is not'
    return LogProbs('recomputed', step, gap, text)


def rescored(setup: recipe.Setup, state: TrainState, batch: TokenBatch) -> Scores:
    """Scores [B,T] of a minibatch, as the run's learner computes them, in the run's microbatches.

    Args:
      setup: the run's.
      state: of its learner, with the parameters of the policy and of a critic's own trunk.
      batch: the minibatch.
    """
    c, model = setup.config, setup.model
    score = functools.partial(
        scoring.score,
        model,
        temperature=c.sampling.temperature,
        allowed=allowed_mask(c.sampling, model.config.vocab_size),
    )

    def look(params: Both, part: TokenBatch) -> Scores:
        scores = score(params.policy, part)
        if setup.critic_model is None:
            return scores
        values = critic_lib.batch_values(setup.critic_model, params.critic, part)
        return dataclasses.replace(scores, values=values)

    rules = getattr(model, 'rules', sharding.DEFAULT_RULES)
    if c.length_buckets is None:
        run = microbatches.mapped(look, c.microbatches, rules)
    else:
        run = microbatches.bucket_mapped(look, c.length_buckets, rules)
    return jax.device_get(run(both_of(state), batch))


def _filled(
    setup: recipe.Setup, batch: TokenBatch, scores: Scores, notes: list[str]
) -> tuple[TokenBatch, Scores]:
    """NaN for what the loss reads and nobody has, so that the rest can be looked at."""
    nan = np.full(batch.mask.shape, np.nan, np.float32)
    needed = compose.required_inputs(setup.algorithm.loss, _coefficients(setup.algorithm))
    holders = {name: scores if name in ('entropy', 'values') else batch for name in sorted(needed)}
    missing = [name for name, holder in holders.items() if getattr(holder, name) is None]
    if missing:
        notes.append(f'not recorded, and NaN here: {", ".join(missing)}')
    filled: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for name in missing:
        value = np.zeros(nan.shape, np.int32) if name == 'segment' else nan
        filled[holders[name] is scores][name] = value
    return dataclasses.replace(batch, **filled[False]), dataclasses.replace(scores, **filled[True])


def _coefficients(algorithm: Algorithm) -> dict[str, Any]:
    return {name: controller.init for name, controller in algorithm.controllers.items()}


# ============================================================================ the loss


class Decomposition(NamedTuple):
    """A minibatch after `prepare`, its scores, and its loss by token; see Inspection."""

    batch: TokenBatch
    scores: Scores
    loss: Any
    slope: Any
    terms: dict[str, Terms]


def decompose(
    algorithm: Algorithm, batch: TokenBatch, scores: Scores, controllers: Mapping[str, float]
) -> Decomposition:
    """The loss of a minibatch as the learner takes it, its slope in logp_new, and its terms.

    Args:
      algorithm: of the run.
      batch: a whole minibatch, arrays [B,T] and [B].
      scores: of its tokens.
      controllers: name -> value of each controller of the algorithm.

    Returns numpy arrays.
    """

    @jax.jit
    def run(batch: TokenBatch, scores: Scores, coefficients: Mapping[str, Any]) -> Decomposition:
        batch = algorithm.prepare(batch)
        weights = algorithm.loss.weigh(batch)
        inputs = loss_inputs(batch, scores, coefficients)

        def loss(logp_new: Any) -> Any:
            changed = dataclasses.replace(inputs, logp_new=logp_new)
            return algorithm.loss.apply(changed, weights).loss

        value, slope = jax.value_and_grad(loss)(inputs.logp_new)
        explain = algorithm.loss.explain
        terms = {} if explain is None else explain(inputs, weights)
        return Decomposition(batch, scores, value, slope, terms)

    values = {
        name: jnp.float32(x) for name, x in {**_coefficients(algorithm), **controllers}.items()
    }
    return jax.device_get(run(batch, scores, values))


def examine(
    path: Path,
    workdir: Path,
    origin: batches.Origin,
    setup: recipe.Setup,
    batch: TokenBatch,
    logp: LogProbs,
    found: Decomposition,
    notes: tuple[str, ...] = (),
) -> Inspection:
    """Shares and marks of a decomposed minibatch; `batch` is the minibatch on the host."""
    batch = dataclasses.replace(batch, advantages=found.batch.advantages)
    mask, slope = np.asarray(batch.mask) != 0, np.asarray(found.slope)
    size = np.where(mask & np.isfinite(slope), np.abs(slope), 0).astype(np.float64)
    share = np.where(mask & ~np.isfinite(slope), np.nan, size / (size.sum() or 1.0))
    listed, bad = unusual.not_finite(batch, found.scores, found.terms, slope)
    c, config = setup.config, setup.model.config
    gap = unusual.GAPS.get(config.dtype, unusual.GAP)
    # Truncated sampling that is scored under the full distribution differs by the kept mass.
    comparable = c.replay.support or not c.sampling.truncated
    if not comparable or (origin.epoch, origin.minibatch) != (1, 1):
        gap = np.inf
    log_ratio = unusual.log_ratio(batch, np.asarray(found.scores.logp_new), found.terms)
    marks = unusual.token_marks(
        batch,
        found.scores,
        found.terms,
        log_ratio,
        share,
        vocab_size=config.vocab_size,
        version=origin.step - 1,
        gap=gap,
    )
    return Inspection(
        path=path,
        workdir=workdir,
        origin=origin,
        setup=setup,
        batch=batch,
        logp_new=np.asarray(found.scores.logp_new),
        logp=logp,
        log_ratio=log_ratio,
        ratio=np.asarray(masked.bounded_exp(jnp.asarray(log_ratio))),
        loss=float(found.loss),
        slope=slope,
        share=share,
        terms=found.terms,
        nonfinite=tuple(listed),
        marks={'not finite': bad, **marks},
        row_marks=unusual.row_marks(batch),
        notes=notes,
    )
