"""The figure of a run, or of several in one: a panel for each thing worth watching.

`PANELS` says what there is; a panel is left out where no run has its metrics. Colours are those of
Okabe and Ito, which the colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt.at_k import wilson
from policyopt.disk import whole
from policyopt.runs import TIMES, Run, Series, smooth, width_of

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000', '#999999')
_AT = 'value/explained_at/'  # and the tenth of an answer
FEW = 12  # points that are shown as such
WIDTH, HEIGHT, DPI = 3.7, 2.35, 110  # of a panel, in inches


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
      label: in the panel's legend.
      series: what it shows.
      low, high: a band around it, None without one.
    """

    label: str
    series: Series
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class Panel(NamedTuple):
    """A panel.

    Attributes:
      title: what it shows, in words.
      unit: of the y axis.
      lines: Run -> lines that the run has. Where runs are compared, the first one of each.
      log: whether the y axis is logarithmic.
      stacked: whether the lines are parts of a sum.
      zero: whether the y axis begins at 0.
      points: whether each value is a measurement of its own, with its interval.
    """

    title: str
    unit: str
    lines: Callable[[Run], list[Line]]
    log: bool = False
    stacked: bool = False
    zero: bool = False
    points: bool = False


def of(*named: tuple[str, str], change: Callable[[Any], Any] | None = None) -> Any:
    """Lines of (metric, label), those that the run has, with values changed where asked."""

    def lines(run: Run) -> list[Line]:
        found = [Line(label, run.series(name)) for name, label in named]
        if change is not None:
            found = [
                line._replace(series=line.series._replace(values=change(line.series.values)))
                for line in found
            ]
        return [line for line in found if line.series]

    return lines


def _reward(run: Run) -> list[Line]:
    """The mean reward, with its standard error from a record of the rewards' spread."""
    reward, spread, rows = (run.series(n) for n in ('reward', 'reward_std', 'rollout/rows'))
    if not len(reward.steps) == len(spread.steps) == len(rows.steps):
        return [Line('reward', reward)] if reward else []
    half = 1.96 * spread.values / np.sqrt(np.maximum(rows.values, 1))
    line = Line('reward', reward, reward.values - half, reward.values + half)
    return [line] if reward else []


def _sampled(run: Run) -> list[Line]:
    share, rows = run.series('accuracy'), run.series('rollout/rows')
    if len(share.steps) != len(rows.steps):
        return [Line('sampled', share)] if share else []
    ends = [wilson(s * n, n) for s, n in zip(share.values, rows.values, strict=True)]
    low, high = np.reshape(ends, (-1, 2)).T
    return [Line('sampled', share, low, high)] if share else []


def _held_out(run: Run) -> list[Line]:
    share, *ends = (run.series(n, 'evaluation') for n in ('held_out', 'low', 'high'))
    low, high = (e.values if len(e.steps) == len(share.steps) else None for e in ends)
    found = [Line('all tasks', share, low, high)] if share else []
    parts = run.group('held_out', 'evaluation')
    return found + [Line(name, series) for name, series in parts.items()]


def _ratios(run: Run) -> list[Line]:
    ends = (('p99', '99 %'), ('p50', 'median'), ('p1', '1 %'))
    named = [(f'ratio/token_log/{q}', f'{label} of tokens') for q, label in ends]
    named += [(f'ratio/sequence_log/{q}', f'{label} of answers') for q, label in ends[::2]]
    return of(*named, change=np.exp)(run)


def _layers(prefix: str) -> Callable[[Run], list[Line]]:
    """The largest over layers, and each layer where they are few."""

    def lines(run: Run) -> list[Line]:
        layers = run.group(prefix)
        if not layers:
            return []
        steps = next(iter(layers.values())).steps
        values = np.array([x.values for x in layers.values() if len(x.steps) == len(steps)])
        found = [Line('largest of the layers', Series(steps, values.max(axis=0)))]
        if 1 < len(layers) <= 4:
            return found + [Line(f'layer {name}', x) for name, x in layers.items()]
        if len(layers) > 4:
            found.append(Line('median layer', Series(steps, np.median(values, axis=0))))
            found.append(Line('smallest', Series(steps, values.min(axis=0))))
        return found

    return lines


def _norms(name: str) -> Callable[[Run], list[Line]]:
    def lines(run: Run) -> list[Line]:
        found = of((name, 'all'))(run)
        return found + [Line(group, series) for group, series in run.group(name).items()]

    return lines


def _turn_rewards(run: Run) -> list[Line]:
    """Of all turns, and of each number of a turn."""
    return of(('turns/reward', 'all'))(run) + [
        Line(f'turn {number}', series) for number, series in run.group('turns/reward').items()
    ]


def _slots(run: Run) -> list[Line]:
    found = {'drew a token': 'slot_use', 'waited for an environment': 'slots_waiting'}
    return [Line(label, s) for label, name in found.items() if (s := run.times(name))]


def _seconds(run: Run) -> list[Line]:
    """Parts of a step; what is left of it is `other`."""
    whole = run.times('seconds')
    parts = {name: run.times(f'{name}_seconds') for name in TIMES}
    parts = {n: s for n, s in parts.items() if s and len(s.steps) == len(whole.steps)}
    if not parts:
        return []
    rest = whole.values - sum(s.values for s in parts.values())
    parts['other'] = Series(whole.steps, np.maximum(rest, 0))
    return [Line(name, series) for name, series in parts.items()]


def _speed(run: Run) -> list[Line]:
    return [Line('tokens', s)] if (s := run.times('tokens_per_second')) else []


PANELS = (
    Panel('Reward of sampled answers', 'reward', _reward),
    Panel('Sampled accuracy', 'share right', _sampled, zero=True),
    Panel('Held-out accuracy', 'share right', _held_out, zero=True, points=True),
    Panel(
        'Reward model and truth',
        'reward',
        of(('rewards/proxy', 'model'), ('rewards/truth', 'truth'), ('rewards/gap', 'gap')),
    ),
    Panel('Length of answers', 'tokens', of(('length', 'tokens')), zero=True),
    Panel('KL to the sampler', 'nats / token', of(('kl_behavior/k3', 'to the sampler'))),
    Panel('KL to the reference', 'nats / token', of(('kl_reference/k3', 'to the reference'))),
    Panel('Entropy', 'nats / token', of(('entropy', 'entropy')), zero=True),
    Panel(
        'Frozen tokens (clipped)',
        'share',
        of(
            ('policy/frozen', 'of all'),
            ('policy/frozen_high', 'of those to be raised'),
            ('policy/frozen_low', 'of those to be lowered'),
        ),
        zero=True,
    ),
    Panel('Ratio, new / old policy', 'ratio', _ratios, log=True),
    Panel('Busiest expert', 'tokens / mean expert', _layers('moe/load_over_mean')),
    Panel('Unused experts', 'share of a layer', _layers('moe/unused'), zero=True),
    Panel(
        'Replay',
        'share of tokens',
        of(
            ('moe/replayed', 'routing replayed'),
            ('replay/support', 'support replayed'),
            ('moe/replay_agreement', 'router would agree'),
        ),
        zero=True,
    ),
    Panel('Gradient norm', 'norm', _norms('grad_norm'), log=True),
    Panel('Update norm', 'norm', _norms('update_norm'), log=True),
    Panel(
        'Rows of a step',
        'share',
        of(
            ('rollout/kept', 'filled'),
            ('truncated', 'cut off at the limit'),
            ('rollout/not_judged', 'without reward'),
            ('rollout/not_sampled', 'not sampled'),
            *((f'turns/{kind}', f'environment: {kind}') for kind in ('failed', 'late', 'overflow')),
            ('skipped', 'updates skipped'),
        ),
        zero=True,
    ),
    Panel('Turns of a row', 'turns', of(('turns/mean', 'mean'), ('turns/max', 'most')), zero=True),
    Panel('Reward of turns', 'reward', _turn_rewards),
    Panel('Slots with turns', 'share', _slots, zero=True),
    Panel('Age of tokens', 'versions', of(('staleness', 'mean'), ('staleness/max', 'oldest'))),
    Panel('Decode slots', 'share', of(('async/idle', 'idle'), ('async/dropped', 'dropped'))),
    Panel(
        'Critic',
        'explained variance',
        of(('value/explained_variance', 'all'), (_AT + '0', 'first tenth'), (_AT + '9', 'last')),
    ),
    Panel(
        'Adaptive coefficients',
        'value',
        lambda run: [Line(name, series) for name, series in run.group('controller').items()],
    ),
    Panel('Time of a step', 'seconds', _seconds, stacked=True, zero=True),
    Panel('Speed', 'tokens / s', _speed, zero=True),
)


def draw(path: Path, runs: Sequence[Run], more: Sequence[str] = ()) -> bool:
    """Draw the dashboard of a run, or of several on the same panels, into a PNG file.

    Returns False, and draws nothing, where matplotlib is not installed or no run has a step.

    Args:
      path: of the file.
      runs: one or more.
      more: metrics that get a panel of their own.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    except ModuleNotFoundError:
        return False
    every = [*PANELS, *(Panel(name, 'value', of((name, name))) for name in more)]
    panels = [panel for panel in every if any(panel.lines(run) for run in runs)]
    if not panels:
        return False
    columns = min(4 if len(panels) > 6 else 3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * WIDTH, rows * HEIGHT + 0.9), dpi=DPI)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    width = width_of(max(run.steps for run in runs))
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, panel, runs, width)
    for number, axis in enumerate(axes.flat):
        if number >= len(panels):
            axis.remove()
        elif number + columns >= len(panels):  # the last of its column
            axis.tick_params(labelbottom=True)
            axis.set_xlabel('RL step', fontsize=8)
    figure.suptitle(title_of(runs), fontsize=13)
    _legend(figure, runs, width)
    height = rows * HEIGHT + 0.9
    figure.subplots_adjust(
        left=0.62 / (columns * WIDTH),
        right=1 - 0.12 / (columns * WIDTH),
        top=1 - 0.62 / height,
        bottom=0.78 / height,
        wspace=0.27,
        hspace=0.32,
    )
    with whole(path) as partial:
        figure.savefig(partial, format='png')
    return True


def title_of(runs: Sequence[Run]) -> str:
    """What the runs are about, in words."""
    titles = list(dict.fromkeys(run.title for run in runs))
    return ' and '.join(filter(None, [', '.join(titles[:-1]), titles[-1]]))


def draw_panel(axis: Any, panel: Panel, runs: Sequence[Run], width: int) -> None:
    """Draw a panel of one run, or the first line of each of several; means of `width` steps."""
    title = panel.title
    if len(runs) == 1:
        lines = panel.lines(runs[0])
        if panel.stacked:
            title += _stack(axis, lines, width)
        else:
            for number, line in enumerate(lines):
                _draw_line(axis, line, _colour(number), panel, width, quiet=number > 0)
        if len(lines) > 1:
            axis.legend(fontsize=6, ncols=2 if len(lines) > 4 else 1, framealpha=0.6)
    else:
        several = False
        for number, run in enumerate(runs):
            lines = panel.lines(run)
            several |= len(lines) > 1
            if lines and panel.stacked:
                total = np.sum([line.series.values for line in lines], axis=0)
                lines = [Line('in all', Series(lines[0].series.steps, total))]
            if lines:
                _draw_line(axis, lines[0], _colour(number), panel, width)
        first = next(lines for run in runs if (lines := panel.lines(run)))[0]
        if several:
            title += f': {"in all" if panel.stacked else first.label}'
        if panel.stacked:
            title += _cut(axis, [line.get_ydata() for line in axis.lines])
    if panel.log:
        _log(axis)
    else:
        axis.ticklabel_format(axis='y', scilimits=(-2, 5))
        axis.yaxis.get_offset_text().set_fontsize(7)
        if panel.zero:
            axis.set_ylim(0, (1 if panel.stacked else 1.04) * axis.get_ylim()[1])
    axis.set_title(title, fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.tick_params(which='both', labelsize=7)
    axis.margins(x=0.01)
    axis.grid(alpha=0.25, lw=0.5)


def _log(axis: Any) -> None:
    """A logarithmic y axis with plain numbers, between powers of ten where there are few."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_yscale('log')
    low, high = axis.get_ylim()
    plain = FuncFormatter(lambda value, place: f'{value:g}')
    axis.yaxis.set_major_formatter(plain)
    decades = np.log10(high / low)
    shown = (2, 5) if decades > 0.7 else range(1, 10)
    some = FuncFormatter(lambda value, place: f'{value:g}' if int(f'{value:e}'[0]) in shown else '')
    axis.yaxis.set_minor_formatter(some if decades < 2 else NullFormatter())


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _draw_line(
    axis: Any, line: Line, colour: str, panel: Panel, width: int, quiet: bool = False
) -> None:
    """Thin as measured, thick its running mean, and the band."""
    steps, values = line.series
    marker = 'o' if panel.points or len(steps) <= FEW else None
    look = dict(color=colour, label=line.label, marker=marker, ms=2.5)
    if panel.points:
        if line.low is not None and line.high is not None and not quiet:
            axis.fill_between(steps, line.low, line.high, color=colour, alpha=0.2, lw=0)
        axis.plot(steps, values, lw=1.3 if not quiet else 0.9, **look)
        return
    width = width if len(steps) > width else 1
    mean = median if panel.stacked else smooth
    if line.low is not None and line.high is not None:
        ends = [smooth(end, width) for end in (line.low, line.high)]
        axis.fill_between(steps, *ends, color=colour, alpha=0.2, lw=0)
    if width > 1 and not quiet:
        axis.plot(steps, values, color=colour, lw=0.5, alpha=0.35)
    axis.plot(steps, mean(values, width), lw=1.3 if not quiet else 0.9, **look)


def _stack(axis: Any, lines: Sequence[Line], width: int) -> str:
    steps = lines[0].series.steps
    width = width if len(steps) > width else 1
    smoothed = [median(line.series.values, width) for line in lines]
    colours = [_colour(i) for i in range(len(lines))]
    axis.stackplot(steps, *smoothed, labels=[line.label for line in lines], colors=colours, lw=0)
    return _cut(axis, [np.sum(smoothed, axis=0)])


def median(values: np.ndarray, width: int) -> np.ndarray:
    """Running median, which takes no notice of the few steps that compile; `width` is odd."""
    padded = np.pad(values, width // 2, mode='reflect')  # the first of them counts once
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)


def _cut(axis: Any, totals: Sequence[np.ndarray]) -> str:
    """Cut the y axis where a few steps that compile dwarf the rest; says so for the title."""
    values = np.concatenate([np.asarray(t, float) for t in totals])
    top = 1.4 * np.quantile(values, 0.9, method='lower')  # not towards the peak of few values
    if len(values) < 4 or values.max() <= top:
        return ''
    axis.set_ylim(0, top)
    return f' (compiling: up to {values.max():.0f} s)'


def _legend(figure: Any, runs: Sequence[Run], width: int) -> None:
    """What thin, thick and shaded mean; which colour is which run."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = '0.35'
    handles: list[Any] = []
    if width > 1:
        handles.append(Line2D([], [], color=grey, lw=0.6, alpha=0.6, label='thin: each step'))
        label = f'thick: mean of {width} steps about it (times: median)'
        handles.append(Line2D([], [], color=grey, lw=1.5, label=label))
    handles.append(
        Patch(
            color=grey, alpha=0.25, lw=0, label='band: 95 % interval of a value, rows independent'
        )
    )
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=_colour(i), lw=2, label=run.name) for i, run in enumerate(runs)
        ] + handles
    figure.legend(
        handles=handles, loc='lower center', ncols=len(handles), fontsize=8, frameon=False
    )
