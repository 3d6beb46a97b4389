"""What is compared: cells of work, with what each side is asked to do and what we aim at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.peers import inputs

OURS = 'policyopt'
PEERS = {'trl': 'TRL', 'tunix': 'tunix'}


@dataclasses.dataclass(frozen=True)
class Side:
    """What a side runs: a work of its script, with arguments.

    `aim` is what we want its time to be over ours, `memory` its memory over ours: its temporaries
    where the cell knows what a run returns.
    """

    script: str
    work: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aim: float | None = None
    memory: float | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
      name: of the cell, and of its folder.
      what: in words.
      prepare: writes to an empty folder what the sides read.
      sides: by label; the first is ours.
      absent: label -> why this side can't do the work.
      notes: what a reader should know before comparing.
      returned: MiB of gradients that a run of every side returns, where that is most of its memory.
    """

    name: str
    what: str
    prepare: Callable[[Path], None]
    sides: Mapping[str, Side]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    returned: float | None = None


def everyone(
    work: str, arguments: Mapping[str, Any], aim: float, memory: float | None = None
) -> dict[str, Side]:
    """Our side and both peers at the same work."""
    out = {OURS: Side('ours', work, arguments)}
    return out | {peer: Side(peer, work, arguments, aim, memory) for peer in PEERS}


def correctness(fast: bool) -> list[Cell]:
    """Losses and gradients of one rollout, padded on both sides."""
    answer = 10 if fast else 48

    def prepare(folder: Path) -> None:
        config = inputs.dense(160, 2, 64, 96) if fast else inputs.dense(2048)
        rows = inputs.rows_of(config.vocab_size, 8, 16, answer, ragged=True)
        inputs.write(folder, config, rows, drift=0.05)

    # Ours goes first: the others compare themselves with the gradients it leaves.
    sides = everyone('compare', {'answer': answer}, 0.0)
    return [Cell('correctness', f'gradients of 8 x (16 + {answer}) tokens', prepare, sides)]


def update(fast: bool) -> list[Cell]:
    out = []
    for vocab in (160,) if fast else (8192, 32768):

        def prepare(folder: Path, vocab: int = vocab) -> None:
            rows = inputs.rows_of(vocab, 8, 64, 192, ragged=False)
            inputs.write(folder, inputs.dense(vocab), rows, drift=0.05)

        what = f'GRPO forward and backward, 8 x (64 + 192), V {vocab}'
        sides = everyone('update', {}, 1.5, memory=2)
        sides['products alone'] = Side('naive', 'products', {}, 0.6)
        out.append(Cell(f'update-{vocab}', what, prepare, sides, notes=[PRODUCTS]))
    return out


PRODUCTS = (
    '"products alone" are the matrix products of projections, feed-forward layers and head, '
    'forward and backward, without attention and all else: its time over ours is our share of the '
    'rate at which plain jax multiplies matrices here.'
)


def generate(fast: bool) -> list[Cell]:
    out = []
    for vocab in (160,) if fast else (8192, 32768):

        def prepare(folder: Path, vocab: int = vocab) -> None:
            rows = inputs.rows_of(vocab, 64, 16, 1, ragged=False)
            inputs.write(folder, inputs.dense(vocab), rows, drift=0.0)

        for rows in (8, 64):
            for top_p in (1.0, 0.95):
                asked = dict(rows=rows, tokens=8 if fast else 128, top_p=top_p)
                aim = 4.0 if top_p < 1 and vocab == 32768 else 2.0
                out.append(
                    Cell(
                        f'generate-{vocab}-{rows}-{top_p:g}',
                        f'{rows} rows x {asked["tokens"]} new tokens, V {vocab}, top-p {top_p:g}',
                        prepare,
                        everyone('generate', asked, aim),
                    )
                )
    return out


def long_tail(fast: bool) -> list[Cell]:
    rows, slots, mean, vocab = (16, 4, 6, 160) if fast else (1024, 64, 32, 8192)

    def prepare(folder: Path) -> None:
        found = inputs.rows_of(vocab, rows, 16, 1, ragged=False)
        found['limits'] = inputs.log_normal(rows, mean)
        inputs.write(folder, inputs.dense(vocab), found, drift=0.0)

    what = f'{rows} rows, log-normal lengths of {mean} on average, {5 * mean} at most'
    sides = everyone('long_tail', {'slots': slots}, 3.0)
    notes = [
        f'Peers draw batches of {slots} rows, each as long as its longest row. Both have engines '
        'for accelerators that refill slots (vLLM, SGLang), and TRL an option for continuous '
        'batching by transformers: not tried here.'
    ]
    return [Cell('long-tail', what, prepare, sides, notes=notes)]


MIXTURE = (
    "On processors tunix's layer runs every expert on every token; its kernel for sorted tokens is "
    'for TPU. "dense layer" has as many parameters as a token meets in the mixture.'
)
SUPPORT = (
    "Only policyopt scores the support alone: TRL and tunix can't and score everything, plain jax "
    'takes the support of all logits.'
)
LANGUAGE = (
    "TRL's side is `generate`, its loss in four parts and AdamW, without its trainer's buffers."
)


def mixture(fast: bool) -> list[Cell]:
    out = []
    for experts, top_k, inner in ((8, 2, 512), (64, 8, 128)):
        if fast:
            inner = 16
        tokens = 64 if fast else 4096

        def prepare(folder: Path, n: int = experts, k: int = top_k, inner: int = inner) -> None:
            inputs.write_mixture(folder, n, inner, tokens=64 if fast else 4096)
            with np.load(folder / 'moe.npz') as held:
                dense = {name: held[name][:k] for name in ('gate', 'up', 'down')}
                dense = {
                    name: np.concatenate(list(x), axis=0 if name == 'down' else 1)
                    for name, x in dense.items()
                }
                np.savez(folder / 'dense.npz', x=held['x'], **dense)

        sides = everyone('mixture', {'top_k': top_k}, 2.0)
        sides['ragged_dot'] = Side('naive', 'mixture', {'top_k': top_k}, 2.0)
        sides['dense layer'] = Side('naive', 'dense', {}, 1 / 1.5)
        what = f'mixture layer forward and backward, {experts} experts top-{top_k}, {tokens} tokens'
        out.append(Cell(f'mixture-{experts}', what, prepare, sides, notes=[MIXTURE]))
    return out


def score(fast: bool) -> list[Cell]:
    out = []
    vocab, tokens = (512, 32) if fast else (151_936, 1024)
    for width in (16,) if fast else (576, 2048):

        def prepare(folder: Path, width: int = width) -> None:
            inputs.write_scoring(folder, width, vocab, tokens)

        for support in (False, True):
            whole = {'support': False}
            aim, less = (20.0, None) if support else (1.5, 5)
            sides = {
                OURS: Side('ours', 'score', {'support': support}),
                'plain jax': Side('naive', 'score', {'support': support}, aim, less),
                'trl': Side('trl', 'score', whole, aim, less),
                'tunix': Side('tunix', 'score', whole, aim, less),
            }
            kind = 'a support of 20' if support else 'the full vocabulary'
            what = (
                f'log-probs forward and backward on {kind}, {tokens} tokens, V {vocab:,}, D {width}'
            )
            name = f'score-{width}-{"support" if support else "full"}'
            notes, returned = [SUPPORT] if support else (), (vocab + tokens) * width * 4 / 2**20
            out.append(Cell(name, what, prepare, sides, notes=notes, returned=returned))
    return out


def rl_step(fast: bool) -> list[Cell]:
    prompts, group = (4, 4) if fast else (64, 8)

    def prepare(folder: Path) -> None:
        config = inputs.dense(len(inputs.CHARS), 2, 128, 512)
        inputs.write_sums(folder, config, prompts)

    what = f'a whole GRPO step, {prompts} sums x {group} answers of 4 tokens, one update'
    sides = everyone('rl_step', {'group': group, 'tokens': 4}, 2.0)
    return [Cell('rl-step', what, prepare, sides)]


def language(fast: bool) -> list[Cell]:
    """SmolLM2-135M, or a toy of its architecture."""
    prompt, tokens = (8, 4) if fast else (64, 64)

    def prepare(folder: Path) -> None:
        inputs.write_language(folder, 64, prompt, fast)

    def sides(work: str, asked: Mapping[str, Any]) -> dict[str, Side]:
        return {OURS: Side('ours', work, asked), 'trl': Side('trl', work, asked, 1.5)}

    absent = {'tunix': 'its Llama has a head of its own, where this one is tied; not tried'}
    out = []
    for rows in (1, 16, 64):
        asked = dict(rows=rows, tokens=tokens, top_p=1.0)
        what = f'SmolLM2-135M, {rows} rows x {tokens} new tokens after {prompt}'
        out.append(Cell(f'smollm2-{rows}', what, prepare, sides('generate', asked), absent))
    asked = dict(rows=8 if fast else 32, tokens=tokens)
    what = f'SmolLM2-135M, a GRPO step of {asked["rows"]} x ({prompt} + {tokens})'
    step = sides('language_step', asked)
    out.append(Cell('smollm2-step', what, prepare, step, absent, notes=[LANGUAGE]))
    return out


WORKS = (correctness, update, generate, long_tail, mixture, score, rl_step, language)


def cells(fast: bool = False) -> dict[str, Cell]:
    """All cells by name; fast ones take the sizes of a test."""
    return {cell.name: cell for work in WORKS for cell in work(fast)}
