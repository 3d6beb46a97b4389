"""GGUF files written here: every quantisation, row order, tokenizers, and what is refused."""

import functools
import re
import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Quantization

from policyopt import models as po_models
from policyopt.models import gguf_file, gguf_header
from tests.gguf_files import (
    GROUPS,
    HEAD,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    dense_weights,
    trained,
    write,
)

TEXT = 'to be or not to be, that is the question: 12 + 30 = 42 <|im_end|>'


@pytest.mark.parametrize('name', gguf_file.QUANTIZATIONS)
def test_every_quantisation_as_the_package_dequantises_it(name, tmp_path):
    stored = write(tmp_path / 'model.gguf', Quantization[name], tokenizer=False)
    model, params = po_models.load(tmp_path / 'model.gguf')
    assert model.tokenizer is None
    assert not model.config.tied
    layer = params['dense']
    for i in range(LAYERS):
        blk = {k.split('.')[2]: v for k, v in stored.items() if k.startswith(f'blk.{i}.')}
        np.testing.assert_array_equal(layer['mlp']['down'][i], blk['ffn_down'].T)
        np.testing.assert_array_equal(layer['mlp']['gate'][i], blk['ffn_gate'].T)
        for key, heads in (('q', HEADS), ('k', GROUPS)):
            # Neighbours (2j, 2j + 1) of a head in the file are rows j and hd/2 + j here.
            rows = blk[f'attn_{key}'].reshape(heads, HEAD // 2, 2, WIDTH)
            kernel = np.asarray(layer['attention'][key][i])
            np.testing.assert_array_equal(
                kernel[:, :, : HEAD // 2], rows[:, :, 0].transpose(2, 0, 1)
            )
            np.testing.assert_array_equal(
                kernel[:, :, HEAD // 2 :], rows[:, :, 1].transpose(2, 0, 1)
            )
        out = blk['attn_output'].T.reshape(HEADS, HEAD, WIDTH)
        np.testing.assert_array_equal(layer['attention']['o'][i], out)
    np.testing.assert_array_equal(params['embed'], stored['token_embd.weight'])
    np.testing.assert_array_equal(params['head'], stored['output.weight'])


def test_same_model_as_the_hugging_face_folder(tmp_path):
    write(tmp_path / 'model.gguf')
    model, params = po_models.load(tmp_path / 'model.gguf')
    po_models.save(model, params, tmp_path / 'folder')
    held = safetensors.numpy.load_file(tmp_path / 'folder' / 'model.safetensors')
    for name, tensor in dense_weights().items():
        np.testing.assert_array_equal(held[name], tensor)
    again, _ = po_models.load(tmp_path / 'folder')
    assert again.config == model.config
    assert model.config.rope_theta == 5000.0
    assert model.config.eos_ids == (2,)
    assert again.tokenizer.encode(TEXT) == model.tokenizer.encode(TEXT)
    assert again.tokenizer.eos_id == 2
    assert again.tokenizer.chat_template == '{{ messages }}'


def test_qwen_files_have_biases_and_keep_the_row_order(tmp_path):
    bias = np.arange(HEADS * HEAD, dtype=np.float32)

    def change(writer):
        for i in range(LAYERS):
            writer.add_tensor(f'blk.{i}.attn_q.bias', bias)
            writer.add_tensor(f'blk.{i}.attn_k.bias', bias[: GROUPS * HEAD])
            writer.add_tensor(f'blk.{i}.attn_v.bias', bias[: GROUPS * HEAD])

    write(tmp_path / 'a.gguf', family='qwen2', change=change, tokenizer=False)
    _, params = po_models.load(tmp_path / 'a.gguf')
    rows = dense_weights()['model.layers.1.self_attn.k_proj.weight']
    kernel = params['dense']['attention']['k'][1]
    np.testing.assert_array_equal(kernel, rows.T.reshape(WIDTH, GROUPS, HEAD))
    np.testing.assert_array_equal(params['dense']['attention']['q_bias'][1].ravel(), bias)
    write(tmp_path / 'b.gguf', family='qwen3', tokenizer=False)
    with pytest.raises(ValueError, match=r'lacks blk\.0\.attn_q_norm\.weight'):
        po_models.load(tmp_path / 'b.gguf')


def test_byte_level_tokenizer(tmp_path):
    write(tmp_path / 'model.gguf')
    tokenizer = po_models.load(tmp_path / 'model.gguf')[0].tokenizer
    ids = tokenizer.encode(TEXT)
    assert ids == trained().encode(TEXT).ids
    assert ids[-1] == tokenizer.eos_id == 2
    assert tokenizer.decode(ids) == TEXT.removesuffix('<|im_end|>')
    assert tokenizer.decode(jnp.asarray(tokenizer.encode('naïve 漢字'))) == 'naïve 漢字'
    assert (tokenizer.bos_id, tokenizer.pad_id) == (1, 0)
    assert tokenizer.chat_template == '{{ messages }}'


def test_sentencepiece_tokenizer(tmp_path):
    pieces = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))]
    pieces += ['▁', 'a', 'b', 'c', 'ab', '▁a', '▁ab', 'bc']
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0]
    pieces += [f'<extra{i}>' for i in range(VOCAB - len(pieces))]
    scores += [-20.0] * (VOCAB - len(scores))

    def change(writer):
        writer.add_tokenizer_model('llama')
        writer.add_token_list(pieces)
        writer.add_token_scores(scores)
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    write(tmp_path / 'model.gguf', change=change, tokenizer=False)
    tokenizer = po_models.load(tmp_path / 'model.gguf')[0].tokenizer
    # '▁abc bé': the best pair merges first: a b (-2), then ▁ ab (-1); 'bc' comes too late.
    ids = tokenizer.encode('abc bé</s>')
    named = [tokenizer.inner.id_to_token(i) for i in ids]
    assert named == ['▁ab', 'c', '▁', 'b', '<0xC3>', '<0xA9>', '</s>']
    assert tokenizer.decode(ids) == 'abc bé'


REFUSED = [
    ('falcon', None, r"general\.architecture='falcon'"),
    ('llama', lambda w: w.add_expert_count(4), r'llama\.expert_count'),
    (
        'llama',
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        r"llama\.rope\.scaling\.type='yarn'",
    ),
    ('llama', lambda w: w.add_rope_dimension_count(32), r'rope\.dimension_count'),
    ('llama', lambda w: w.add_key_length(32), r"'blk\.0\.attn_q\.weight' has shape"),
    (
        'llama',
        lambda w: w.add_tensor('rope_freqs.weight', np.ones(32, np.float32)),
        r'no use for rope_freqs\.weight',
    ),
]


@pytest.mark.parametrize(('family', 'change', 'message'), REFUSED)
def test_files_that_cannot_be_read_say_why(family, change, message, tmp_path):
    write(tmp_path / 'model.gguf', family=family, change=change, tokenizer=False)
    with pytest.raises(ValueError, match=message):
        po_models.load(tmp_path / 'model.gguf')


def test_unknown_tokenizers_and_quantisations_are_named(tmp_path):
    def change(writer):
        writer.add_tokenizer_model('gpt2')
        writer.add_tokenizer_pre('smolm')
        writer.add_token_list(['a'])
        writer.add_token_merges(['a a'])

    write(tmp_path / 'a.gguf', change=change, tokenizer=False)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre='smolm'.*Did you mean `smollm`"):
        po_models.load(tmp_path / 'a.gguf')
    write(tmp_path / 'b.gguf', Quantization.Q5_0, tokenizer=False)
    with pytest.raises(ValueError, match=r"quantisation of 'token_embd\.weight'='Q5_0'"):
        po_models.load(tmp_path / 'b.gguf')


@functools.cache
def whole_file(folder):
    write(folder / 'whole.gguf', Quantization.Q8_0)
    return (folder / 'whole.gguf').read_bytes()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return whole_file(tmp_path_factory.mktemp('gguf'))


def refusal(path, data):
    """What load says of these bytes; it must be a ValueError that names the file."""
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        po_models.load(path)
    return str(caught.value)


def test_headers_are_read_as_the_package_reads_them(whole, tmp_path):
    path = tmp_path / 'model.gguf'
    path.write_bytes(whole)
    fields, tensors = gguf_header.read_header(path)
    reader = gguf.GGUFReader(path)
    theirs = {name: f.contents() for name, f in reader.fields.items() if name[:5] != 'GGUF.'}
    assert fields == theirs
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = tensors[tensor.name]
        assert (info.start, info.type) == (tensor.data_offset, tensor.tensor_type)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))


def test_files_cut_short_are_named_before_memory_is_allocated(whole, tmp_path, monkeypatch):
    monkeypatch.setattr('policyopt.models.loading._place', None)
    path = tmp_path / 'model.gguf'
    path.write_bytes(whole)
    _, tensors = gguf_header.read_header(path)
    first, last = (f(tensors, key=lambda name: tensors[name].start) for f in (min, max))
    assert f'tensor {last!r} ends at byte' in refusal(path, whole[:-40])
    cut = tensors[first].start + 100
    assert f'tensor {first!r} ends at byte' in refusal(path, whole[:cut])
    header = min(info.start for info in tensors.values())
    for at in [0, 3, 4, 11, 23, *range(24, header, 997), header - 40]:
        message = refusal(path, whole[:at])
        assert 'cut short' in message or 'is empty' in message
    name = b'blk.0.attn_q.weight'
    assert "'blk.0.attn_q.weight'" in refusal(path, whole[: whole.index(name) + len(name) + 3])


def replaced(data, old, new, at=0):
    where = data.index(old) + len(old) + at
    return data[:where] + new + data[where + len(new) :]


def test_corrupt_headers_are_named_and_ask_for_no_memory(whole, tmp_path, monkeypatch):
    monkeypatch.setattr('policyopt.models.loading._place', None)
    path, huge = tmp_path / 'model.gguf', struct.pack('<Q', 2**60)
    refused = functools.partial(refusal, path)
    assert 'no GGUF file' in refused(b'GGML' + whole[4:])
    assert 'GGUF version' in refused(whole[:4] + struct.pack('>I', 3) + whole[8:])
    assert 'tensor' in refused(whole[:8] + huge + whole[16:])
    assert 'field' in refused(whole[:16] + huge + whole[24:])
    # A field: its name, type [4], and for an array type [4] and count [8].
    tokens = b'tokenizer.ggml.tokens'
    assert f"field '{tokens.decode()}' says that it has {2**60}" in refused(
        replaced(whole, tokens, huge, 8)
    )
    assert 'of type 77' in refused(replaced(whole, tokens, struct.pack('<I', 77)))
    assert 'entries of type 9' in refused(replaced(whole, tokens, struct.pack('<I', 9), 4))
    count = struct.pack('<I', 10**9)
    assert 'llama.block_count=1000000000' in refused(
        replaced(whole, b'llama.block_count', count, 4)
    )
    zero = struct.pack('<I', 0)
    assert 'llama.attention.head_count=0' in refused(
        replaced(whole, b'llama.attention.head_count', zero, 4)
    )
    # A tensor: its name, rank [4], sizes [8] each, type [4], offset [8].
    name = b'blk.1.ffn_up.weight'
    for new, at, message in (
        (struct.pack('<I', 99), 0, 'has 99 axes'),
        (huge, 4, 'has sizes'),
        (struct.pack('<Q', 250), 4, 'rows of 250, no multiple of Q8_0'),
        (struct.pack('<I', 999), 20, 'has type 999'),
        (huge, 24, 'ends at byte'),
    ):
        told = refused(replaced(whole, name, new, at))
        assert message in told and "tensor 'blk.1.ffn_up.weight'" in told
    assert 'no UTF-8' in refused(whole.replace(name, b'blk.1.ffn_up.weigh\xff', 1))
    assert 'is there twice' in refused(whole.replace(name, b'blk.0.ffn_up.weight', 1))


@pytest.mark.parametrize('seed', range(3))
def test_random_damage_to_a_header_never_hangs_or_passes_in_silence(seed, whole, tmp_path):
    path = tmp_path / 'model.gguf'
    path.write_bytes(whole)
    start = min(info.start for info in gguf_header.read_header(path)[1].values())
    rng = np.random.default_rng(seed)
    for _ in range(100):
        data = bytearray(whole[: start + 64])
        for at in rng.integers(0, start, 4):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        with pytest.raises(ValueError, match='model.gguf'):  # if only because the tensors are gone
            po_models.load(path)


def test_tokenizers_that_lack_a_part_say_which(tmp_path):
    def change(writer):
        writer.add_tokenizer_model('gpt2')
        writer.add_token_list(['a', 'b'])

    write(tmp_path / 'a.gguf', change=change, tokenizer=False)
    with pytest.raises(ValueError, match=r'a\.gguf: .*needs the array tokenizer\.ggml\.merges'):
        po_models.load(tmp_path / 'a.gguf')

    def more(writer):
        change(writer)
        writer.add_token_merges(['a c'])

    write(tmp_path / 'b.gguf', change=more, tokenizer=False)
    with pytest.raises(ValueError, match=r'b\.gguf: tokenizer\.ggml\.tokens and merges: '):
        po_models.load(tmp_path / 'b.gguf')


def test_every_end_of_text_is_kept(tmp_path):
    def change(writer):
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(2)

    write(tmp_path / 'model.gguf', change=change)
    assert po_models.load(tmp_path / 'model.gguf')[0].config.eos_ids == (2, 5)
