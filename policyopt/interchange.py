"""Rollouts as files, to and from other programs: one row an answer, as JSON lines or array_record.

    python -m policyopt.interchange runs/quickstart/batches/update_000003_1.npz rows.jsonl

A row is a JSON object. P is the number of prompt tokens, N that of the tokens after it.

    prompt_ids      [P] token ids
    ids             [N] token ids: the answer, its end of sequence included, and observations
    mask            [N] 1 on tokens that the policy chose; left out where it chose all
    logprobs        [N] log-probs (nats) under the distribution sampled from, 0 off the mask
    reward          number, null for none
    group           answers to the same problem have the same
    finish          'eos', 'stop', 'length', 'done' (by the environment), 'error' or, of a failed
                    environment, 'env_failed', 'env_late', 'env_overflow'
    version         [N] or a number: parameters that drew each token, -1 for none
    routed_experts  [P + N - 1, layers, top_k]: experts of every token that was fed, prompt included
    kept_ids        ids that truncation kept, of one answer token after the other (CSR)
    kept_offsets    [N + 1] where each token's ids begin in kept_ids, and their number at the end

Arrays are lists, or {"dtype": "int32", "shape": [...], "base64": "..."}, little-endian, row-major.
`routed_experts` may also be the bare base64 text of int32 that serving engines return; its shape is
then that of the model and the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policyopt import batches, checks, hosts
from policyopt.disk import whole
from policyopt.packing import packed, unpacked
from policyopt.sampling import Finish
from policyopt.types import Rollout, TokenBatch

REQUIRED = ('prompt_ids', 'ids', 'logprobs', 'reward', 'group', 'finish')
OPTIONAL = ('mask', 'version', 'routed_experts', 'kept_ids', 'kept_offsets')
SUFFIXES = ('.jsonl', '.array_record')
_INT32 = 2**31 - 1


class InterchangeError(ValueError):
    """A row that can't be used; the message names file, row and field, and what is legal."""


# ============================================================================ rollouts


def to_rows(rollout: Any) -> Iterator[dict[str, Any]]:
    """Rows of a finished Rollout, or of a TokenBatch with rewards, groups and finish.

    Rows without tokens of the policy (filled up, or emptied) are left out.
    """
    x = hosts.fetch(rollout)
    for b in range(len(x.tokens)):
        start, stop = int(x.prompt_length[b]), int(x.length[b])
        mask = np.asarray(x.mask[b, start:stop])
        if not mask.any():
            continue
        reward = float(x.rewards[b])
        row: dict[str, Any] = {
            'prompt_ids': x.tokens[b, :start],
            'ids': x.tokens[b, start:stop],
            'logprobs': np.where(mask != 0, x.logp_behavior[b, start:stop], 0),
            'reward': None if math.isnan(reward) else reward,
            'group': int(x.group[b]),
            'finish': Finish(int(x.finish[b])).name.lower(),
        }
        if not mask.all():
            row['mask'] = mask.astype(np.int8)
        if x.version is not None:
            row['version'] = x.version[b, start:stop]
        if x.routing is not None:
            row['routed_experts'] = x.routing[b, : stop - 1]
        if x.support is not None:
            kept = x.support[b, start:stop]
            row['kept_ids'] = kept[kept >= 0]
            row['kept_offsets'] = np.concatenate([[0], np.cumsum((kept >= 0).sum(-1))])
        yield row


def to_rollout(
    rows: Sequence[Mapping[str, Any]], config: Any, *, width: int | None = None, name: str = 'rows'
) -> Rollout:
    """A Rollout of numpy arrays, [B,T] with T = `width` or the longest row's.

    Args:
      rows: as the module says; all have routed_experts or none, and kept ids likewise.
      config: the `ModelConfig` of the model that is to train on them.
      width: T.
      name: of where they come from, for errors.

    Raises InterchangeError, naming row and field: unknown or missing fields, ids outside the
    vocabulary, log-probs of another length (as where they cover the prompt, too), experts of
    another length, layer count or top-k, no expert of the model or one twice, kept sets that do not
    line up, that name an id twice or lack the token that was drawn. What it can't check: that ids
    and log-probs are of this model's tokenizer and parameters.
    """
    if not rows:
        raise InterchangeError(f'{name}: there is no row')
    read = [_Row(row, config, f'{name}, row {i}') for i, row in enumerate(rows)]
    for field in ('routed_experts', 'kept_ids'):
        have = [i for i, row in enumerate(rows) if row.get(field) is not None]
        if have and len(have) < len(rows):
            lacking = next(i for i in range(len(rows)) if i not in set(have))
            raise InterchangeError(
                f'{name}, row {lacking}: it has no {field}, which row {have[0]} has; legal is in '
                'all or in none'
            )
    longest = max(row.length for row in read)
    width = longest if width is None else width
    if longest > width:
        raise InterchangeError(f'{name}: a row has {longest} tokens; legal is up to {width}')
    few = config.moe is not None and config.moe.experts <= 128
    return _stacked(read, width, np.int8 if few else np.int16)


class _Row:
    """One row, checked, as arrays of its own length."""

    def __init__(self, row: Mapping[str, Any], config: Any, where: str):
        self._row, self._where = row, where
        for field in row:
            if field not in (*REQUIRED, *OPTIONAL):
                near = checks.nearest(field, (*REQUIRED, *OPTIONAL))
                raise InterchangeError(f'{where}: the field {field!r} is unknown.{near}')
        for field in REQUIRED:
            if field not in row:
                raise InterchangeError(f'{where}: the field {field!r} is missing')
        vocab = config.vocab_size
        self.prompt = self._ids('prompt_ids', vocab)
        self.answer = self._ids('ids', vocab)
        self.start, count = len(self.prompt), len(self.answer)
        self.length = self.start + count
        mask = self._numbers('mask', np.ones(count), count)
        if not np.isin(mask, (0, 1)).all():
            self._wrong('mask', f'{mask.min()} to {mask.max()}', '0 or 1 for each of ids')
        self.mask = mask == 1
        if not self.mask.any():
            self._wrong('mask', 'all 0', 'one token of the policy or more')
        logp = self._numbers('logprobs', None, count).astype(np.float32)
        self.logp = np.where(self.mask, logp, 0)
        if not (np.isfinite(self.logp) & (self.logp <= 1e-4)).all():
            self._wrong('logprobs', 'not finite or above 0', 'finite numbers up to 0')
        self.version = self._version(count)
        self.reward, self.group = self._reward(row['reward']), row['group']
        if type(self.group) is not int or not 0 <= self.group <= _INT32:
            self._wrong('group', reprlib.repr(self.group), f'a number from 0 to {_INT32}')
        names = [f.name.lower() for f in Finish if f != Finish.RUNNING]
        if row['finish'] not in names:
            self._wrong('finish', repr(row['finish']), ', '.join(names))
        self.finish = Finish[row['finish'].upper()]
        self.routing = self._routing(config)
        self.kept = self._kept(vocab)

    def _wrong(self, field: str, what: str, legal: str) -> Any:
        raise InterchangeError(f'{self._where}: {field} is {what}; legal is {legal}')

    def _array(self, field: str, shape: Sequence[int] | None = None) -> np.ndarray:
        try:
            array = unpacked(self._row[field], shape)
        except (ValueError, TypeError, KeyError) as error:
            self._wrong(field, f'no array ({error})', 'numbers, or base64 with dtype and shape')
        return array

    def _reward(self, value: Any) -> float:
        if value is None:
            return math.nan
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= np.finfo(np.float32).max:
            self._wrong('reward', reprlib.repr(value), 'a finite number, or null for none')
        return float(value)

    def _integers(self, field: str, shape: Sequence[int] | None = None) -> np.ndarray:
        array = self._array(field, shape)
        if array.size and array.dtype.kind not in 'iu':
            self._wrong(field, f'of {array.dtype}', 'whole numbers')
        return array.astype(np.int64)

    def _ids(self, field: str, vocab: int) -> np.ndarray:
        ids = self._integers(field)
        if ids.ndim != 1 or not len(ids):
            self._wrong(field, f'of shape {ids.shape}', 'one token id or more')
        if ids.min() < 0 or ids.max() >= vocab:
            self._wrong(field, f'{ids.min()} to {ids.max()}', f'ids from 0 to {vocab - 1}')
        return ids.astype(np.int32)

    def _numbers(self, field: str, default: Any, count: int) -> np.ndarray:
        if default is not None and self._row.get(field) is None:
            return default
        array = self._array(field)
        if array.shape != (count,):
            hint = ''
            if array.shape == (self.length,):
                hint = ': these cover the prompt, too'
            self._wrong(field, f'of shape {array.shape}', f'({count},), one for each of ids{hint}')
        return array

    def _version(self, count: int) -> np.ndarray:
        value = self._row.get('version')
        each = np.full(count, -1)
        if type(value) is int:
            each[:] = value
        elif value is not None:
            each = self._integers('version')
        if each.shape != (count,) or each.min() < -1 or each.max() > _INT32:
            self._wrong('version', reprlib.repr(value), f'-1 to {_INT32}, one or as many as ids')
        return np.where(self.mask, each, -1).astype(np.int32)

    def _routing(self, config: Any) -> np.ndarray | None:
        if self._row.get('routed_experts') is None:
            return None
        if config.moe is None:
            return self._wrong('routed_experts', 'given', 'none: the model is dense')
        fed, layers, top_k = self.length - 1, config.kinds.count('moe'), config.moe.top_k
        array = self._integers('routed_experts', (-1, layers, top_k))
        if array.ndim != 3 or array.shape[1:] != (layers, top_k):
            self._wrong(
                'routed_experts',
                f'of shape {array.shape}',
                f'({fed}, {layers}, {top_k}): tokens, the {layers} mixture layers, top_k={top_k}',
            )
        if len(array) != fed:
            hints = {
                self.length: ': the last token was never fed',
                fed - self.start: ': those of the prompt are missing (offset 0 is its first token)',
                len(self.answer): ': those of the prompt are missing, and the last was never fed',
            }
            hint = hints.get(len(array), '')
            legal = f'{fed}, for prompt and answer but the last token{hint}'
            self._wrong('routed_experts', f'of {len(array)} tokens', legal)
        experts = config.moe.experts
        if array.min() < 0 or array.max() >= experts:
            self._wrong('routed_experts', f'{array.min()} to {array.max()}', f'0 to {experts - 1}')
        ordered = np.sort(array, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            self._wrong('routed_experts', 'an expert twice for a token', 'distinct experts')
        return array

    def _kept(self, vocab: int) -> np.ndarray | None:
        """[N,K] ids, -1 where there are fewer."""
        if (self._row.get('kept_ids') is None) != (self._row.get('kept_offsets') is None):
            self._wrong('kept_ids', 'given without kept_offsets, or these alone', 'both or none')
        if self._row.get('kept_ids') is None:
            return None
        ids, offsets = self._integers('kept_ids'), self._integers('kept_offsets')
        count = len(self.answer)
        if ids.ndim != 1:
            self._wrong('kept_ids', f'of shape {ids.shape}', '[M], all sets in a row')
        if offsets.shape != (count + 1,):
            self._wrong('kept_offsets', f'of shape {offsets.shape}', f'({count + 1},), N + 1')
        sizes = np.diff(offsets)
        if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] != len(ids):
            self._wrong(
                'kept_offsets',
                f'{offsets[0]} ... {offsets[-1]}',
                f'increasing from 0 to {len(ids)}, the number of kept_ids',
            )
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            self._wrong('kept_ids', f'{ids.min()} to {ids.max()}', f'0 to {vocab - 1}')
        kept = np.full((count, max(int(sizes.max()), 1)), -1, np.int32)
        kept[np.arange(kept.shape[1]) < sizes[:, None]] = ids
        has = (kept == self.answer[:, None]).any(-1)
        ordered = np.sort(kept, axis=-1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
        for bad, what in ((~has & self.mask, 'without the token drawn'), (twice, 'an id twice')):
            if bad.any():
                at = int(np.argmax(bad))
                legal = 'sets of distinct ids that hold the token drawn, ids[t]'
                self._wrong('kept_ids', f'{what} at token {at} ({self.answer[at]})', legal)
        return np.where(self.mask[:, None], kept, -1)


def _stacked(rows: Sequence[_Row], width: int, experts: Any) -> Rollout:
    def stack(fill: float, dtype: Any, parts: Iterable[tuple[int, Any]], tail: Any = ()) -> Any:
        out = np.full((len(rows), width, *tail), fill, dtype)
        for b, (start, part) in enumerate(parts):
            out[(b, slice(start, start + len(part)), *(slice(n) for n in part.shape[1:]))] = part
        return out

    def answers(name: str, fill: float, dtype: Any, tail: Any = ()) -> Any:
        return stack(fill, dtype, ((row.start, getattr(row, name)) for row in rows), tail)

    routing, support, first = None, None, rows[0]
    if first.routing is not None:
        routing = stack(-1, experts, ((0, row.routing) for row in rows), first.routing.shape[1:])
    if first.kept is not None:
        most = max(row.kept.shape[1] for row in rows)  # type: ignore[union-attr]
        support = answers('kept', -1, np.int32, (most,))
    finish = np.array([row.finish for row in rows], np.int32)
    fields: dict[str, Any] = dict(
        tokens=stack(0, np.int32, ((0, np.concatenate([row.prompt, row.answer])) for row in rows)),
        mask=answers('mask', 0, np.float32),
        length=np.array([row.length for row in rows], np.int32),
        prompt_length=np.array([row.start for row in rows], np.int32),
        rewards=np.array([row.reward for row in rows], np.float32),
        group=np.array([row.group for row in rows], np.int32),
        logp_behavior=answers('logp', 0, np.float32),
        truncated=finish == Finish.LENGTH,
        finish=finish,
        support=support,
        routing=routing,
        version=answers('version', -1, np.int32),
    )
    return Rollout(**fields)


# ============================================================================ files


def write(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to a .jsonl or .array_record file, whole or not at all; returns how many."""
    path, count = _named(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({k: packed(v) for k, v in row.items()}, allow_nan=False).encode() for row in rows
    )
    with whole(path) as partial:
        if path.suffix == '.jsonl':
            with open(partial, 'wb') as file:
                for line in lines:
                    file.write(line + b'\n')
                    count += 1
        else:
            from array_record.python import array_record_module  # pyright: ignore

            writer = array_record_module.ArrayRecordWriter(os.fspath(partial), 'group_size:1')
            for line in lines:
                writer.write(line)
                count += 1
            writer.close()
    return count


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .array_record file, arrays as they stand in it (see `to_rollout`).

    Raises InterchangeError for a file that is not there, or whose rows are no JSON objects.
    """
    path = _named(path)
    rows = []
    for number, line in enumerate(_lines(path)):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InterchangeError(f'{path}, row {number}: it is no JSON ({error})') from error
        if not isinstance(row, dict):
            raise InterchangeError(f'{path}, row {number}: it is no JSON object')
        rows.append(row)
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    try:
        if path.suffix == '.jsonl':
            yield from (line for line in path.read_bytes().splitlines() if line.strip())
            return
        from array_record.python import array_record_module  # pyright: ignore

        path.open('rb').close()  # the reader aborts where there is none
        reader = array_record_module.ArrayRecordReader(os.fspath(path))
        yield from reader.read_all()
        reader.close()
    except (OSError, RuntimeError, ValueError) as error:
        raise InterchangeError(f'{path}: it can not be read ({error})') from error


def _named(path: str | os.PathLike) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InterchangeError(f'{path}: legal are names that end in {" or ".join(SUFFIXES)}')
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    parser = argparse.ArgumentParser(
        prog='python -m policyopt.interchange',
        description='Convert rollouts between .jsonl and .array_record, or a saved minibatch to '
        'one of them.',
    )
    parser.add_argument(
        'source', help='.jsonl, .array_record, or a .npz that policyopt.train saved'
    )
    parser.add_argument('target', help='.jsonl or .array_record')
    options = parser.parse_args(argv)
    try:
        if options.source.endswith('.npz'):
            arrays, _ = batches.load_minibatch(options.source)
            fields: dict[str, Any] = {k: v for k, v in arrays.items() if k != 'logp_new'}
            rows: Iterable[Mapping[str, Any]] = to_rows(TokenBatch(**fields))
        else:
            rows = read(options.source)
        count = write(options.target, rows)
    except (ValueError, TypeError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(f'{options.target}: {count} rows')
    return 0


if __name__ == '__main__':
    sys.exit(main())
