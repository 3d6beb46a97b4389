"""Hugging Face config.json to and from ModelConfig."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from policyopt.checks import one_of
from policyopt.models.config import ModelConfig, RopeScaling
from policyopt.models.moe import MoEConfig

FAMILIES = ('llama', 'qwen2', 'qwen3', 'qwen3_moe', 'mixtral')
OWN = 'policyopt'  # family of models that none of the others can express
ARCHITECTURES = {
    'llama': 'LlamaForCausalLM',
    'qwen2': 'Qwen2ForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
    'qwen3_moe': 'Qwen3MoeForCausalLM',
    'mixtral': 'MixtralForCausalLM',
}
CLASSIFIER = 'ForSequenceClassification'  # ends the name of a trunk with `score.weight` on top
# What a config.json may leave out, where families differ.
DEFAULTS: dict[str, dict[str, Any]] = {
    'llama': {},
    'qwen2': {},
    'qwen3': {'head_dim': 128},
    'qwen3_moe': {'head_dim': 128, 'norm_topk_prob': False},
    'mixtral': {'rope_theta': 1e6, 'rms_norm_eps': 1e-5},
}
# Settings that change the function and that this decoder does not have: name -> value it must have.
FIXED: dict[str, Any] = {
    'attention_bias': False,
    'mlp_bias': False,
    'use_sliding_window': False,
    'partial_rotary_factor': 1.0,
    'quantization_config': None,
}
# Settings of each kind of rotary scaling, in RopeScaling's order; each must be there.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    'default': (),
    'linear': ('factor',),
    'llama3': (
        'factor',
        'low_freq_factor',
        'high_freq_factor',
        'original_max_position_embeddings',
    ),
}


def read_config(data: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json's contents.

    A sequence classifier with one label is a trunk with a scalar reward head. It has no output
    matrix, so here it is tied: its logits are there, and mean nothing.

    Raises ValueError, naming the field, for a model_type, activation, rotary scaling or attention
    setting that this decoder does not have, for a missing size, and for more than one label.
    """
    family = data.get('model_type')
    one_of('model_type', family, (*FAMILIES, OWN))
    if family == OWN:
        return _read_own(data[OWN])
    get = {**DEFAULTS[str(family)], **{k: v for k, v in data.items() if v is not None}}
    _refuse(get)
    theta, scaling = _read_rope(data, str(family))
    scored = get.get('reward_head', False)
    classifier = not scored and _is_classifier(get)
    fields: dict[str, Any] = {
        'vocab_size': _size(get, 'vocab_size'),
        'embed_dim': _size(get, 'hidden_size'),
        'num_layers': _size(get, 'num_hidden_layers'),
        'num_heads': _size(get, 'num_attention_heads'),
        'num_kv_heads': get.get('num_key_value_heads') or _size(get, 'num_attention_heads'),
        'head_dim': get.get('head_dim', 0),
        'mlp_dim': _size(get, 'intermediate_size'),
        'tied': get.get('tie_word_embeddings', False) or classifier,
        'qkv_bias': family == 'qwen2',
        'qk_norm': family in ('qwen3', 'qwen3_moe'),
        'norm_eps': get.get('rms_norm_eps', 1e-6),
        'rope_theta': theta,
        'rope_scaling': scaling,
        'max_length': get.get('max_position_embeddings', 4096),
        'value_head': get.get('value_head', False),
        'reward_head': scored or classifier,
        'bos_id': get.get('bos_token_id'),
        'pad_id': get.get('pad_token_id'),
        'eos_ids': _ids(get.get('eos_token_id')),
        'family': str(family),
    }
    if family in ('qwen3_moe', 'mixtral'):
        fields |= _read_moe(get, str(family))
    return ModelConfig(**fields)


def _is_classifier(get: Mapping[str, Any]) -> bool:
    if not any(name.endswith(CLASSIFIER) for name in get.get('architectures') or ()):
        return False
    labels = len(get.get('id2label') or ()) or get.get('num_labels', 1)
    if labels != 1:
        raise ValueError(f'num_labels={labels} is not supported; legal: 1, a scalar reward')
    return True


def read_ends(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text by a generation_config.json's contents; () where it names none."""
    return _ids(data.get('eos_token_id'))


def write_generation_config(config: ModelConfig) -> dict[str, Any]:
    """Contents of generation_config.json: the special tokens."""
    return {
        'bos_token_id': config.bos_id,
        'pad_token_id': config.pad_id,
        'eos_token_id': _write_ids(config.eos_ids),
    }


def _read_moe(get: Mapping[str, Any], family: str) -> dict[str, Any]:
    experts = get.get('num_experts') or _size(get, 'num_local_experts')
    renormalise = family == 'mixtral' or get['norm_topk_prob']
    moe = MoEConfig(experts, _size(get, 'num_experts_per_tok'), renormalise=renormalise)
    if family == 'mixtral':
        return {'moe': moe, 'expert_dim': _size(get, 'intermediate_size'), 'mlp_dim': 0}
    dense, step = set(get.get('mlp_only_layers') or ()), get.get('decoder_sparse_step', 1)
    count = _size(get, 'num_hidden_layers')
    layers = tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)
    if not layers:
        raise ValueError(
            f'mlp_only_layers={sorted(dense)} and decoder_sparse_step={step} leave '
            'no mixture layer: model_type qwen3 is the dense model'
        )
    return {
        'moe': moe,
        'expert_dim': _size(get, 'moe_intermediate_size'),
        'moe_layers': None if len(layers) == count else layers,
    }


def _refuse(get: Mapping[str, Any]) -> None:
    one_of('hidden_act', get.get('hidden_act', 'silu'), ('silu', 'swish'))
    for field, value in FIXED.items():
        if get.get(field, value) != value:
            raise ValueError(f'{field}={get[field]!r} is not supported; legal: {value!r}')
    window = get.get('sliding_window') if get.get('use_sliding_window', True) else None
    if window is not None and window < get.get('max_position_embeddings', math.inf):
        raise ValueError(f'sliding_window={window} is not supported; legal: null')
    kinds = set(get.get('layer_types') or ()) - {'full_attention'}
    if kinds:
        raise ValueError(f'layer_types has {sorted(kinds)}; legal: full_attention')


def _read_rope(data: Mapping[str, Any], family: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    A checkpoint may spell them both ways; it must then say the same twice.
    """
    found = {k: _rope(k, data[k]) for k in ('rope_parameters', 'rope_scaling') if data.get(k)}
    scalings = [dict(rope, rope_theta=None) for rope in found.values()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(
            f'rope_parameters={data["rope_parameters"]!r} and rope_scaling='
            f'{data["rope_scaling"]!r} disagree; legal: one of them, or the same in both'
        )
    bases = {'rope_theta': data.get('rope_theta')}
    bases |= {f'{name}.rope_theta': rope.get('rope_theta') for name, rope in found.items()}
    bases = {name: _float(name, base) for name, base in bases.items() if base is not None}
    if len(set(bases.values())) > 1:
        raise ValueError(f'rotary bases disagree: {bases}')
    theta = next(iter(bases.values()), DEFAULTS[family].get('rope_theta', 10000.0))
    rope = next(iter(found.values()), {'rope_type': 'default'})
    kind = rope['rope_type']
    if kind == 'default':
        return theta, None
    factor, *llama3 = (_float(name, rope.get(name)) for name in ROPE_FIELDS[kind])
    if kind == 'linear':
        return theta, RopeScaling(kind, factor)
    low, high, original = llama3
    return theta, RopeScaling(kind, factor, low, high, int(original))


def _rope(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling of the rotary settings, checked, with its kind as `rope_type`."""
    rope = {name: value for name, value in given.items() if value is not None}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f'{where}[{name!r}]={value!r}: settings by type of layer are not supported; '
                'legal: one setting for all layers'
            )
    kinds = {name: rope.pop(name) for name in ('rope_type', 'type') if name in rope}
    kind = next(iter(kinds.values()), 'default')
    if len(set(kinds.values())) > 1:
        raise ValueError(f'{where}: rope_type and type disagree: {kinds}')
    one_of(f'{where}.rope_type', kind, tuple(ROPE_FIELDS))
    if rope.pop('partial_rotary_factor', 1.0) != 1.0:
        raise ValueError(f'{where}.partial_rotary_factor is not supported; legal: 1.0')
    for name in rope:
        one_of(f'a key of {where} of rope_type {kind!r}', name, ('rope_theta', *ROPE_FIELDS[kind]))
    return {'rope_type': kind, **rope}


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'config.json: rotary setting {name}={value!r} must be a number')
    return float(value)


def _size(get: Mapping[str, Any], name: str) -> int:
    value = get.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f'config.json: {name}={value!r} must be a positive integer')
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_own(data: Mapping[str, Any]) -> ModelConfig:
    fields = dict(data)
    if fields.get('moe'):
        fields['moe'] = MoEConfig(**fields['moe'])
        fields['moe_layers'] = fields['moe_layers'] and tuple(fields['moe_layers'])
    if fields.get('rope_scaling'):
        fields['rope_scaling'] = RopeScaling(**fields['rope_scaling'])
    fields['eos_ids'] = tuple(fields['eos_ids'])
    return ModelConfig(**fields)


def family_of(config: ModelConfig) -> str:
    """`model_type` that a model is saved as: its own where it fits, else the first that does."""
    for family in (config.family, *FAMILIES):
        if family in FAMILIES and _expressed(config, family):
            return family
    return OWN


def _expressed(config: ModelConfig, family: str) -> bool:
    """Whether config.json of this family can say everything that the model's function needs."""
    bias, norm = family == 'qwen2', family in ('qwen3', 'qwen3_moe')
    if (config.qkv_bias, config.qk_norm) != (bias, norm):
        return False
    if family not in ('qwen3_moe', 'mixtral'):
        return config.moe is None
    moe = config.moe
    if moe is None or moe != MoEConfig(
        moe.experts, moe.top_k, renormalise=moe.renormalise, precision=moe.precision
    ):
        return False
    mixed = 'dense' in config.kinds or not moe.renormalise
    return family == 'qwen3_moe' or not mixed


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Contents of config.json; `read_config` of it gives the same function of the same params.

    Kept are the architecture, sizes, scalar heads, `max_length`, token ids and `param_dtype`. How
    to compute is not: `precision`, `moe.precision`, `remat`, `attention` and `moe_backend` are
    read back as the defaults, except for model_type 'policyopt', which keeps them; `dtype` is read
    back as the type of the tensors, and an empty `family` as the family that was chosen.
    """
    family = family_of(config)
    if family == OWN:
        return {'model_type': OWN, OWN: {**dataclasses.asdict(config), 'family': OWN}}
    data: dict[str, Any] = {
        'architectures': [ARCHITECTURES[family]],
        'model_type': family,
        'dtype': config.param_dtype,
        'hidden_act': 'silu',
        'vocab_size': config.vocab_size,
        'hidden_size': config.embed_dim,
        'intermediate_size': config.expert_dim if family == 'mixtral' else config.mlp_dim,
        'num_hidden_layers': config.num_layers,
        'num_attention_heads': config.num_heads,
        'num_key_value_heads': config.num_kv_heads,
        'head_dim': config.head_dim,
        'max_position_embeddings': config.max_length,
        'rms_norm_eps': config.norm_eps,
        'tie_word_embeddings': config.tied,
        **_write_rope(config),
        **write_generation_config(config),
    }
    for name in ('value_head', 'reward_head'):
        if getattr(config, name):
            data[name] = True
    if config.reward_head and config.tied:  # its tensors are those of a classifier
        name = ARCHITECTURES[family].replace('ForCausalLM', CLASSIFIER)
        labels = {'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}}
        data |= {'architectures': [name], **labels}
    if config.moe is not None:
        data |= {
            'num_local_experts': config.moe.experts,
            'num_experts_per_tok': config.moe.top_k,
        }
    if config.moe is not None and family == 'qwen3_moe':
        dense = [i for i, kind in enumerate(config.kinds) if kind == 'dense']
        data |= {
            'num_experts': config.moe.experts,
            'moe_intermediate_size': config.expert_dim,
            'norm_topk_prob': config.moe.renormalise,
            'decoder_sparse_step': 1,
            'mlp_only_layers': dense,
            'intermediate_size': config.mlp_dim or config.expert_dim,
        }
    return data


def _write_ids(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) > 1:
        return list(ids)
    return ids[0] if ids else None


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """Rotary settings in both spellings, so that old and new readers agree."""
    scaling = config.rope_scaling
    more: dict[str, Any] = {'rope_type': 'default'}
    if scaling is not None:
        more = {'rope_type': scaling.kind, 'factor': scaling.factor}
        if scaling.kind == 'llama3':
            more |= {
                'low_freq_factor': scaling.low,
                'high_freq_factor': scaling.high,
                'original_max_position_embeddings': scaling.original_length,
            }
    return {
        'rope_theta': config.rope_theta,
        'rope_scaling': more if scaling is not None else None,
        'rope_parameters': {'rope_theta': config.rope_theta, **more},
    }
