"""Every named algorithm, as a composition of parts.

Notation: rows i of n_i policy tokens t, G of them; l = logp_new - logp_old, w = exp(l), s_i =
exp(mean_t l), A the advantage, E_t the mean over all tokens, sg the stop-gradient, clip(u, A) =
min(u A, clip(u, 1-low, 1+high) A). J is maximised. A default marked "a choice" is in no paper. All
take `gates`, so that an importance correction goes with any of them:

    gspo(gates=[losses.truncated_importance(2.0)])
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from policyopt import checks, shaping
from policyopt.advantages import (
    Estimator,
    batch_mean_baseline,
    gae,
    global_zscore,
    group_mean_baseline,
    group_zscore,
    length_adaptive_gae,
    normalise_minibatch,
    process_rewards,
    turn_rewards,
)
from policyopt.advantages import (
    read as read_advantages,
)
from policyopt.advantages import (
    rloo as leave_one_out,
)
from policyopt.losses.aggregates import constant_length, sequence_mean, sequence_sum, token_mean
from policyopt.losses.compose import adaptive, add, policy_loss, positive_nll, scale, value_loss
from policyopt.losses.controllers import doubling_kl
from policyopt.losses.gates import detached_weight, off_policy_sequence, trust_mask
from policyopt.losses.gates import read as read_gates
from policyopt.losses.penalties import entropy, kl_to_old, kl_to_reference
from policyopt.losses.ratios import (
    behavior_ratio,
    clipped_sequence_ratio,
    segment_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from policyopt.losses.surrogates import (
    clipped,
    soft_gated,
    truncated_weight,
    unclipped,
)
from policyopt.losses.surrogates import (
    reinforce as score_function,
)
from policyopt.trust_region import natural_gradient
from policyopt.types import Algorithm, identity

Gates = Sequence[Any]


@checks.factory('algorithm')
def reinforce(gates: Gates = ()) -> Algorithm:
    """REINFORCE with a baseline, one update per rollout (Williams 1992).

        J = E_t l (R_i - b),  b the mean of all rewards

    Token mean; the textbook's sum over tokens differs by the mean length.
    """
    return Algorithm(
        advantages=batch_mean_baseline(),
        loss=policy_loss(
            ratio=token_ratio(), surrogate=score_function(), aggregate=token_mean(), gates=gates
        ),
    )


@checks.factory('algorithm')
def rloo(beta: float = 0.0, gates: Gates = ()) -> Algorithm:
    """REINFORCE whose baseline is the prompt's other answers (2402.14740).

        J = 1/G sum_i sum_t l A_i,  A_i = r_i - mean of the prompt's other rows

    beta > 0 subtracts the k1 KL to the reference policy from the reward, as the paper does.
    """
    return Algorithm(
        advantages=leave_one_out(),
        shape=shaping.kl_in_reward(beta) if beta else identity,
        loss=policy_loss(
            ratio=token_ratio(), surrogate=score_function(), aggregate=sequence_sum(), gates=gates
        ),
    )


@checks.factory('algorithm')
def reinforce_pp(eps: float = 0.2, beta: float = 1e-3, gates: Gates = ()) -> Algorithm:
    """REINFORCE++: PPO's clip, z-scored over the whole batch instead of the group (2501.03262).

        J = E_t clip(w, A_i),  A_i = (r_i' - mean of all r') / std of all r'
        r_i' = r_i - beta sum_t (logp_behavior - logp_ref)

    low and high are eps.
    """
    return Algorithm(
        advantages=global_zscore(),
        shape=shaping.kl_in_reward(beta),
        loss=policy_loss(
            ratio=token_ratio(), surrogate=clipped(eps), aggregate=token_mean(), gates=gates
        ),
    )


@checks.factory('algorithm')
def trpo(delta: float = 0.01, advantages: Estimator | None = None, gates: Gates = ()) -> Algorithm:
    """Natural gradient within a bound on the KL (1502.05477).

        max E_t w A  subject to  E_t KL(old || new) <= delta

    delta as published. `advantages` defaults to `group_mean_baseline()`, a choice; `gae(...)` uses
    a critic.
    """
    return Algorithm(
        advantages=advantages or group_mean_baseline(),
        loss=policy_loss(
            ratio=token_ratio(), surrogate=unclipped(), aggregate=token_mean(), gates=gates
        ),
        update=natural_gradient(delta),
    )


@checks.factory('algorithm')
def ppo_clip(
    eps: float = 0.2,
    lam: float = 0.95,
    gamma: float = 1.0,
    value_coefficient: float = 1.0,
    value_clip: float | None = None,
    outcome_weight: float = 1.0,
    segment_weight: float = 0.0,
    reference_beta: float = 0.0,
    entropy_coefficient: float = 0.0,
    gates: Gates = (),
) -> Algorithm:
    """PPO with a clipped ratio and a critic (1707.06347).

        J = E_t [clip(w, A) - c1 1/2 (V - R)^2 + c2 S],  A by GAE, S the entropy

    eps (low and high) and lambda as published; gamma 1 and the coefficients are choices for
    language models. outcome_weight, segment_weight, reference_beta: see `advantages.gae`; RLHF
    (2203.02155) has a reference_beta of .02.
    """
    return Algorithm(
        advantages=gae(
            gamma,
            lam,
            outcome_weight=outcome_weight,
            segment_weight=segment_weight,
            reference_beta=reference_beta,
        ),
        loss=add(
            policy_loss(
                ratio=token_ratio(),
                surrogate=clipped(eps),
                penalties=[entropy(entropy_coefficient)] if entropy_coefficient else (),
                aggregate=token_mean(),
                gates=gates,
            ),
            scale(value_coefficient, value_loss(aggregate=token_mean(), clip=value_clip)),
        ),
    )


@checks.factory('algorithm')
def ppo_penalty(
    beta: float = 1.0,
    target: float = 0.01,
    lam: float = 0.95,
    gamma: float = 1.0,
    value_coefficient: float = 1.0,
    value_clip: float | None = None,
    outcome_weight: float = 1.0,
    segment_weight: float = 0.0,
    reference_beta: float = 0.0,
    gates: Gates = (),
) -> Algorithm:
    """PPO with an adaptive KL penalty in place of the clip (1707.06347).

        J = E_t [w A - beta (w - 1 - l) - c1 1/2 (V - R)^2],  A by GAE
        beta halves where KL(old || new) < target / 1.5, doubles where it is > 1.5 target

    w - 1 - l is the sample estimate of KL(old || new). beta's start, target and gamma are choices.
    outcome_weight, segment_weight, reference_beta: see `advantages.gae`.
    """
    return Algorithm(
        advantages=gae(
            gamma,
            lam,
            outcome_weight=outcome_weight,
            segment_weight=segment_weight,
            reference_beta=reference_beta,
        ),
        controllers={'beta': doubling_kl(beta, target)},
        loss=add(
            policy_loss(
                ratio=token_ratio(),
                surrogate=unclipped(),
                penalties=[adaptive(kl_to_old, beta='beta')],
                aggregate=token_mean(),
                gates=gates,
            ),
            scale(value_coefficient, value_loss(aggregate=token_mean(), clip=value_clip)),
        ),
    )


@checks.factory('algorithm')
def grpo(eps: float = 0.2, beta: float = 0.04, gates: Gates = ()) -> Algorithm:
    """GRPO: answers are compared with their group, no critic (2402.03300).

        J = 1/G sum_i 1/n_i sum_t [clip(w, A_i) - beta k3],  A_i = (r_i - mean) / std of the group
        k3 = q/p - log(q/p) - 1,  q the reference, p the policy

    beta 0 leaves the reference policy out; eps (low and high) is PPO's, the paper gives none.
    """
    return Algorithm(
        advantages=group_zscore(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=clipped(eps),
            penalties=[kl_to_reference(beta)] if beta else (),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def dr_grpo(length: int, eps: float = 0.2, gates: Gates = ()) -> Algorithm:
    """GRPO without its two divisions, by row length and by std (2503.20783).

        J = 1/(G length) sum_i sum_t clip(w, A_i),  A_i = r_i - mean of the group

    `length` is the generation budget in tokens, a constant. low and high are eps.
    """
    return Algorithm(
        advantages=group_mean_baseline(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=clipped(eps),
            aggregate=constant_length(length),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def dapo(
    low: float = 0.2,
    high: float = 0.28,
    max_length: int = 20480,
    cache: int = 4096,
    filter_overlong: bool = False,
    gates: Gates = (),
) -> Algorithm:
    """DAPO: clip-higher, token mean, dynamic sampling, soft overlong penalty (2503.14476).

        J = 1/sum n_i sum_i sum_t clip(w, A_i),  A_i = (r_i' - mean) / std of the group
        r_i' = r_i + 0 up to max_length - cache tokens, falling to -1 at max_length, -1 beyond

    All values as published; rewards +1/-1; prompts that are all right or all wrong are dropped and
    refilled; masking truncated rows is optional in the paper.
    """
    overlong = shaping.soft_overlong(max_length, cache)
    return Algorithm(
        advantages=group_zscore(),
        shape=shaping.chain(overlong, shaping.overlong_filter()) if filter_overlong else overlong,
        keep=shaping.mixed_outcomes(),
        loss=policy_loss(
            ratio=token_ratio(), surrogate=clipped(low, high), aggregate=token_mean(), gates=gates
        ),
    )


@checks.factory('algorithm')
def gspo(low: float = 3e-4, high: float = 4e-4, gates: Gates = ()) -> Algorithm:
    """GSPO: one ratio per row, the geometric mean of its tokens' (2507.18071).

        J = 1/G sum_i clip(s_i, A_i),  A_i = (r_i - mean) / std of the group

    Published values, for long answers; short ones need wider ranges, about .1 at four tokens
    (calibrate).
    """
    return Algorithm(
        advantages=group_zscore(),
        loss=policy_loss(
            ratio=sequence_ratio(),
            surrogate=clipped(low, high),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def gspo_token(
    low: float = 3e-4,
    high: float = 4e-4,
    advantages: Estimator | None = None,
    gates: Gates = (),
) -> Algorithm:
    """GSPO with an advantage of each token's own (2507.18071).

        J = 1/G sum_i 1/n_i sum_t clip(s_it, A_it),  s_it = sg[s_i] pi_new / sg[pi_new]

    Equals GSPO where the advantage is constant over a row, as with the default `group_zscore()`.
    """
    return Algorithm(
        advantages=advantages or group_zscore(),
        loss=policy_loss(
            ratio=sequence_token_ratio(),
            surrogate=clipped(low, high),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def gspo_turn(
    low: float = 3e-4, high: float = 4e-4, coefficient: float = 1.0, gates: Gates = ()
) -> Algorithm:
    """GSPO with one ratio per turn; an unpublished composition (after 2507.18071).

        J = 1/G sum_i 1/n_i sum_k n_ik clip(s_ik, A_ik),  s_ik = exp(mean of l over turn k)
        A_ik = outcome_i + coefficient turn_ik, each z-scored in the group

    eps is GSPO's, coefficient a choice.
    """
    return Algorithm(
        advantages=turn_rewards(coefficient),
        loss=policy_loss(
            ratio=segment_ratio(),
            surrogate=clipped(low, high),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def gspo_step(
    low: float = 3e-4,
    high: float = 4e-4,
    mean: bool = False,
    discount: float = 1.0,
    gates: Gates = (),
) -> Algorithm:
    """GSPO with one ratio per reasoning step; an unpublished composition (after 2507.18071).

        J = 1/G sum_i 1/n_i sum_k n_ik clip(s_ik, A_ik),  s_ik = exp(mean of l over step k)
        A_ik = sum of the z-scored rewards of step k and those that follow

    eps is GSPO's, the advantage that of GRPO's process supervision (2402.03300).
    """
    return Algorithm(
        advantages=process_rewards(mean, discount),
        loss=policy_loss(
            ratio=segment_ratio(),
            surrogate=clipped(low, high),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def magistral(
    low: float = 0.2,
    high: float = 0.28,
    max_length: int | None = None,
    cache: int | None = None,
    gates: Gates = (),
) -> Algorithm:
    """DAPO's loss, with advantages z-scored over the minibatch's rows (2506.10910).

        J = 1/sum n_i sum_i sum_t clip(w, A_i)
        A_i = (a_i - mean of all a) / std of all a,  a_i = r_i - mean of the group

    Prompts with equal rewards are dropped. high .26-.28 as published; low .2 is a choice. With
    max_length and cache, in tokens, rewards lose a tenth of DAPO's soft overlong penalty.
    """
    if (max_length is None) != (cache is None):
        raise ValueError(f'max_length={max_length} and cache={cache}; legal is both, or None twice')
    shape = identity
    if max_length is not None and cache is not None:
        shape = shaping.soft_overlong(max_length, cache, weight=0.1)
    return Algorithm(
        advantages=group_mean_baseline(),
        shape=shape,
        keep=shaping.diverse_rewards(),
        prepare=normalise_minibatch(),
        loss=policy_loss(
            ratio=token_ratio(), surrogate=clipped(low, high), aggregate=token_mean(), gates=gates
        ),
    )


@checks.factory('algorithm')
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05, gates: Gates = ()) -> Algorithm:
    """SAPO: a soft gate in place of the clip (2511.20347).

        J = 1/G sum_i 1/n_i sum_t 4/tau sigmoid(tau (w - 1)) A_i,  A_i = (r_i - mean) / std
        slope in w: sech^2(tau/2 (w - 1)) A_i

    tau is tau_positive where A > 0, else tau_negative; both as published.
    """
    return Algorithm(
        advantages=group_zscore(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=soft_gated(tau_positive, tau_negative),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def vc_ppo(
    eps: float = 0.2,
    lam: float = 0.95,
    critic_lam: float | None = 1.0,
    value_coefficient: float = 1.0,
    value_clip: float | None = None,
    gates: Gates = (),
) -> Algorithm:
    """VC-PPO: PPO with decoupled GAE and a pretrained critic (2503.01491).

        J = E_t [clip(w, A) - c1 1/2 (V - R)^2]
        A by GAE(gamma 1, lam),  R by GAE(gamma 1, critic_lam) + V

    lambdas and gamma 1 as published; value_coefficient and value_clip are choices. critic_lam None
    takes the policy's lambda: GAE that is not decoupled. The pretraining, with the policy fixed, is
    `Learner.value_update`, and a run's `critic.pretrain`.
    """
    return Algorithm(
        advantages=gae(1.0, lam, critic_lam),
        loss=add(
            policy_loss(
                ratio=token_ratio(), surrogate=clipped(eps), aggregate=token_mean(), gates=gates
            ),
            scale(value_coefficient, value_loss(aggregate=token_mean(), clip=value_clip)),
        ),
    )


@checks.factory('algorithm')
def vapo(
    low: float = 0.2,
    high: float = 0.28,
    alpha: float = 0.05,
    nll: float = 0.1,
    value_coefficient: float = 1.0,
    value_clip: float | None = None,
    lam: float | None = None,
    critic_lam: float | None = 1.0,
    per_token: bool = True,
    gates: Gates = (),
) -> Algorithm:
    """VAPO: token-mean clip-higher PPO, lambda by length, NLL on correct rows (2504.05118).

        J = E_t [clip(w, A) - c1 1/2 (V - R)^2] + nll E_t+ logp_new,  t+ tokens of correct rows
        A by GAE(gamma 1, lambda_i = 1 - 1/(alpha n_i) in [0, 1]),  R by lambda = critic_lam

    All values as published but value_coefficient and value_clip, choices. The parts that the paper
    leaves out one by one are arguments, or sections of a run's config:

    - decoupled GAE: critic_lam=None takes the policy's lambda for the critic.
    - length-adaptive GAE: alpha=None, lam=.95 is one lambda for all lengths.
    - clip-higher: high=low.
    - token-level loss: per_token=False takes the mean over rows of their tokens' means, in the
      policy term.
    - NLL on correct rows: nll=0.
    - value pretraining, group sampling: `critic.pretrain`, `rollout.group_size`.

    Raises ValueError for alpha beside lam, and for neither.
    """
    if (alpha is None) == (lam is None):
        raise ValueError(
            f'alpha={alpha} and lam={lam}: legal is one of them, alpha for a lambda by the length '
            'of the answer, alpha=None and lam for one that is fixed'
        )
    checks.number('nll', nll, 0)
    if alpha is None:
        assert lam is not None
        estimator = gae(1.0, lam, critic_lam)
    else:
        estimator = length_adaptive_gae(alpha, critic_lam)
    parts = [
        policy_loss(
            ratio=token_ratio(),
            surrogate=clipped(low, high),
            aggregate=token_mean() if per_token else sequence_mean(),
            gates=gates,
        ),
        scale(value_coefficient, value_loss(aggregate=token_mean(), clip=value_clip)),
    ]
    if nll:
        parts.append(scale(nll, positive_nll(aggregate=token_mean())))
    return Algorithm(advantages=estimator, loss=add(*parts))


@checks.factory('algorithm')
def deepseek_v32(
    eps: float = 0.2, beta: float = 1e-3, delta: float = 0.5, gates: Gates = ()
) -> Algorithm:
    """DeepSeek-V3.2: GRPO with an off-policy row mask and the unbiased KL (2512.02556).

        J = 1/G sum_i 1/n_i sum_t [clip(w, A_i) M_i - beta w k3],  A_i = r_i - mean of the group
        M_i = 0 where A_i < 0 and mean_t (logp_behavior - logp_new) > delta, else 1

    w k3 is differentiated through w, which makes it unbiased. Routing and kept ids are replayed.
    eps (low and high), beta and delta are unpublished: choices.
    """
    return Algorithm(
        advantages=group_mean_baseline(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=clipped(eps),
            gates=[off_policy_sequence(delta), *gates],
            penalties=[kl_to_reference(beta, unbiased=True)],
            aggregate=sequence_mean(),
        ),
    )


@checks.factory('algorithm')
def cispo(cap: float = 5.0, gates: Gates = ()) -> Algorithm:
    """CISPO: the weight is truncated, and every token keeps its gradient (2506.13585).

        J = 1/sum n_i sum_i sum_t sg[min(w, cap)] A_i l,  A_i = (r_i - mean) / std of the group

    The paper publishes no cap; 5 is commonly used.
    """
    return Algorithm(
        advantages=group_zscore(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=truncated_weight(cap),
            aggregate=token_mean(),
            gates=gates,
        ),
    )


@checks.factory('algorithm')
def minirl(low: float = 0.2, high: float = 0.27, gates: Gates = ()) -> Algorithm:
    """MiniRL: REINFORCE weighted against the sampler, with PPO's clip as a mask (2512.01374).

        J = 1/G sum_i sum_t M sg[pi_new / pi_behavior] A_i l,  A_i = r_i - mean of the group

    M stops what PPO's clip on pi_new/pi_old would stop; no length normalisation.
    """
    return Algorithm(
        advantages=group_mean_baseline(),
        loss=policy_loss(
            ratio=token_ratio(),
            surrogate=score_function(),
            gates=[
                detached_weight(behavior_ratio()),
                trust_mask(low, high, token_ratio()),
                *gates,
            ],
            aggregate=sequence_sum(),
        ),
    )


@checks.factory('algorithm')
def gmpo(clip: float = 0.4, gates: Gates = ()) -> Algorithm:
    """GMPO: GSPO's ratio of tokens that are cut one by one, inside the mean (2507.20673).

        J = 1/G sum_i A_i exp(mean_t l'),  A_i = (r_i - mean) / std of the group
        l' = l cut to +clip where A_i > 0 and to -clip where A_i < 0

    clip as published, in nats.
    """
    return Algorithm(
        advantages=group_zscore(),
        loss=policy_loss(
            ratio=clipped_sequence_ratio(clip),
            surrogate=unclipped(),
            aggregate=sequence_mean(),
            gates=gates,
        ),
    )


def names() -> tuple[str, ...]:
    """Return the names of all algorithms here, sorted."""
    return tuple(sorted(k for k, v in globals().items() if getattr(v, 'slot', None) == 'algorithm'))


def factory(path: str) -> Any:
    """Import the algorithm factory at a dotted path, or at its last part alone.

    Raises ValueError where there is no such module or name, with the nearest spelling.
    """
    module_name, _, name = path.rpartition('.')
    try:
        module = importlib.import_module(module_name or __name__)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'algorithm {path!r}: {error}. Is its folder on PYTHONPATH? A name without a module is '
            f'one of policyopt.algorithms.{checks.nearest(name, names())}'
        ) from None
    make = vars(module).get(name)
    if not callable(make):
        slots = {k for k, v in vars(module).items() if getattr(v, 'slot', None) == 'algorithm'}
        known = slots or {k for k, v in vars(module).items() if inspect.isfunction(v)}
        found = 'not there' if make is None else f'{type(make).__name__}, not a factory'
        raise ValueError(f'algorithm {path!r}: {found}.{checks.nearest(name, known)}')
    return make


def resolve(path: str, **kwargs: Any) -> Algorithm:
    """Import an algorithm factory and call it.

    Args:
      path: `policyopt.algorithms.gspo`, its last part alone, or any importable factory.
      **kwargs: the factory's arguments; `advantages` may be a name or a section, as in
        `advantages.read`, and `gates` names or sections, as in `losses.gates.read`.

    Raises:
      ValueError: no such module or name, with the nearest spelling.
      TypeError: an argument the factory does not have, with the nearest spelling.
    """
    make = factory(path)
    checks.check_arguments(make, (), kwargs)
    if kwargs.get('advantages') is not None:
        kwargs['advantages'] = read_advantages(kwargs['advantages'], 'advantages')
    if kwargs.get('gates'):
        kwargs['gates'] = read_gates(kwargs['gates'], 'gates')
    algorithm = make(**kwargs)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f'{path} made a {type(algorithm).__name__}, not an Algorithm')
    return algorithm


def __getattr__(name: str) -> Any:
    checks.unknown_name('algorithms', name, globals(), ('algorithm',))
