"""The reference policy: fixed, synced now and then, or absent."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Reference:
    """Parameters that KL terms are measured against.

    Attributes:
      params: a copy of its own, so that updates which give their parameters away leave it alone.
      every: steps between syncs to the policy; None for a reference that stays.
    """

    params: Any
    every: int | None = None

    def update(self, step: int, params: Any) -> Reference:
        """The reference after `step` steps: a copy of `params` where `every` divides step.

        In the types that it has: float32 masters of a bf16 model would double it for nothing.
        """
        if self.every is None or step % self.every:
            return self
        copies = jax.tree.map(
            lambda old, new: jnp.array(new, old.dtype, copy=True), self.params, params
        )
        return dataclasses.replace(self, params=copies)


def make_reference(params: Any, every: int | None = None, needed: bool = True) -> Reference | None:
    """A reference that starts at a copy of `params`; None, and no copy, where none is needed.

    Args:
      params: of the policy.
      every: steps between syncs, 1 or more; None for a fixed reference.
      needed: whether any term of the algorithm reads `logp_ref`.

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
    return Reference(jax.tree.map(jnp.copy, params), every)
