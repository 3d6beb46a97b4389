"""TRL's and transformers' side, in an environment with PyTorch for CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from serve import Run, serve

os.environ.setdefault('HF_HUB_OFFLINE', '1')
EPS, GSPO, CAP = 0.2, 3e-4, 5.0
# TRL's own arguments for the objectives of `ours.losses`; everything else is its default.
ARGUMENTS: dict[str, dict[str, Any]] = {
    'grpo': dict(loss_type='grpo', epsilon=EPS),
    'dapo': dict(loss_type='dapo', epsilon=EPS, epsilon_high=0.28),
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


def trainer_of(folder: Path, answer: int, rows: int, arguments: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(folder / 'trl'),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        beta=0.0,
        num_generations=4,
        per_device_train_batch_size=rows,
        max_completion_length=answer,
        **arguments,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({'prompt': ['a'] * rows}),
        processing_class=Blank(pad_token='<pad>', bos_token='<s>', eos_token='</s>'),
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


def generate(folder: Path, rows: int, tokens: int, top_p: float) -> Run:
    """Transformers' `generate`, which is what TRL samples with on such a machine."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = held(folder)['prompt'][:rows].long()
    model.generation_config.eos_token_id = None

    def run() -> dict[str, int]:
        with torch.no_grad():
            drawn = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                top_p=top_p,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
            )
        return {'tokens': drawn[:, prompts.shape[1] :].numel()}

    return run


def long_tail(folder: Path, slots: int) -> Run:
    """Batches of `slots` rows in order, each as long as its longest row: a row cannot leave."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = held(folder)
    prompts, limits = rows['prompt'].long(), rows['limits']
    model.generation_config.eos_token_id = None

    def run() -> dict[str, int]:
        for at in range(0, len(prompts), slots):
            part = prompts[at : at + slots]
            longest = int(limits[at : at + slots].max())
            with torch.no_grad():
                model.generate(
                    part,
                    attention_mask=torch.ones_like(part),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                )
        return {'tokens': int(limits.sum())}

    return run


def score(folder: Path, support: bool) -> Run:
    """Log-softmax of all logits; TRL has no scoring on a recorded support."""
    arrays = {name: torch.from_numpy(x) for name, x in np.load(folder / 'score.npz').items()}
    embed, hidden = arrays['embed'].requires_grad_(), arrays['hidden'].requires_grad_()
    ids = arrays['ids'].long()
    from trl.trainer.utils import selective_log_softmax

    def run() -> dict[str, float]:
        embed.grad = hidden.grad = None
        total = selective_log_softmax(hidden @ embed.T, ids).sum()
        total.backward()
        return {'sum': total.item()}

    return run


def mixture(folder: Path, top_k: int) -> Run:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

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


WORKS = dict(
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
