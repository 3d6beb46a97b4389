"""The reference policy: fixed, synced now and then, or absent."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from policyopt.models import adapters


@dataclasses.dataclass(frozen=True)
class Reference:
    """Parameters that KL terms are measured against.

    Attributes:
      params: a copy of its own, so that updates which give their parameters away leave it alone. Of
        a policy with adapters, the trained part alone; None is its base, with adapters off.
      every: steps between syncs to the policy; None for a reference that stays.
    """

    params: Any
    every: int | None = None

    def of(self, params: Any) -> Any:
        """All parameters of the reference; the policy's `params` lend those that never change."""
        if self.params is None:
            return adapters.off(params)
        return {**adapters.frozen(params), **self.params}

    def update(self, step: int, params: Any) -> Reference:
        """The reference after `step` steps: a copy of `params` where `every` divides step.

        In the types that it has: float32 masters of a bf16 model would double it for nothing.
        """
        if self.every is None or step % self.every:
            return self
        copies = jax.tree.map(
            lambda old, new: jnp.array(new, old.dtype, copy=True),
            self.params,
            adapters.trained(params),
        )
        return dataclasses.replace(self, params=copies)


def make_reference(
    params: Any, every: int | None = None, needed: bool = True, fresh: bool = False
) -> Reference | None:
    """A reference that starts at a copy of `params`; None, and no copy, where none is needed.

    Args:
      params: of the policy.
      every: steps between syncs, 1 or more; None for a fixed reference.
      needed: whether any term of the algorithm reads `logp_ref`.
      fresh: whether adapters among them are as first drawn: a reference that stays is then the
        base, and nothing is copied.

    Raises ValueError for an `every` below 1, or one that is given where no reference is needed.
    """
    if every is not None and every < 1:
        raise ValueError(f'every={every}; legal is 1 or more, or None for a fixed reference')
    if not needed:
        if every is not None:
            raise ValueError(
                f'every={every} has no effect: no term of the algorithm reads a reference policy; '
                'legal is None'
            )
        return None
    off = fresh and every is None and adapters.frozen(params)
    return Reference(None if off else _copy(params), every)


def _copy(params: Any) -> Any:
    return jax.tree.map(jnp.copy, adapters.trained(params))
