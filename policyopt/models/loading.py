"""Checkpoints in and out: names checked first, then tensor by tensor into the target sharding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from policyopt import checks
from policyopt.models import gguf_file, hf
from policyopt.models.config import ModelConfig
from policyopt.models.names import Entry, entries
from policyopt.models.tensors import (
    FileTensor,
    open_safetensors,
    read,
    to_file,
    write_safetensors,
    write_text,
)
from policyopt.models.tokenizer import Tokenizer, read_tokenizer
from policyopt.models.transformer import Model, Params, build
from policyopt.sharding import param_shardings

# Constants that old checkpoints store beside the weights; the config says the same.
CONSTANTS = ('rotary_emb.inv_freq',)
GENERATION = 'generation_config.json'
SHARD_BYTES = 5 * 10**9
# Fields of ModelConfig that `load` may set: how to compute, not what the tensors are.
OVERRIDES = (
    'dtype',
    'param_dtype',
    'precision',
    'remat',
    'attention',
    'moe_backend',
    'value_head',
    'reward_head',
    'max_length',
    'bos_id',
    'pad_id',
    'eos_ids',
)


def load(
    source: str | pathlib.Path, *, mesh: Any = None, rules: Any = None, **overrides: Any
) -> tuple[Model, Params]:
    """Model and params of a Hugging Face folder or of a GGUF file.

    Every tensor's name, shape and dtype is checked before memory is allocated; then tensors are
    read one at a time, and each device gets its own part: beside the result, the host holds about
    one tensor.

    `model.config.eos_ids` are the ids that end a text: those of generation_config.json, or else of
    config.json, and the tokenizer's. () and a `tokenizer.eos_id` of None say that the checkpoint
    names none. A `*ForSequenceClassification` checkpoint of one label has config.reward_head.

    Args:
      source: a folder with config.json and safetensors (one file, or an index and shards), or a
        .gguf file of a Llama, Qwen2 or Qwen3 model.
      mesh: devices to spread the params over by the rules; None: the default device.
      rules: logical axis to mesh axis (`sharding.make_rules`); the model keeps them.
      **overrides: fields of ModelConfig that change no tensor of the file: those in OVERRIDES.
        `dtype` and `param_dtype` are by default the narrowest type that holds every tensor of the
        checkpoint exactly: tensors stored narrower than others are widened, none is rounded. A
        `param_dtype` that is given rounds to it. A scalar head that is asked for and not in the
        checkpoint starts at zero.

    Raises FileNotFoundError, and ValueError naming the tensor, the config field or the override.
    """
    _check_overrides(overrides)
    source = pathlib.Path(source)
    if source.suffix == '.gguf':
        config, tensors, listed, tokenizer = gguf_file.read(source)
    else:
        config, tokenizer, _ = _read_folder(source)
        tensors = open_safetensors(source)
        listed = list(entries(config, config.family))
    if isinstance(tokenizer, Tokenizer) and tokenizer.eos_id is None and config.eos_ids:
        tokenizer = dataclasses.replace(tokenizer, eos_id=config.eos_ids[0])
    _check(tensors, listed, str(source), config.tied)
    stored = _widest(tensors[entry.name].dtype for entry in listed)
    config = _override(config, {'dtype': stored, 'param_dtype': stored, **overrides})
    model = build(config, tokenizer, rules)
    return model, _place(model, tensors, listed, mesh)


def describe(source: str | pathlib.Path, *, rules: Any = None, **overrides: Any) -> Model:
    """The model that `load` makes, without its weights, which need not be there.

    Args:
      source, rules, **overrides: as `load`. `dtype` and `param_dtype` are by default what
        config.json says, or else float32: what is stored is not looked at.

    Raises as `load` does, but for tensors.
    """
    _check_overrides(overrides)
    source = pathlib.Path(source)
    if source.suffix == '.gguf':
        config, _, _, tokenizer = gguf_file.read(source)
        stored = 'float32'
    else:
        config, tokenizer, data = _read_folder(source)
        stored = data.get('dtype') or data.get('torch_dtype') or 'float32'
    return build(
        _override(config, {'dtype': stored, 'param_dtype': stored, **overrides}), tokenizer, rules
    )


def _read_folder(source: pathlib.Path) -> tuple[ModelConfig, Any, dict[str, Any]]:
    """Config and tokenizer of a Hugging Face folder, and its config.json."""
    config_file = source / 'config.json'
    if not config_file.exists():
        raise FileNotFoundError(f'{source} has no config.json, and is no .gguf file')
    data = json.loads(config_file.read_text())
    config, tokenizer = hf.read_config(data), read_tokenizer(source)
    return dataclasses.replace(config, eos_ids=_ends(source, config, tokenizer)), tokenizer, data


def _ends(folder: pathlib.Path, config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: those to generate with, else config.json's, and the tokenizer's."""
    file, ends = folder / GENERATION, ()
    if file.exists():
        ends = hf.read_ends(json.loads(file.read_text()))
    ends = ends or config.eos_ids
    own = None if tokenizer is None else tokenizer.eos_id
    return tuple(dict.fromkeys(ends if own is None else (*ends, own)))


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is no override: the file fixes what its tensors mean."""
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    for name in overrides:
        if name not in OVERRIDES:
            fixed = ': the checkpoint fixes it' if name in fields else ''
            raise ValueError(
                f'load() has no override {name!r}{fixed}.{checks.nearest(name, OVERRIDES)}'
            )


def _widest(dtypes: Iterable[np.dtype]) -> str:
    """Narrowest float type that holds numbers of all these exactly."""
    return np.dtype(functools.reduce(jnp.promote_types, dtypes)).name


def _override(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    for name in ('value_head', 'reward_head'):
        if getattr(config, name) and not overrides.get(name, True):
            raise ValueError(f'{name}={overrides[name]!r}: the checkpoint has one; legal: True')
    return dataclasses.replace(config, **overrides)


def _check(tensors: Mapping[str, FileTensor], listed: list[Entry], source: str, tied: bool) -> None:
    """Raise ValueError naming the first missing, extra or misshapen tensors."""
    wanted = {entry.name: entry.how.file for entry in listed}
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not name.endswith(CONSTANTS)]
    if tied and 'lm_head.weight' in extra:
        _check_tied(tensors, listed[0].name, source)
        extra.remove('lm_head.weight')
    for what, names in (('lacks', missing), ('has no use for', extra)):
        if names:
            shown = ', '.join(names[:5]) + (f' and {len(names) - 5} more' if names[5:] else '')
            hint = checks.hint(names[0], extra if what == 'lacks' else missing)
            raise ValueError(f'{source}: the model {what} {shown}.{hint}')
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f'{source}: tensor {name!r} has shape {tensors[name].shape}; '
                f'the config says {shape}'
            )


def _check_tied(tensors: Mapping[str, FileTensor], name: str, source: str) -> None:
    """A tied checkpoint may repeat its embedding as lm_head; it must be the same numbers."""
    a, b = tensors[name], tensors['lm_head.weight']
    step = 1024
    same = a.shape == b.shape and all(
        np.array_equal(a.rows(i, min(i + step, a.shape[0])), b.rows(i, min(i + step, a.shape[0])))
        for i in range(0, a.shape[0], step)
    )
    if not same:
        raise ValueError(
            f'{source}: tie_word_embeddings is true, but lm_head.weight differs from {name}'
        )


def _place(
    model: Model, tensors: Mapping[str, FileTensor], listed: list[Entry], mesh: Any
) -> Params:
    """Read every parameter into its sharding."""
    shapes, shardings = _flat(model.shapes()), {}
    if mesh is not None:
        shardings = _flat(param_shardings(model.axes(), model.shapes(), mesh, model.rules))
    params = {}
    for path, group in itertools.groupby(listed, lambda entry: entry.path):
        params[path] = _assemble(shapes[path], shardings.get(path), list(group), tensors)
    for path in shapes.keys() - params.keys():
        assert path in (('value',), ('reward',)), path
        params[path] = jnp.zeros(shapes[path].shape, shapes[path].dtype, device=shardings.get(path))
    return traverse_util.unflatten_dict(params)


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return cast(dict[tuple[str, ...], Any], traverse_util.flatten_dict(tree))


def _assemble(
    shape: Any, sharding: Any, parts: list[Entry], tensors: Mapping[str, FileTensor]
) -> jax.Array:
    """One parameter from its parts, every device's shard filled part by part, in place."""
    dtype, depth = np.dtype(shape.dtype), len(parts[0].index)
    by_index = {part.index: part for part in parts}
    lead, rest = shape.shape[:depth], shape.shape[depth:]
    # Entries of the stacked axes in one device's shard; step i fills entry i of every shard.
    local = lead if sharding is None else sharding.shard_shape(shape.shape)[:depth]
    counts = tuple(n // m for n, m in zip(lead, local, strict=True))

    def step(at: tuple[int, ...]) -> jax.Array:
        held: dict[Any, np.ndarray] = {}  # devices that hold the same slice read it once

        def part(index: Any) -> np.ndarray:
            spans = [s.indices(n)[:2] for s, n in zip(index, counts + rest, strict=True)]
            key = tuple(spans)
            if key not in held:
                shard = [start for start, _ in spans[:depth]]
                which = tuple(i * m + j for i, m, j in zip(shard, local, at, strict=True))
                entry, cut = by_index[which], tuple(slice(*span) for span in spans[depth:])
                data = read(tensors[entry.name], entry.how, cut, dtype)
                held[key] = data.reshape((1,) * depth + data.shape)
            return held[key]

        if sharding is None:
            return jax.device_put(part(tuple(slice(None) for _ in counts + rest)))
        return jax.make_array_from_callback(counts + rest, sharding, part)

    if not depth:
        return step(())
    insert = _insert if sharding is None else _sharded_insert(sharding)
    out = jnp.zeros(shape.shape, dtype, device=sharding)
    for at in itertools.product(*map(range, local)):
        out = insert(out, step(at), at)
    return out


def _update(stacked: jax.Array, part: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    start = (*index, *(0,) * (part.ndim - len(index)))
    return jax.lax.dynamic_update_slice(stacked, part, start)


_insert = jax.jit(_update, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _sharded_insert(sharding: Any) -> Any:
    """`_update` of each device's own shard: one program for all devices, no communication."""
    spec, whole = sharding.spec, jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        _update, mesh=sharding.mesh, in_specs=(spec, spec, whole), out_specs=spec, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def save(
    model: Model, params: Params, folder: str | pathlib.Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a Hugging Face folder: two configs, safetensors and, where there is one, tokenizer.

    `load` of it gives the same params bit for bit, and the same function; what of the config
    survives is said at `hf.write_config`. Tensors are fetched and written one at a time; more than
    `shard_bytes` of them become several files and an index. With several processes the first one
    writes, to a folder that it can reach. A model that no Hugging Face family can express (shared
    experts, sigmoid routing) is written with model_type 'policyopt'.

    What an earlier model left in the folder is replaced or removed: generation_config.json, and the
    weights (model.safetensors, model-N-of-M.safetensors and their index). config.json goes first
    and comes last: a folder where saving was interrupted cannot be loaded.

    Raises ValueError, before anything is written, naming the parameter that the model lacks, or
    whose shape or dtype is not the model's.
    """
    folder, config = pathlib.Path(folder), model.config
    if model.adapters is not None:
        raise ValueError('the model has adapters, which no file of its family holds: `merge` first')
    flat = _flat(params)
    _check_params(flat, _flat(model.shapes()))
    dtypes = {path: np.dtype(leaf.dtype) for path, leaf in flat.items()}
    listed = list(entries(config, hf.family_of(config)))
    stream = _fetch(flat, listed)
    if jax.process_index():
        for _ in stream:  # every process takes part in gathering
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').unlink(missing_ok=True)
    shapes = {entry.name: (entry.how.file, dtypes[entry.path]) for entry in listed}
    write_safetensors(folder, shapes, stream, shard_bytes)
    if hasattr(model.tokenizer, 'save'):
        model.tokenizer.save(folder)
    ids = hf.write_generation_config(config)
    write_text(folder / GENERATION, json.dumps(ids, indent=2) + '\n')
    write_text(folder / 'config.json', json.dumps(hf.write_config(config), indent=2) + '\n')


def _check_params(flat: Mapping[tuple[str, ...], Any], wanted: Mapping[tuple[str, ...], Any]):
    for path in sorted(set(flat) ^ set(wanted)):
        raise ValueError(f'params and the model differ in {".".join(path)!r}')
    for path, leaf in flat.items():
        for what in ('shape', 'dtype'):
            found, legal = getattr(leaf, what), getattr(wanted[path], what)
            if found != legal:
                raise ValueError(
                    f'parameter {".".join(path)!r} has {what} {found}; the model says {legal}'
                )


def _fetch(
    flat: Mapping[tuple[str, ...], jax.Array], listed: list[Entry]
) -> Iterable[tuple[str, np.ndarray]]:
    for entry in listed:
        part = flat[entry.path][entry.index] if entry.index else flat[entry.path]
        if not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        yield entry.name, to_file(np.asarray(part), entry.how)
