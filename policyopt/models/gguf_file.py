"""GGUF files: configuration, tensors and tokenizer of a Llama-family model.

Quantised tensors are dequantised as the `gguf` package does it, a block of rows at a time.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from policyopt.checks import one_of
from policyopt.models.config import ModelConfig, RopeScaling
from policyopt.models.gguf_tokenizer import make_tokenizer
from policyopt.models.names import Entry, entries
from policyopt.models.tensors import FileTensor, Layout
from policyopt.models.tokenizer import Tokenizer

ARCHITECTURES = ('llama', 'qwen2', 'qwen3')
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

    Raises ValueError naming an architecture, a quantisation, a rotary scaling or a tokenizer that
    is not known. The tensors are float32.
    """
    # Only GGUF files need the package.
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        one_of(f'quantisation of {tensor.name!r}', tensor.tensor_type.name, QUANTIZATIONS)
        # The reader lists dimensions fastest first.
        shape = tuple(int(n) for n in reversed(tensor.shape))
        dequantize = functools.partial(gguf.dequantize, qtype=tensor.tensor_type)
        rows = _reader(path, int(tensor.data_offset), int(tensor.n_bytes), shape, dequantize)
        tensors[tensor.name] = FileTensor(shape, np.dtype(np.float32), rows)

    def get(name: str, default: Any = None) -> Any:
        return fields[name]() if name in fields else default

    config = _config(get, tensors)
    listed = [_rename(entry, config) for entry in entries(config, config.family)]
    return config, tensors, listed, make_tokenizer(get)


def _reader(
    path: pathlib.Path,
    offset: int,
    size: int,
    shape: tuple[int, ...],
    dequantize: Callable[[np.ndarray], np.ndarray],
) -> Callable[[int, int], np.ndarray]:
    per_row = size // shape[0] if len(shape) > 1 else size

    def rows(start: int, stop: int) -> np.ndarray:
        if len(shape) == 1:  # a vector's blocks may span its entries
            return dequantize(np.fromfile(path, np.uint8, size, offset=offset))[start:stop]
        data = np.fromfile(
            path, np.uint8, (stop - start) * per_row, offset=offset + start * per_row
        )
        out = dequantize(data.reshape(-1, per_row // math.prod(shape[1:-1])))
        return out.reshape(stop - start, *shape[1:])

    return rows


def _config(get: Callable[..., Any], tensors: dict[str, FileTensor]) -> ModelConfig:
    family = get('general.architecture')
    one_of('general.architecture', family, ARCHITECTURES)

    def need(name: str) -> Any:
        value = get(f'{family}.{name}')
        if value is None:
            raise ValueError(f'the GGUF file has no field {family}.{name}')
        return value

    if get(f'{family}.expert_count', 0):
        raise ValueError(f'{family}.expert_count: mixture-of-experts GGUF files are not supported')
    heads = need('attention.head_count')
    kind = get(f'{family}.rope.scaling.type', 'none')
    one_of(f'{family}.rope.scaling.type', kind, ('none', 'linear'))
    factor = get(f'{family}.rope.scaling.factor', 1.0)
    eos = get('tokenizer.ggml.eos_token_id')
    width = need('embedding_length')
    if 'token_embd.weight' not in tensors:
        raise ValueError('the GGUF file lacks the tensor token_embd.weight')
    head_dim = get(f'{family}.attention.key_length', width // heads)
    if get(f'{family}.rope.dimension_count', head_dim) != head_dim:
        raise ValueError(f'{family}.rope.dimension_count must equal the head width {head_dim}')
    return ModelConfig(
        vocab_size=tensors['token_embd.weight'].shape[0],
        embed_dim=width,
        num_layers=need('block_count'),
        num_heads=heads,
        num_kv_heads=get(f'{family}.attention.head_count_kv', heads),
        head_dim=head_dim,
        mlp_dim=need('feed_forward_length'),
        tied='output.weight' not in tensors,
        qkv_bias=family == 'qwen2',
        qk_norm=family == 'qwen3',
        norm_eps=need('attention.layer_norm_rms_epsilon'),
        rope_theta=get(f'{family}.rope.freq_base', 10000.0),
        rope_scaling=RopeScaling('linear', factor) if kind == 'linear' else None,
        max_length=get(f'{family}.context_length', 4096),
        bos_id=get('tokenizer.ggml.bos_token_id'),
        pad_id=get('tokenizer.ggml.padding_token_id'),
        eos_ids=() if eos is None else (eos,),
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
