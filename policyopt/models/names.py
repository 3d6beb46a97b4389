"""Which tensor of a Hugging Face checkpoint is which part of which parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from policyopt.models.config import ModelConfig
from policyopt.models.tensors import Layout, layout


class Entry(NamedTuple):
    """A tensor of a checkpoint, and the part of a parameter that it is.

    Attributes:
      path: keys of the parameter in the params dict.
      index: position in the parameter's stacked axes: () or (layer,) or (layer, expert).
      name: of the tensor.
      how: from the tensor to the part.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    name: str
    how: Layout


def entries(config: ModelConfig, family: str) -> Iterator[Entry]:
    """Every tensor of a checkpoint of this family, parameter by parameter, layers in order."""
    width, vocab = config.embed_dim, config.vocab_size
    table = layout((vocab, width))
    yield Entry(('embed',), (), 'model.embed_tokens.weight', table)
    yield Entry(('norm',), (), 'model.norm.weight', layout((width,)))
    if not config.tied:
        yield Entry(('head',), (), 'lm_head.weight', table)
    for flag, key, name in (
        (config.value_head, 'value', 'value_head.weight'),
        (config.reward_head, 'reward', 'score.weight'),
    ):
        if flag:
            yield Entry((key,), (), name, layout((width,), file=(1, width)))
    for kind in dict.fromkeys(config.kinds):
        layers = [i for i, k in enumerate(config.kinds) if k == kind]
        parts = attention_parts(config) + (
            mlp_parts(config) if kind == 'dense' else moe_parts(config, family)
        )
        for path, name, how in parts:
            for place, layer in enumerate(layers):
                prefix = f'model.layers.{layer}.'
                if '{e}' not in name:
                    yield Entry((kind, *path), (place,), prefix + name, how)
                    continue
                assert config.moe is not None
                for e in range(config.moe.experts):
                    yield Entry((kind, *path), (place, e), prefix + name.format(e=e), how)


Part = tuple[tuple[str, ...], str, Layout]


def attention_parts(config: ModelConfig) -> list[Part]:
    """Norms and attention of a layer: parameter, tensor name, layout. Kernels are [out,in]."""
    width, head = config.embed_dim, config.head_dim
    norm = layout((width,))
    out: list[Part] = [
        (('norm1',), 'input_layernorm.weight', norm),
        (('norm2',), 'post_attention_layernorm.weight', norm),
    ]
    for name, heads in (
        ('q', config.num_heads),
        ('k', config.num_kv_heads),
        ('v', config.num_kv_heads),
    ):
        at, proj = ('attention', name), f'self_attn.{name}_proj'
        kernel = layout((heads, head, width), (2, 0, 1), (heads * head, width))
        out.append((at, f'{proj}.weight', kernel))
        if config.qkv_bias:
            bias = layout((heads, head), file=(heads * head,))
            out.append((('attention', f'{name}_bias'), f'{proj}.bias', bias))
        if config.qk_norm and name != 'v':
            path = ('attention', f'{name}_norm')
            out.append((path, f'self_attn.{name}_norm.weight', layout((head,))))
    heads = config.num_heads
    back = layout((width, heads, head), (1, 2, 0), (width, heads * head))
    return [*out, (('attention', 'o'), 'self_attn.o_proj.weight', back)]


def mlp_parts(config: ModelConfig) -> list[Part]:
    """A dense feed-forward layer."""
    return _swiglu(('mlp',), 'mlp.{}_proj.weight', config.embed_dim, config.mlp_dim)


def moe_parts(config: ModelConfig, family: str) -> list[Part]:
    """A mixture of experts; `{e}` in a name is the expert."""
    moe, width = config.moe, config.embed_dim
    assert moe is not None
    base = 'block_sparse_moe' if family == 'mixtral' else 'mlp'
    out: list[Part] = [(('mlp', 'router'), f'{base}.gate.weight', layout((moe.experts, width)))]
    expert = base + '.experts.{{e}}.{}_proj.weight'
    names = {}
    if family == 'mixtral':
        expert, names = base + '.experts.{{e}}.{}.weight', {'gate': 'w1', 'up': 'w3', 'down': 'w2'}
    out += _swiglu(('mlp',), expert, width, config.expert_dim, names)
    if moe.selection_bias:
        bias = layout((moe.experts,))
        out.append((('mlp', 'bias'), f'{base}.gate.e_score_correction_bias', bias))
    if moe.shared_experts:
        inner = config.expert_dim * moe.shared_experts
        at, name = ('mlp', 'shared'), base + '.shared_expert.{}_proj.weight'
        out += _swiglu(at, name, width, inner)
    if config.shared_gate:
        gate = layout((width,), file=(1, width))
        out.append((('mlp', 'shared', 'shared_gate'), f'{base}.shared_expert_gate.weight', gate))
    return out


def _swiglu(
    at: tuple[str, ...], name: str, width: int, inner: int, names: dict[str, str] | None = None
) -> list[Part]:
    names = names or {'gate': 'gate', 'up': 'up', 'down': 'down'}
    into, back = layout((inner, width), (1, 0)), layout((width, inner), (1, 0))
    return [
        ((*at, key), name.format(names[key]), back if key == 'down' else into)
        for key in ('gate', 'up', 'down')
    ]
