"""GGUF files of a small model with a byte-level tokenizer, written for tests."""

import functools
import json

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quantization
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from policyopt.models import gguf_file

WIDTH, INNER, HEADS, GROUPS, HEAD, VOCAB, LAYERS = 256, 512, 4, 2, 64, 300, 2


def dense_weights():
    """Hugging Face names and layouts."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) * 0.05).astype(np.float32)

    held = {
        'model.embed_tokens.weight': normal(VOCAB, WIDTH),
        'model.norm.weight': 1 + normal(WIDTH),
        'lm_head.weight': normal(VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        at = f'model.layers.{i}.'
        held |= {
            at + 'input_layernorm.weight': 1 + normal(WIDTH),
            at + 'post_attention_layernorm.weight': 1 + normal(WIDTH),
            at + 'self_attn.q_proj.weight': normal(HEADS * HEAD, WIDTH),
            at + 'self_attn.k_proj.weight': normal(GROUPS * HEAD, WIDTH),
            at + 'self_attn.v_proj.weight': normal(GROUPS * HEAD, WIDTH),
            at + 'self_attn.o_proj.weight': normal(WIDTH, HEADS * HEAD),
            at + 'mlp.gate_proj.weight': normal(INNER, WIDTH),
            at + 'mlp.up_proj.weight': normal(INNER, WIDTH),
            at + 'mlp.down_proj.weight': normal(WIDTH, INNER),
        }
    return held


def file_name(name):
    if name in gguf_file.TRUNK:
        return gguf_file.TRUNK[name]
    _, _, layer, rest = name.split('.', 3)
    stem, ending = rest.rsplit('.', 1)
    return f'blk.{layer}.{gguf_file.LAYER[stem]}.{ending}'


def paired(rows, heads):
    """Rows of a rotary projection in the order of Llama files: (0, hd/2, 1, hd/2 + 1, ...)."""
    order = np.arange(rows.shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    return rows[order]


def k_quant_bytes(shape, kind):
    """Random but finite blocks of the formats that the package can only read."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (*shape[:-1], shape[-1] // block, size))
    data = data.astype(np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    at = [0, 2] if kind == Quantization.Q4_K else [size - 2]
    for start in at:
        data[..., start : start + 2] = scale
    return data.reshape(*shape[:-1], -1)


@functools.cache
def trained():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(['to be or not to be that is the question ' * 20] * 20, trainer)
    return inner


TEMPLATE = '{{ messages }}'


def write(
    path,
    quantization=Quantization.F32,
    family='llama',
    change=None,
    tokenizer=True,
    chat_template=TEMPLATE,
):
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if tokenizer:
        add_byte_level(writer, chat_template)
    if change:
        change(writer)
    stored = {}
    for name, tensor in dense_weights().items():
        at, raw = file_name(name), tensor
        if family == 'llama' and ('q_proj' in name or 'k_proj' in name):
            raw = paired(tensor, HEADS if 'q_proj' in name else GROUPS)
        kind = quantization if raw.ndim == 2 else Quantization.F32
        if kind in (Quantization.Q4_K, Quantization.Q6_K):
            data = k_quant_bytes(raw.shape, kind)
        else:
            data = gguf.quantize(raw, kind)
        stored[at] = gguf.dequantize(data, kind)
        if kind == Quantization.F32:
            writer.add_tensor(at, raw)
        elif kind == Quantization.F16:
            writer.add_tensor(at, raw.astype(np.float16))
        else:
            writer.add_tensor(at, data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_byte_level(writer, chat_template=TEMPLATE):
    vocab = trained().get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.get)
    merges = json.loads(trained().to_str())['model']['merges']
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('smollm')
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else ' '.join(merge) for merge in merges]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(chat_template)
