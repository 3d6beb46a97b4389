"""What a KL penalty does to a token that the policy has all but given up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claim import COLOURS, Claim, Place, Verdict, tidy
from policyopt import losses
from policyopt.types import LossInputs

REFERENCE, OLD = 0.5, 0.3
FORMS = {'k3': dict(estimator='k3'), 'weighted k3': dict(estimator='k3', unbiased=True)}
P = np.geomspace(1e-8, 0.99, 200)
EXAMPLE = 1e-4  # where the published example stands


def coefficient(p: Any, **form: Any) -> Any:
    """What multiplies grad log p of a token in the penalty's gradient, p [n] -> [n]."""
    penalty = losses.kl_to_reference(1.0, **form)

    def total(logp: Any) -> Any:
        shape = (1, logp.shape[0])
        fill = lambda x: jnp.full(shape, jnp.log(x))  # noqa: E731
        inputs = LossInputs(
            logp_new=logp[None],
            logp_old=fill(OLD),
            logp_ref=fill(REFERENCE),
            mask=jnp.ones(shape),
            advantages=jnp.zeros(shape),
        )
        return jnp.sum(penalty(inputs, inputs.logp_new - inputs.logp_old))

    return jax.grad(total)(jnp.log(jnp.asarray(p)))


def measure(place: Place) -> dict[str, Any]:
    """Coefficients of both forms: exact, so that seeds only repeat them."""
    del place
    return {
        name: {
            'curve': np.asarray(coefficient(P, **form)).tolist(),
            'example': float(coefficient(np.array([EXAMPLE]), **form)[0]),
        }
        for name, form in FORMS.items()
    }


def judge(seeds: list[Any]) -> Verdict:
    plain, weighted = (seeds[0][name]['example'] for name in FORMS)
    largest = float(np.abs(seeds[0]['weighted k3']['curve']).max())
    value = float(np.log10(abs(plain / weighted)))
    right = abs(plain + 4999) < 1 and abs(weighted + 0.0028) < 1e-4
    return Verdict(
        'reproduced' if right else 'not reproduced',
        'decades between the two coefficients at p = 1e-4, q = .5, old = .3',
        value,
        (value, value),
        'With p = 1e-4 under the policy, .5 under the reference and .3 under the policy that drew '
        f"it, k3's gradient multiplies grad log p by {plain:.0f}, the weighted form's by "
        f'{weighted:.4f}. Over all p the weighted form stays below {largest:.2g}, while k3 grows '
        'as q / p. This is arithmetic, without seeds.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    for colour, name in zip(COLOURS, FORMS, strict=False):
        axis.plot(P, np.abs(seeds[0][name]['curve']), color=colour, lw=2, label=name)
    axis.axvline(EXAMPLE, color='#888888', ls=':')
    axis.set(xscale='log', yscale='log', xlabel='p under the policy')
    axis.set_ylabel('|coefficient of grad log p|')
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text="The gradient of k3 has no bound where p << q; that of DeepSeek-V3.2's form has.",
    source='2512.02556',
    published='-',
    minutes=0.1,
    measure=measure,
    judge=judge,
    draw=draw,
)
