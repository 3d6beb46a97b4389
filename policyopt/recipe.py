"""What a run is a function of: a config's fields, checked, and what they name, built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from policyopt import (
    algorithms,
    asynchronous,
    base,
    checks,
    data,
    layout,
    models,
    rewards,
    settings,
    shaping,
    turns,
)
from policyopt import critic as critic_lib
from policyopt import learner as learner_lib
from policyopt import reward_judge as judge_lib
from policyopt import rollout as rollout_lib
from policyopt.checkpoint import CheckpointConfig
from policyopt.preferences import PreferencesConfig
from policyopt.sampling import SamplingConfig, allowed_mask
from policyopt.sampling.config import check_config
from policyopt.sections import CriticConfig, Evaluation, Replay, WarmStart
from policyopt.types import Algorithm, keep_all

COUNTS = ('steps', 'epochs', 'minibatches', 'microbatches', 'max_skipped')  # 1 or more


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run is a function of.

    Attributes:
      task, tasks: problems; one data.TaskConfig, or several by name, which are mixed.
      model: fields of models.ModelConfig, where the tokenizer gives vocab_size; or `path`, a
        Hugging Face folder or GGUF file, with overrides that models.load takes. The value head
        comes with algorithms that need a critic.
      tokenizer: characters that a model without `path` knows: those of 'arithmetic', or 'ascii'.
      algorithm: import path of a factory, with its arguments in `algorithm_kw`.
      dynamic_sampling: drop groups whose rewards are all equal, which have no gradient, and draw
        others in their place (arXiv:2503.14476); for algorithms that don't by themselves.
      reward: name of a reward in policyopt.rewards, or import path of a factory of one, with its
        arguments in `reward_kw`; the default takes the task's own scorer. See docs/rewards.md.
      judge: where rewards are computed, and how long they may take.
      preferences: how the run trains a reward model before RL; None for none.
      rollout, sampling, optimizer, evaluation, checkpoint: see their classes.
      warm_start: the supervised stage; None for none.
      asynchronous: answers are drawn ahead of the updates that learn from them; None draws those
        of a step with its own parameters, and waits for all of them.
      steps: RL steps, each of which draws new answers.
      epochs: passes over the rows of a step.
      minibatches: optimizer steps of a pass.
      microbatches: parts of a minibatch, for memory only.
      length_buckets: microbatches by length instead.
      logp_old: the ratio's denominator is the 'sampler's log-prob, or 'recomputed' before the first
        update of a step; corrections for the sampler's own error then see both.
      replay: of support and routing.
      router: coefficients of load-balance and z-loss of a mixture of experts.
      critic: its own trunk or pretraining; None where neither is wanted.
      adapters: low-rank additions that are trained in place of the parameters; the reference policy
        is then the model without them. None trains all parameters.
      chat: render problems as the first message of a chat, by the template that comes with
        model.path; None gives them to the model as they are.
      reference_every: RL steps between syncs of the reference policy; None keeps the start.
      ema: decay of the parameters' moving average, which is then what evaluation measures.
      max_skipped: updates in a row whose loss or gradient is not finite, after which a run stops.
      mesh: (axis, devices) pairs, such as (('fsdp', 4), ('tensor', 2)), that cover all devices; one
        size may be -1, for what the others leave. None puts every GPU or TPU into 'data', and takes
        the first device on CPU; () is the first device alone.
      rules: logical axis -> mesh axis, tuple of them or None, where they differ from
        `sharding.DEFAULT_RULES`.
      seed: of parameters, order of the problems and sampling.
    """

    model: Mapping[str, Any]
    algorithm: str
    rollout: rollout_lib.RolloutConfig
    sampling: SamplingConfig
    optimizer: learner_lib.OptimizerConfig
    evaluation: Evaluation
    task: data.TaskConfig | None = None
    tasks: Mapping[str, data.TaskConfig] = dataclasses.field(default_factory=dict)
    tokenizer: Literal['arithmetic', 'ascii'] = 'arithmetic'
    warm_start: WarmStart | None = None
    algorithm_kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reward: str = 'graded'
    reward_kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judge: rewards.JudgeConfig = rewards.JudgeConfig()
    preferences: PreferencesConfig | None = None
    dynamic_sampling: bool = False
    asynchronous: asynchronous.AsyncConfig | None = None
    steps: int = 100
    epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1
    length_buckets: learner_lib.LengthBuckets | None = None
    logp_old: Literal['sampler', 'recomputed'] = 'sampler'
    replay: Replay = Replay()
    router: learner_lib.RouterLosses = learner_lib.RouterLosses()
    critic: CriticConfig | None = None
    adapters: models.AdapterConfig | None = None
    chat: models.ChatConfig | None = None
    reference_every: int | None = None
    ema: float | None = None
    max_skipped: int = 20
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: tuple[tuple[str, int], ...] | None = None
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        for name in COUNTS:
            checks.number(f'config.{name}', getattr(self, name), 1)
        if self.reference_every is not None:
            checks.number('config.reference_every', self.reference_every, 1)
        if (self.task is None) == (not self.tasks):
            raise ValueError('config has both task and tasks, or neither; legal is one of them')
        rows = self.rollout.prompts * self.rollout.group_size
        parts = self.minibatches * self.microbatches
        if rows % parts:
            raise ValueError(
                f'config.minibatches * config.microbatches is {parts}; legal are divisors of the '
                f'{rows} rows of a step (rollout.prompts * rollout.group_size)'
            )
        if self.adapters is not None and self.adapters.rank == 0:
            raise ValueError(
                'config.adapters.rank is 0: nothing would be trained; legal is 1 or more, or '
                'adapters=None'
            )
        if self.chat is not None and 'path' not in self.model:
            raise ValueError(
                'config.chat has no effect without config.model.path: the template comes with it'
            )
        if self.sampling.temperature == 0:
            raise ValueError('config.sampling.temperature is 0; training needs one above 0')
        if self.replay.routing == 'recompute' and self.logp_old != 'recomputed':
            raise ValueError(
                "config.replay.routing is 'recompute', which needs config.logp_old='recomputed'"
            )
        if not self.replay.support and not self.sampling.truncated:
            raise ValueError(
                'config.replay.support is False, but config.sampling truncates nothing; legal is '
                'True'
            )


class Setup(NamedTuple):
    """What every stage uses.

    Attributes:
      config: as read.
      model: of the policy, and of a critic with its own trunk where the config asks for one.
      params: parameters from a checkpoint; None where they are drawn.
      task, judge: problems, and what judges answers to them, whose processes start when it is used;
        None where they were left out.
      algorithm: as named.
      needed: optional fields that it reads; see rollout.required_fields.
      width: tokens of a row, prompt and answer.
      mesh: the devices; None for one, without a mesh. Everything on them runs in
        `sharding.use(mesh)`.
      truth: what judges measurements, where the judge's reward is that of a model; else None.
      generators: the mesh of each generator; None for one that shares the trainer's devices, ()
        where the config is not asynchronous.
    """

    config: RunConfig
    model: Any
    critic_model: Any
    params: Any
    task: Any  # data.Task
    judge: Any  # rewards.Judge
    algorithm: Algorithm
    needed: frozenset[str]
    width: int
    mesh: Any = None
    truth: Any = None
    generators: Sequence[Any] = ()

    @property
    def measure(self) -> Any:
        """What judges measurements."""
        return self.truth or self.judge


def prepare(config: Mapping[str, Any], problems: bool = True, devices: Any = None) -> Setup:
    """Check a config and build what it names, before anything is compiled.

    Without `problems`, task and judge are left out (None), for what needs the policy alone.
    `devices` are those of another machine, to compile for, where no weights are read; None for all
    of this one.

    Raises ValueError or TypeError naming the field, its value, what is legal and, for names, the
    nearest spelling.
    """
    for name in COUNTS:  # before fields of sections that may be computed from them
        if type(config.get(name)) is int:
            checks.number(f'config.{name}', config[name], 1)
    c = settings.read(RunConfig, config)
    algorithm = algorithms.resolve(c.algorithm, **c.algorithm_kw)
    if c.dynamic_sampling:
        if algorithm.keep is not keep_all:
            raise ValueError(
                f'config.dynamic_sampling has no effect: {c.algorithm} has a keep rule of its own'
            )
        algorithm = algorithm._replace(keep=shaping.diverse_rewards())
    needed = rollout_lib.required_fields(algorithm)
    critic = bool(needed & {'values', 'values_old', 'returns'})
    if c.critic is not None and not critic:
        raise ValueError(f'config.critic has no effect: {c.algorithm} estimates no values')
    _check_fits(c, algorithm, critic)
    if c.reference_every is not None and 'logp_ref' not in needed:
        raise ValueError(
            f'config.reference_every has no effect: no term of {c.algorithm} reads a reference '
            'policy (its KL coefficient may be 0); legal is None'
        )
    rollout_lib.check_groups(algorithm, needed, c.rollout, c.algorithm)
    own = c.critic is not None and c.critic.own
    rules = layout.run_rules(c.rules)
    a, ahead = c.asynchronous, devices is not None
    mine = devices if ahead else asynchronous.split(a and a.devices)[0]
    mesh = layout.run_mesh(c.mesh, rules, mine, ahead)
    model, params = base.make_model(c, critic and not own, mesh, rules, not ahead)
    setup = Setup(
        config=c,
        model=model,
        critic_model=base.with_value_head(model) if own else None,
        params=params,
        task=None,
        judge=None,
        algorithm=algorithm,
        needed=needed,
        width=0,
        mesh=mesh,
        generators=() if a is None or ahead else asynchronous.meshes(a, rules),
    )
    if not problems:
        return setup
    layout.check(mesh, [m for m in (model, setup.critic_model) if m is not None], *layout.rows(c))
    task = data.make_task(c.task or c.tasks, model.tokenizer)
    if a is not None:
        asynchronous.check(c, c.algorithm, algorithm, bool(task.played))
        assert c.rollout.engine is not None  # as it is checked
        slots = {'config.rollout.engine.slots': c.rollout.engine.slots}
        layout.check(setup.generators[0], [model], slots, named='config.asynchronous.mesh')
    if c.rollout.engine is not None and c.rollout.engine.gather:
        layout.check_gather(mesh if a is None else setup.generators[0], model)
    _check_sizes(c, task)
    if algorithm.update.step is not None and c.optimizer != learner_lib.OptimizerConfig():
        raise ValueError(
            f'config.optimizer has no effect: {c.algorithm} takes natural-gradient steps; legal is '
            'an empty section'
        )
    width = task.prompt_width + c.sampling.max_new_tokens
    if task.played:
        width = turns.row_width(c.rollout, c.sampling.stop_ids, task)
    if c.length_buckets is not None and c.length_buckets.widths[-1] < width:
        raise ValueError(
            f'config.length_buckets.widths is {c.length_buckets.widths}; the widest must hold a '
            f'whole row, {width} tokens'
        )
    if c.sampling.max_new_tokens < task.longest_answer and c.warm_start is not None:
        raise ValueError(
            f'config.sampling.max_new_tokens is {c.sampling.max_new_tokens}; the longest answer '
            f'with its end of sequence has {task.longest_answer} tokens'
        )
    spec = rewards.read(c.reward, c.reward_kw, task.scorer, 'config.reward')
    judge_lib.check(spec, c.rollout.steps, c.preferences is not None, needed)
    judge, truth = judge_lib.make_judges(
        spec, task.scorer, c.judge, model.tokenizer, mesh, model.rules
    )
    setup = setup._replace(task=task, judge=judge, truth=truth, width=width)
    check_config(model, c.sampling)
    make_learner(setup)  # for its checks: it compiles nothing
    return setup


def _check_fits(c: RunConfig, algorithm: Algorithm, critic: bool) -> None:
    """Raise ValueError where a critic would never be trained, or `critic.fits` has no effect."""
    fits = None if c.critic is None else c.critic.fits
    natural = algorithm.update.step is not None
    if natural and critic and fits is None:
        raise ValueError(
            f'config.critic has no `fits`, but the natural-gradient steps of {c.algorithm} leave '
            'the critic alone: nothing would train it; legal is 1 or more'
        )
    if not natural and fits is not None:
        raise ValueError(
            f'config.critic.fits has no effect: the loss of {c.algorithm} trains its critic; legal '
            'is None'
        )


def _check_sizes(c: RunConfig, task: data.Task) -> None:
    """Raise ValueError, naming the field, where there are fewer problems than a batch needs."""
    sizes = {'rollout.prompts': c.rollout.prompts}
    if c.warm_start is not None:
        sizes['warm_start.batch'] = c.warm_start.batch
        if not task.held_out:
            raise ValueError(
                'the held_out of config.task is 0, but config.warm_start ends at a held-out '
                'accuracy; legal is 1 or more'
            )
    for name, size in sizes.items():
        try:
            data.batches(task.train, size, c.seed)
        except ValueError as error:
            raise ValueError(f'config.{name} is {size}: {error}') from error


def first_params(setup: Setup) -> Any:
    """Parameters from the checkpoint, or drawn from the seed."""
    if setup.params is not None:
        return setup.params
    return layout.init(setup.model, jax.random.key(setup.config.seed))


def make_learner(setup: Setup) -> learner_lib.Learner:
    """The learner of the RL stage."""
    c = setup.config
    critic = None
    if c.critic is not None:
        critic = critic_lib.Critic(
            learner_lib.make_optimizer(c.critic.optimizer), setup.critic_model
        )
    return learner_lib.make_learner(
        setup.model,
        setup.algorithm,
        learner_lib.make_optimizer(c.optimizer),
        critic=critic,
        ema=c.ema,
        router=c.router,
        routing='recompute' if c.replay.routing == 'recompute' else 'rollout',
        temperature=c.sampling.temperature,
        allowed=allowed_mask(c.sampling, setup.model.config.vocab_size),
        microbatches=c.microbatches,
        length_buckets=c.length_buckets,
    )


def critic_params(setup: Setup, params: Any) -> Any:
    """First parameters of a critic's own trunk: copies of the policy's, and a fresh value head."""
    if setup.critic_model is None:
        return None
    fresh = layout.init(setup.critic_model, jax.random.key(setup.config.seed))
    return {name: jax.tree.map(jnp.copy, params.get(name, fresh[name])) for name in fresh}
