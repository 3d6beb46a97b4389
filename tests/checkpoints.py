"""Golden checkpoints, and copies of them with changes."""

import json
import pathlib
import shutil

import safetensors.numpy

GOLDEN = pathlib.Path(__file__).parent / 'data' / 'hf'


def copy(family, folder, change_config=None, change_tensors=None):
    shutil.copytree(GOLDEN / family, folder)
    config = json.loads((folder / 'config.json').read_text())
    held = safetensors.numpy.load_file(folder / 'model.safetensors')
    if change_config:
        change_config(config)
    if change_tensors:
        change_tensors(held)
    (folder / 'config.json').write_text(json.dumps(config))
    safetensors.numpy.save_file(held, folder / 'model.safetensors')
    return folder
