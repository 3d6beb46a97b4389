"""Draw what each surrogate makes of a token: its weight on grad log-prob, against the ratio.

    python -m experiments.surrogates [--output=docs/figures/surrogates.png]

The curves are derivatives of the loss parts themselves.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from policyopt import losses

OUTPUT = flags.DEFINE_string('output', 'docs/figures/surrogates.png', 'Where the figure goes.')
CURVES = {
    'clip .2/.28 (GRPO, DAPO; GSPO on the row)': losses.clipped(0.2, 0.28),
    'soft gate (SAPO)': losses.soft_gated(1.0, 1.05),
    'truncated weight, cap 2 (CISPO: 5)': losses.truncated_weight(2.0),
    'unclipped (TRPO, PPO-penalty)': losses.unclipped(),
}
STYLES = ['-', '--', '-.', ':']


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    import matplotlib

    matplotlib.use('agg')
    import matplotlib.pyplot as plt

    log_ratio = jnp.log(jnp.asarray(np.linspace(0.05, 3, 600), jnp.float32))
    ratio = np.exp(log_ratio)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharex=True)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        for (label, surrogate), style in zip(CURVES.items(), STYLES, strict=True):
            slope = jax.vmap(jax.grad(surrogate), (0, None))(log_ratio, advantage)
            axis.plot(ratio, slope, style, label=label)
        axis.set_title(f'advantage {advantage:+.0f}')
        axis.set_xlabel('ratio  new / old')
        axis.axvline(1, color='0.85', zorder=0)
        axis.axhline(0, color='0.85', zorder=0)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].set_ylabel('weight of grad log-prob')
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=2, frameon=False, fontsize=9)
    figure.set_layout_engine('constrained')
    path = pathlib.Path(OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == '__main__':
    app.run(main)
