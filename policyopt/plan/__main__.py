"""Compile a run's programs for a TPU slice that is not here, and say what they would cost.

    python -m policyopt.plan --config=configs/pods.py:model=qwen3-8b --topology=v5p:4x4x4

Train step, scoring step, prefill and decode step are compiled ahead of time on this machine's CPU,
by the TPU compiler in the package libtpu; no weights are made and nothing runs. Printed are, by
device: memory by what it holds; operations, traffic and what is sent; the time at the chip's peaks
and by the compiler's own estimate. None of it is measured. Any field of the config can be
overridden as in policyopt.train. See docs/scale.md.
"""

from __future__ import annotations

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # arrays are here; the TPUs are compiled for alone
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')

import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from policyopt import checks, commands  # noqa: E402
from policyopt.plan import planning, report, steps, store  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file(
    'config',
    None,
    'File with get_config(), or FILE:ARGUMENT, as policyopt.train takes it; --config.FIELD=VALUE '
    'overrides a field.',
    lock_config=False,
    accept_new_attributes=True,
)
_TOPOLOGY = flags.DEFINE_string(
    'topology', None, 'TPU slice to compile for, CHIP:SHAPE: v5e:4x4, v5p:4x4x4, v6e:8x8, v4:2x2x4.'
)
_STEPS = flags.DEFINE_list('steps', list(steps.STEPS), 'Programs to compile.')
_CACHE = flags.DEFINE_string(
    'cache',
    'runs/plan.json',
    'File of results: what was compiled before, of the same config, topology, jax and libtpu, is '
    'taken from there.',
)
_AGAIN = flags.DEFINE_bool('again', False, 'Compile what the file of results has, too.')
_CHECK = flags.DEFINE_bool(
    'check',
    False,
    'Lower anew, in seconds, what was compiled from other source, and compile what comes out as '
    'another program.',
)
_FIT = flags.DEFINE_bool(
    'fit', False, 'Follow the suggestions for a program that does not fit, until it does.'
)
_JSON = flags.DEFINE_bool('json', False, 'Print JSON.')

_REMEDIES = {'*': '--check says whether the program is another', '+': '--again compiles it anew'}


def main(argv: list[str]) -> None:
    """Entry point of `python -m policyopt.plan`."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    logging.set_verbosity(logging.ERROR)
    try:
        for name in _STEPS.value:
            checks.one_of('--steps', name, steps.STEPS)
        found = run(_CONFIG.value.to_dict(), store.Store(pathlib.Path(_CACHE.value)))
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        text = ' '.join(str(error).split())[:1000]
        raise SystemExit(f'{type(error).__name__}: {text}') from error
    if _JSON.value:
        print(json.dumps(found, indent=1))


def run(config: dict, kept: store.Store) -> dict:
    """Plan every step that was asked for, and print each as soon as it is known."""
    found, topology = {}, _TOPOLOGY.value or ''
    for step in _STEPS.value:
        if _FIT.value:
            _, _, record = planning.fit(
                config,
                topology,
                step,
                kept,
                lambda text: print(text, file=sys.stderr),
                _AGAIN.value,
                _CHECK.value,
            )
        else:
            planned = planning.plan(config, topology, [step], kept, _AGAIN.value, _CHECK.value)
            record = planned[step]
        found[step] = record
        if not _JSON.value:
            print(report.describe(step, record), flush=True)
            if report.remedy(record):
                print(f'  try {report.remedy(record)}')
            for mark in report.mark_of(record):
                print(f'  {report.NOTES[mark]}: {_REMEDIES[mark]}')
    return found


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'topology'])
    app.run(main, flags_parser=commands.read_flags)
