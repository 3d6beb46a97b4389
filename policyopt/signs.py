"""Signs that a run goes wrong: what each measures, where its bound is from, and what to try.

Everything is a function of what a run left behind: its records (`runs.Run`) and, where a metric was
not recorded, a saved batch. Numbers are means over the last tenth of the RL steps, and where they
are compared with the start, over the first tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt import dashboard
from policyopt.batches import log_ratio
from policyopt.disk import whole
from policyopt.runs import Run, Series, width_of
from policyopt.sampling.config import SamplingConfig

FINE, WARNING, UNKNOWN = 'fine', 'warning', 'not judged'

FEWEST = 10  # steps that have a start and an end to compare
AT_LIMIT = 0.05  # share of answers cut off, above which the reward judges unfinished ones
GROWTH = 2.0  # times the length at the start, without a gain of reward
SPENT = 0.2  # of the entropy at the start
CLIPPED = (0.05, 0.15)  # share of tokens that a clip stops
EFFECTIVE = 0.5  # share of the sample
CHANGED = 0.1  # share of the experts that a token was drawn with
Mark = tuple[float, str]
Batch = Mapping[str, np.ndarray]


class Found(NamedTuple):
    """What a sign says of a run.

    Attributes:
      verdict: FINE, WARNING or UNKNOWN.
      value: what is compared with the bound; None where it can't be judged.
      text: the value in words, or why it can't be judged.
      marks: values and labels of lines to draw into the sign's panel.
    """

    verdict: str
    value: float | None
    text: str
    marks: Sequence[Mark] = ()


class Sign(NamedTuple):
    """A sign to look for.

    Attributes:
      name: of its figure.
      title: in words.
      bound: where warnings begin, in words.
      source: where the bound comes from.
      advice: what to try.
      panel: what shows it.
      judge: (run, saved batch or None) -> Found.
    """

    name: str
    title: str
    bound: str
    source: str
    advice: str
    panel: dashboard.Panel
    judge: Callable[[Run, Batch | None], Found]


def window(count: int) -> int:
    """How many of `count` steps are its end: a tenth, but 5 where there are so many."""
    return max(count // 10, min(count, 5))


def end(series: Series) -> float:
    """Mean over the end of a series that is not empty."""
    return float(np.mean(series.values[-window(len(series.values)) :]))


def start(series: Series) -> float | None:
    """Mean over as many values at its start; None where start and end would share some."""
    count = len(series.values)
    return float(np.mean(series.values[: window(count)])) if count >= FEWEST else None


def margin(series: Series) -> float:
    """Two standard errors of the difference between end and start, of values that are noise."""
    count = window(len(series.values))
    edges = series.values[:count], series.values[-count:]
    return 2 * float(np.sqrt(sum(np.var(edge, ddof=1) / count for edge in edges)))


def not_recorded(*names: str) -> Found:
    """The verdict where metrics are missing."""
    return Found(UNKNOWN, None, f'{" and ".join(f"`{n}`" for n in names)} not recorded')


# ---------------------------------------------------------------- the signs


def length(run: Run, batch: Batch | None = None) -> Found:
    """Length explosion: answers cut off at the limit, or twice as long for no more reward."""
    del batch
    tokens, cut, reward = (run.series(name) for name in ('length', 'truncated', 'reward'))
    if not tokens:
        return not_recorded('length')
    share = end(cut) if cut else 0.0
    text = f'{end(tokens):.4g} tokens'
    text += f', {share:.1%} of answers cut off at the limit' if cut else ''
    first = start(tokens)
    if first is None:
        text += f'; growth needs {FEWEST} steps'
        return Found(WARNING if share > AT_LIMIT else FINE, share, text)
    growth = end(tokens) / max(first, 1e-9)
    text += f'; {growth:.2f} times the length at the start'
    before = start(reward) if reward else None
    gained = before is not None and end(reward) - before > margin(reward)
    if before is None:
        text += ', reward not recorded'
    else:
        text += f', reward {"up" if gained else "not up"} from {before:.3g} to {end(reward):.3g}'
    bad = share > AT_LIMIT or (growth > GROWTH and not gained)
    marks = [(first, 'at the start'), (GROWTH * first, f'{GROWTH:g} times that')]
    return Found(WARNING if bad else FINE, growth, text, marks)


def entropy(run: Run, batch: Batch | None = None) -> Found:
    """Entropy collapse: below a fifth of what it was at the start."""
    del batch
    series = run.series('entropy')
    if not series:
        return not_recorded('entropy')
    first = start(series)
    if first is None:
        why = f'{len(series.steps)} steps; start and end need {FEWEST}'
        return Found(UNKNOWN, None, f'{end(series):.3g} nats per token, {why}')
    left = end(series) / max(first, 1e-9)
    text = f'{end(series):.3g} nats per token, {left:.0%} of the {first:.3g} at the start'
    verdict = WARNING if left < SPENT else FINE
    return Found(verdict, left, text, [(SPENT * first, f'{SPENT:.0%} of the start')])


def clip_share(run: Run, batch: Batch | None = None) -> Found:
    """Share of tokens with an advantage that the clip stops, outside 5 to 15 %.

    A step's first update, where the ratio is 1, is left out: with n updates a step the recorded
    share is divided by (n - 1) / n.
    """
    del batch
    series = run.series('policy/frozen')
    if not series:
        return not_recorded('policy/frozen')
    updates = run.config.get('epochs', 1) * run.config.get('minibatches', 1)
    moved, of = 1.0, 'of tokens with an advantage'
    if run.config and not run.config.get('asynchronous'):
        if updates == 1:
            return Found(UNKNOWN, None, 'one update a step: at a ratio of 1 nothing is clipped')
        moved = (updates - 1) / updates
        of += f', in updates 2 to {updates} of a step'
    if not np.any(series.values):
        why = 'no range to clip at (REINFORCE, TRPO, CISPO, SAPO), or one that is never reached'
        return Found(UNKNOWN, None, f'no token was stopped in any step: {why}')
    share = min(end(series) / moved, 1.0)
    low, high = CLIPPED
    marks = [(bound * moved, f'{bound:.0%} {of.rpartition(",")[2].strip()}') for bound in CLIPPED]
    verdict = FINE if low <= share <= high else WARNING
    return Found(verdict, share, f'{share:.1%} {of}', marks)


def effective_sample(run: Run, batch: Batch | None = None) -> Found:
    """Effective sample size of the tokens' ratios below half; of a saved batch where not recorded.

    Of a batch it is that of its last minibatch: (sum w)^2 / (n sum w^2).
    """
    found = [run.series(f'{base}/token') for base in ('ess_behavior', 'ess_old')]
    values = [end(series) for series in found if series]
    where = ''
    if not values and batch is not None:
        values, where = [_effective(batch)], ' (the last minibatch of the saved batch)'
    if not values:
        return not_recorded('ess_old/token')
    share = min(values)
    text = f'{share:.1%} of tokens{where}'
    answers = run.series('ess_old/sequence')
    if answers:
        text += f'; {end(answers):.1%} of answers, by the product of their ratios'
    marks = [(EFFECTIVE, f'{EFFECTIVE:.0%}')]
    return Found(WARNING if share < EFFECTIVE else FINE, share, text, marks)


def _effective(batch: Batch) -> float:
    mask = batch['mask'] != 0
    if (index := batch.get('minibatch')) is not None:
        mask = mask & (index == index.max())[:, None]
    w = np.exp(log_ratio(batch)[mask])
    return float(w.sum() ** 2 / (w.size * (w**2).sum())) if w.size else 0.0


def expert_drift(run: Run, batch: Batch | None = None) -> Found:
    """Share of replayed experts that the live router would not choose."""
    del batch
    agreement, replayed = run.series('moe/replay_agreement'), run.series('moe/replayed')
    if not agreement:
        return Found(UNKNOWN, None, '`moe/replay_agreement` not recorded: the model is dense')
    if not replayed or end(replayed) == 0:
        return Found(UNKNOWN, None, 'no routing is replayed, so no choice is compared')
    share = 1 - end(agreement)
    text = f'{share:.1%} of the experts that tokens were drawn with'
    marks = [(CHANGED, f'{CHANGED:.0%}')]
    return Found(WARNING if share > CHANGED else FINE, share, text, marks)


def replay_share(run: Run, batch: Batch | None = None) -> Found:
    """Tokens scored on the recorded ids and with the recorded experts, where that is asked for.

    The last token of a row is never fed and has no experts: 1 - 1/length is the least that whole
    replay gives.
    """
    del batch
    support, experts, tokens = (
        run.series(name) for name in ('replay/support', 'moe/replayed', 'length')
    )
    asked: Any = run.config.get('replay') or {}
    gaps, parts, marks = [], [], []
    if support or truncated(run.config):
        share = end(support) if support else 0.0
        gaps.append(1 - share)
        parts.append(f'kept ids of {share:.1%} of tokens')
    if experts and (asked.get('routing') or end(experts) > 0) and tokens:
        least = 1 - 1 / max(end(tokens), 1)
        gaps.append(max(least - end(experts), 0))
        parts.append(f'experts of {end(experts):.1%} (whole replay: {least:.1%} or more)')
        marks = [(least, 'experts: whole replay, at least')]
    if not gaps:
        why = 'nothing to replay is recorded: sampling is not truncated, and no routing is replayed'
        return Found(UNKNOWN, None, why)
    gap = max(gaps)
    return Found(WARNING if gap > 1e-3 else FINE, 1 - gap, ', '.join(parts), marks)


def truncated(config: Mapping[str, Any]) -> bool:
    """Whether a run's sampling draws from less than the whole vocabulary, by its config."""
    return bool(config.get('sampling')) and SamplingConfig(**config['sampling']).truncated


def _panel(title: str) -> dashboard.Panel:
    return next(panel for panel in dashboard.PANELS if panel.title == title)


SIGNS = (
    Sign(
        'length',
        'length explosion',
        f'above {AT_LIMIT:.0%} cut off, or {GROWTH:g} times as long without a gain of reward '
        'above its noise',
        'a choice; DAPO (2503.14476) describes what answers cut off do to the reward',
        'shaping.overlong_filter or soft_overlong; a larger sampling.max_new_tokens where long '
        'answers are right; an aggregate that does not favour them (README); a lower learning rate',
        _panel('Length of answers'),
        length,
    ),
    Sign(
        'entropy',
        'entropy collapse',
        f'below {SPENT:.0%} of the start',
        'a choice; DAPO (2503.14476) describes the collapse, no paper gives a bound',
        'a wider upper clip (algorithm_kw.high); a lower learning rate; sampling.temperature 1; '
        'harder problems, where nearly all are solved: there little entropy is no fault',
        _panel('Entropy'),
        entropy,
    ),
    Sign(
        'clip_share',
        'clip share',
        f'outside {CLIPPED[0]:.0%} to {CLIPPED[1]:.0%}',
        'a rule of thumb, of no paper; GSPO (2507.18071) reports 15 % for itself and .13 % for '
        'GRPO',
        'the clip range suggested above; where it is wide already and much is stopped, a lower '
        'learning rate or fewer minibatches',
        _panel('Frozen tokens (clipped)'),
        clip_share,
    ),
    Sign(
        'effective_sample',
        'effective sample size',
        f'below {EFFECTIVE:.0%}',
        'half is where particle filters resample by custom; a choice here',
        'fewer minibatches or epochs; a lower learning rate; replay of support and routing; '
        'losses.truncated_importance',
        dashboard.Panel(
            'Effective sample size',
            'share',
            dashboard.of(
                ('ess_old/token', 'of tokens'),
                ('ess_behavior/token', 'of tokens, to the sampler'),
                ('ess_old/sequence', 'of answers'),
            ),
            zero=True,
        ),
        effective_sample,
    ),
    Sign(
        'expert_drift',
        'expert drift',
        f'above {CHANGED:.0%}',
        'GSPO (2507.18071) reports about 10 % an update for 48 layers, where GRPO without replay '
        'failed',
        'keep replay.routing; fewer minibatches; a lower learning rate; a sequence ratio (gspo), '
        'which averages over it; a frozen or slower router',
        dashboard.Panel(
            'Experts changed',
            'share of those replayed',
            dashboard.of(
                ('moe/replay_agreement', 'not the live choice'), change=lambda share: 1 - share
            ),
            zero=True,
        ),
        expert_drift,
    ),
    Sign(
        'replay_share',
        'replay share',
        'below what can be replayed',
        'exact: without it the first ratio is the kept mass, or of other experts',
        'replay = dict(support=True, routing=...) in the config; check what wrote the rollouts '
        '(docs/interchange.md) where they come from elsewhere',
        _panel('Replay'),
        replay_share,
    ),
)


def judge(run: Run, batch: Batch | None = None) -> list[tuple[Sign, Found]]:
    """What every sign says of a run, and of its last saved batch where there is one."""
    return [(sign, sign.judge(run, batch)) for sign in SIGNS]


def draw(path: Path, sign: Sign, found: Found, run: Run) -> bool:
    """Draw a sign's panel with its bounds into a PNG file; False where the run has none of it."""
    from matplotlib.figure import Figure

    if not sign.panel.lines(run):
        return False
    figure = Figure(figsize=(6.8, 3.0), dpi=dashboard.DPI, layout='constrained')
    axis = figure.subplots()
    dashboard.draw_panel(axis, sign.panel, [run], width_of(run.steps))
    for (value, label), style in zip(found.marks, (':', '--'), strict=False):
        axis.axhline(value, color='0.3', lw=1, ls=style, label=label)
    low, high = axis.get_ylim()
    values = [value for value, _ in found.marks]
    axis.set_ylim(min(low, *values, low), max([high, *(1.06 * value for value in values)]))
    axis.set_xlabel('RL step', fontsize=8)
    axis.set_title(f'{sign.title}: {found.verdict}', fontsize=9)
    axis.legend(fontsize=7, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
    with whole(path) as partial:
        figure.savefig(partial, format='png')
    return True
