"""TRL's and transformers' side, in an environment with PyTorch for CPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from serve import CAP, EPS, GSPO, HIGH, Run, reward, serve
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

os.environ.setdefault('HF_HUB_OFFLINE', '1')
# TRL's own arguments for the objectives of `ours.losses`; everything else is its default.
ARGUMENTS: dict[str, dict[str, Any]] = {
    'grpo': dict(loss_type='grpo', epsilon=EPS),
    'dapo': dict(loss_type='dapo', epsilon=EPS, epsilon_high=HIGH),
    'dr_grpo': dict(loss_type='dr_grpo', epsilon=EPS),
    'gspo': dict(loss_type='grpo', importance_sampling_level='sequence', epsilon=GSPO),
    'sapo': dict(loss_type='sapo'),
    'cispo': dict(loss_type='cispo', epsilon_high=CAP),
}


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x) for name, x in np.load(folder / 'rows.npz').items()}


def inputs_of(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What TRL's trainer hands to its own loss."""
    return {
        'prompt_ids': rows['prompt'].long(),
        'prompt_mask': rows['prompt_mask'],
        'completion_ids': rows['answer'].long(),
        'completion_mask': rows['answer_mask'],
        'advantages': rows['advantages'],
        'old_per_token_logps': rows['logp_old'],
        'num_items_in_batch': rows['answer_mask'].sum().float(),
    }


class Blank(transformers.PreTrainedTokenizer):
    """The trainer wants a tokenizer; nothing is tokenized."""

    vocab_files_names: dict[str, str] = {}

    @property
    def vocab_size(self) -> int:
        return 4

    def get_vocab(self) -> dict[str, int]:
        return {'<pad>': 0, '<s>': 1, '</s>': 2, 'a': 3}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 3)

    def _convert_id_to_token(self, index: int) -> str:
        return 'a'


def trainer_of(
    folder: Path,
    answer: int,
    rows: int,
    arguments: dict[str, Any],
    tokenizer: Any = None,
    rewards: Any = None,
) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(folder / 'trl'),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        beta=0.0,
        per_device_train_batch_size=rows,
        max_completion_length=answer,
        **({'num_generations': 4} | arguments),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards or (lambda completions, **_: [0.0] * len(completions)),
        args=config,
        train_dataset=Dataset.from_dict({'prompt': ['a'] * rows}),
        processing_class=tokenizer or Blank(pad_token='<pad>', bos_token='<s>', eos_token='</s>'),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def gap(model: Any, folder: Path) -> float:
    """Largest difference of the model's gradients from those in a folder, over the largest."""
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = dict(other.named_parameters())
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    worst = max((g - ours[name]).abs().max().item() for name, g in named.items())
    return worst / max(g.abs().max().item() for g in named.values())


def compare(folder: Path, answer: int) -> Run:
    """Losses, and how far gradients are from ours in `folder`/NAME."""
    rows = held(folder)
    count = len(rows['prompt'])

    def run() -> dict[str, Any]:
        out = {}
        for name, arguments in ARGUMENTS.items():
            trainer = trainer_of(folder, answer, count, arguments)
            loss = trainer._compute_loss(trainer.model, inputs_of(rows))
            loss.backward()
            out[name] = {'loss': loss.item(), 'gap': gap(trainer.model, folder / name)}
        return out

    return run


def update(folder: Path) -> Run:
    rows = held(folder)
    count, answer = rows['answer'].shape
    trainer = trainer_of(folder, answer, count, ARGUMENTS['grpo'])

    def run() -> dict[str, float]:
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs_of(rows))
        loss.backward()
        return {'loss': loss.item()}

    return run


def drawer(model: Any, tokens: int, top_p: float) -> Any:
    """Transformers' `generate`, which is what TRL samples with where there is no vLLM."""
    model.generation_config.eos_token_id = None

    def draw(prompts: torch.Tensor, tokens: int = tokens) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                top_p=top_p,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
            )

    return draw


def generate(folder: Path, rows: int, tokens: int, top_p: float) -> Run:
    """Rows of new tokens, none of which ends early."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, draw = held(folder)['prompt'][:rows].long(), drawer(model, tokens, top_p)

    def run() -> dict[str, int]:
        return {'tokens': draw(prompts)[:, prompts.shape[1] :].numel()}

    return run


def long_tail(folder: Path, slots: int) -> Run:
    """Batches of `slots` rows in order, each as long as its longest row: a row cannot leave."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = held(folder)
    prompts, limits = rows['prompt'].long(), rows['limits']
    draw = drawer(model, int(limits.max()), 1.0)

    def run() -> dict[str, int]:
        for at in range(0, len(prompts), slots):
            draw(prompts[at : at + slots], int(limits[at : at + slots].max()))
        return {'tokens': int(limits.sum())}

    return run


def score(folder: Path, support: bool) -> Run:
    """The fused head of TRL's trainer, in tiles; it has no scoring on a recorded support."""
    arrays = {name: torch.from_numpy(x) for name, x in np.load(folder / 'score.npz').items()}
    embed, hidden = arrays['embed'].requires_grad_(), arrays['hidden'].requires_grad_()
    ids = arrays['ids'].long()
    rows, labels = (hidden.shape[1] - 1, ids[0, 1:])

    def run() -> dict[str, float]:
        embed.grad = hidden.grad = None
        states = hidden[:, :-1].reshape(rows, -1)
        scored = ChunkedLogProbFunction.apply(
            states, embed, None, labels, 1.0, CHUNK, None, 1.0, ('log_probs',)
        )
        total = scored[0].sum()
        total.backward()
        return {'sum': total.item()}

    return run


def mixture(folder: Path, top_k: int) -> Run:
    arrays = {name: torch.from_numpy(x) for name, x in np.load(folder / 'moe.npz').items()}
    experts, width, inner = arrays['gate'].shape
    config = transformers.Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = 'grouped_mm'
    block = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        both = torch.cat([arrays['gate'], arrays['up']], 2).transpose(1, 2)
        block.experts.gate_up_proj.copy_(both)
        block.experts.down_proj.copy_(arrays['down'].transpose(1, 2))
        block.gate.weight.copy_(arrays['router'].T)
    x = arrays['x'][None].requires_grad_()

    def run() -> dict[str, float]:
        block.zero_grad()
        x.grad = None
        (block(x) ** 2).sum().backward()
        return {'norm': x.grad.norm().item()}

    return run


def rl_step(folder: Path, group: int, tokens: int) -> Run:
    """One training step of TRL's trainer: it draws, rewards, scores and updates."""
    texts = json.loads((folder / 'texts.json').read_text())
    vocabulary = {char: index for index, char in enumerate(texts['chars'])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token='<pad>'))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex('.'), 'isolated')
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token='<pad>', bos_token='<s>', eos_token='</s>'
    )

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        return [reward(prompt, answer.replace(' ', '')) for prompt, answer in pairs]

    rows = len(texts['prompts']) * group
    arguments = ARGUMENTS['grpo'] | dict(num_generations=group, learning_rate=1e-6)
    trainer = trainer_of(folder, tokens, rows, arguments, tokenizer, rewards)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    batch = [{'prompt': text} for text in texts['prompts'] for _ in range(group)]

    def run() -> dict[str, float]:
        # What trainer.train() does at each step; its buffer of answers is left out of the way.
        trainer._step = 0
        trainer.training_step(trainer.model, batch, None)
        optimizer.step()
        optimizer.zero_grad()
        return {}

    return run


def language_step(folder: Path, rows: int, tokens: int) -> Run:
    """Transformers' `generate`, TRL's loss in 4 parts, AdamW."""
    held_rows = held(folder)
    prompts = held_rows['prompt'][:rows].long()
    trainer = trainer_of(folder, tokens, rows, ARGUMENTS['grpo'])
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    draw = drawer(trainer.model, tokens, 1.0)
    scores = torch.randn(rows // 4, 4)
    scores = scores - scores.mean(1, keepdim=True)
    scores = (scores / (scores.std(1, keepdim=True) + 1e-4)).reshape(rows)

    def run() -> dict[str, float]:
        answers = draw(prompts)[:, prompts.shape[1] :]
        total = 0.0
        for part in torch.arange(rows).chunk(4):
            asked = {'prompt': prompts[part], 'answer': answers[part], 'advantages': scores[part]}
            masks = {f'{n}_mask': torch.ones_like(asked[n]) for n in ('prompt', 'answer')}
            inputs = inputs_of(asked | masks | {'logp_old': None})
            loss = trainer._compute_loss(trainer.model, inputs) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return {'objective': total}

    return run


WORKS = dict(
    language_step=language_step,
    rl_step=rl_step,
    compare=compare,
    update=update,
    generate=generate,
    long_tail=long_tail,
    score=score,
    mixture=mixture,
)

if __name__ == '__main__':
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    serve(WORKS)
