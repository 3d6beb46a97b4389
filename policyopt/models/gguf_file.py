"""GGUF files: configuration, tensors and tokenizer of a Llama-family model.

Quantised tensors are dequantised as the `gguf` package does it, a block of rows at a time.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from policyopt.checks import one_of
from policyopt.models.config import ModelConfig, RopeScaling
from policyopt.models.gguf_header import TensorInfo, read_header
from policyopt.models.gguf_tokenizer import make_tokenizer
from policyopt.models.names import Entry, entries
from policyopt.models.tensors import FileTensor, Layout
from policyopt.models.tokenizer import Tokenizer

ARCHITECTURES = ('llama', 'qwen2', 'qwen3')
# Ids that end a text, an assistant's turn, or its call of a tool.
ENDS = tuple(f'tokenizer.ggml.{name}_token_id' for name in ('eos', 'eot', 'eom'))
QUANTIZATIONS = ('F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q4_K', 'Q6_K')
TRUNK = {
    'model.embed_tokens.weight': 'token_embd.weight',
    'model.norm.weight': 'output_norm.weight',
    'lm_head.weight': 'output.weight',
}
LAYER = {
    'input_layernorm': 'attn_norm',
    'post_attention_layernorm': 'ffn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
}


def read(
    path: pathlib.Path,
) -> tuple[ModelConfig, dict[str, FileTensor], list[Entry], Tokenizer | None]:
    """Config, tensors by name, what each of them is, and the tokenizer where the file has one.

    Nothing of the tensors is read yet. Raises ValueError naming the file, and the field, tensor,
    architecture, quantisation, rotary scaling or tokenizer that is broken or not known. The tensors
    are float32.
    """
    fields, infos = read_header(path)
    tensors = {name: _tensor(path, name, info) for name, info in infos.items()}

    def get(name: str, default: Any = None) -> Any:
        return fields.get(name, default)

    try:
        config = _config(get, tensors)
        tokenizer = make_tokenizer(get)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    listed = [_rename(entry, config) for entry in entries(config, config.family)]
    return config, tensors, listed, tokenizer


def _tensor(path: pathlib.Path, name: str, info: TensorInfo) -> FileTensor:
    """A tensor that is dequantised when its rows are read; all of it lies inside the file."""
    # Only GGUF files need the package.
    import gguf

    where, shape = f'{path}: tensor {name!r}', info.shape
    kinds = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    if info.type not in kinds:
        raise ValueError(f'{where} has type {info.type}, which the gguf package does not know')
    kind = kinds[info.type]
    one_of(f'{path}: quantisation of {name!r}', kind.name, QUANTIZATIONS)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f'{where} has rows of {shape[-1]}, no multiple of {kind.name} blocks')
    row_bytes = shape[-1] // block * size
    end, length = info.start + math.prod(shape[:-1]) * row_bytes, path.stat().st_size
    if end > length:
        raise ValueError(f'{where} ends at byte {end}, but the file at {length}: cut short')

    def rows(start: int, stop: int) -> np.ndarray:
        if len(shape) == 1:  # a vector is one row, whose blocks may span its entries
            data = np.fromfile(path, np.uint8, row_bytes, offset=info.start)
            return gguf.dequantize(data, kind)[start:stop]
        per_entry = math.prod(shape[1:-1])
        offset = info.start + start * per_entry * row_bytes
        count = (stop - start) * per_entry
        data = np.fromfile(path, np.uint8, count * row_bytes, offset=offset)
        out = gguf.dequantize(data.reshape(count, row_bytes), kind)
        return out.reshape(stop - start, *shape[1:])

    return FileTensor(shape, np.dtype(np.float32), rows)


def _config(get: Callable[..., Any], tensors: dict[str, FileTensor]) -> ModelConfig:
    family = get('general.architecture')
    one_of('general.architecture', family, ARCHITECTURES)

    def size(name: str, default: Any = None) -> int:
        value = get(f'{family}.{name}', default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f'{family}.{name}={value!r} must be a positive integer')
        return value

    def number(name: str, default: Any = None) -> float:
        value = get(f'{family}.{name}', default)
        if not isinstance(value, int | float):
            raise ValueError(f'{family}.{name}={value!r} must be a number')
        return value

    if get(f'{family}.expert_count', 0):
        raise ValueError(f'{family}.expert_count: mixture-of-experts GGUF files are not supported')
    heads, layers = size('attention.head_count'), size('block_count')
    kind = get(f'{family}.rope.scaling.type', 'none')
    one_of(f'{family}.rope.scaling.type', kind, ('none', 'linear'))
    factor = number('rope.scaling.factor', 1.0)
    width = size('embedding_length')
    if 'token_embd.weight' not in tensors:
        raise ValueError('the GGUF file lacks the tensor token_embd.weight')
    if layers > len(tensors):  # before anything is made for every layer
        raise ValueError(f'{family}.block_count={layers}, but the file has {len(tensors)} tensors')
    head_dim = size('attention.key_length', width // heads)
    if get(f'{family}.rope.dimension_count', head_dim) != head_dim:
        raise ValueError(f'{family}.rope.dimension_count must equal the head width {head_dim}')
    return ModelConfig(
        vocab_size=tensors['token_embd.weight'].shape[0],
        embed_dim=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size('attention.head_count_kv', heads),
        head_dim=head_dim,
        mlp_dim=size('feed_forward_length'),
        tied='output.weight' not in tensors,
        qkv_bias=family == 'qwen2',
        qk_norm=family == 'qwen3',
        norm_eps=number('attention.layer_norm_rms_epsilon'),
        rope_theta=number('rope.freq_base', 10000.0),
        rope_scaling=RopeScaling('linear', factor) if kind == 'linear' else None,
        max_length=size('context_length', 4096),
        bos_id=get('tokenizer.ggml.bos_token_id'),
        pad_id=get('tokenizer.ggml.padding_token_id'),
        eos_ids=tuple(dict.fromkeys(get(name) for name in ENDS if get(name) is not None)),
        family=family,
    )


def _rename(entry: Entry, config: ModelConfig) -> Entry:
    """The same entry under its GGUF name, with the rotation's row order undone for Llama."""
    if entry.name in TRUNK:
        return entry._replace(name=TRUNK[entry.name])
    _, _, layer, rest = entry.name.split('.', 3)
    stem, ending = rest.rsplit('.', 1)
    how = entry.how
    if config.family == 'llama' and stem in ('self_attn.q_proj', 'self_attn.k_proj'):
        how = _paired(how)
    return entry._replace(name=f'blk.{layer}.{LAYER[stem]}.{ending}', how=how)


def _paired(how: Layout) -> Layout:
    """Query and key rows of Llama files pair neighbours [h, hd/2, 2]; here they pair halves."""
    heads, head, width = how.view
    return how._replace(view=(heads, head // 2, 2, width), order=(3, 0, 2, 1))
