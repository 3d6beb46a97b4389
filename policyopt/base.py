"""The model that a run starts from, and what adapters on it belong to."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from policyopt import data, models, settings, sharding
from policyopt.checkpoint import CheckpointError, fingerprint
from policyopt.models import adapters, chat


def make_model(
    c: Any, value_head: bool, mesh: Any, rules: Any, weights: bool = True
) -> tuple[Any, Any]:
    """The model that a `recipe.RunConfig` describes or names, and its parameters.

    They are None where they are drawn later (`Model.init`), and without `weights`. Raises
    ValueError naming the field.
    """
    if 'path' in c.model:
        model, params = _loaded(c, value_head, mesh, rules, weights)
    else:
        model, params = _described(c, value_head, rules), None
    if c.adapters is None:
        return model, params
    adapters.axes(c.adapters, model.axes())  # for its check of the targets
    if params is not None:
        model, params = models.attach(model, params, c.adapters, jax.random.key(c.seed))
        if mesh is not None:
            own = {adapters.KEY: params[adapters.KEY]}
            axes = {adapters.KEY: model.axes()[adapters.KEY]}
            params |= jax.device_put(own, sharding.param_shardings(axes, own, mesh, model.rules))
        return model, params
    return dataclasses.replace(model, adapters=c.adapters), None


def _loaded(c: Any, value_head: bool, mesh: Any, rules: Any, weights: bool) -> tuple[Any, Any]:
    if c.tokenizer != 'arithmetic':
        raise ValueError(
            f'config.tokenizer is {c.tokenizer!r}, but config.model.path brings its own; leave '
            'it out'
        )
    path = c.model['path']
    overrides = {name: value for name, value in c.model.items() if name != 'path'}
    if value_head:
        overrides.setdefault('value_head', True)
    if weights:
        model, params = models.load(path, mesh=mesh, rules=dict(rules), **overrides)
    else:
        model, params = models.describe(path, rules=dict(rules), **overrides), None
    if model.tokenizer is None:
        raise ValueError(f'config.model.path is {path!r}, which has no tokenizer')
    if c.chat is not None:
        return with_chat(model, c.chat), params
    if not model.config.eos_ids and c.sampling.eos_id is None:
        raise ValueError(
            f'config.model.path is {path!r}, which names no end of sequence: no answer would end; '
            'set config.model.eos_ids'
        )
    return model, params


def with_chat(model: Any, config: models.ChatConfig) -> Any:
    """The model, whose tokenizer renders problems as chats and whose answers end as in chats.

    Raises ValueError as `chat.make_chat` does. Warns where conversations of several turns are
    refused: runs have one, and are not affected.
    """
    tokenizer = model.tokenizer
    made, ends = chat.make_chat(tokenizer, config, model.config.vocab_size, model.config.eos_ids)
    if made.rewrites:
        warnings.warn(f'{made.rewrites}; chats of several turns are refused', stacklevel=2)
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, eos_ids=ends),
        tokenizer=dataclasses.replace(tokenizer, eos_id=ends[0], chat=made),
    )


def _described(c: Any, value_head: bool, rules: Any) -> Any:
    tokenizer = {'arithmetic': data.arithmetic_tokenizer, 'ascii': data.ascii_tokenizer}[
        c.tokenizer
    ]()
    shape = {'vocab_size': tokenizer.vocab_size, 'value_head': value_head, **c.model}
    config = settings.read(models.ModelConfig, shape, 'config.model')
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f'config.model.vocab_size is {config.vocab_size}; the tokenizer has '
            f'{tokenizer.vocab_size} ids'
        )
    return models.build(config, tokenizer, dict(rules))


def with_value_head(model: Any) -> Any:
    """A model of the same shape with a value head, for a critic's own trunk."""
    config = dataclasses.replace(model.config, value_head=True)
    return models.build(config, model.tokenizer, dict(model.rules))


def base_of(model: Any, path: str | None, params: Any) -> dict[str, Any] | None:
    """Which base adapters belong to: path and digest of the parameters; None without adapters."""
    if model.adapters is None:
        return None
    return {'path': path, 'digest': fingerprint(adapters.frozen(params))}


def check_base(run: Any, notes: Mapping[str, Any], base: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError where the adapters of a checkpoint belong to another base than this."""
    saved = notes.get('base')
    if base is not None and saved != base:
        raise CheckpointError(
            f'the adapters in {run} were trained on the base {saved}, but this one is {base}: put '
            'the one that they belong to back, or name another --workdir'
        )
