"""The comparison with other libraries: what it asks of sides, and what its page says."""

import io
import json
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.peers import cells as cells_lib
from experiments.peers import inputs, naive, ours, page, serve
from experiments.peers.__main__ import RESULTS, main


def test_cells_ask_for_works_that_our_sides_have():
    scripts = {'ours': ours.WORKS, 'naive': naive.WORKS}
    for fast in (False, True):
        for name, cell in cells_lib.cells(fast).items():
            assert cell.name == name
            assert next(iter(cell.sides)) == cells_lib.OURS
            for side in cell.sides.values():
                assert side.script not in scripts or side.work in scripts[side.script]
            assert set(cells_lib.PEERS) == (set(cell.sides) | set(cell.absent)) & {'trl', 'tunix'}


@pytest.mark.parametrize('name', ['score-16-full', 'score-16-support', 'mixture-8', 'mixture-64'])
def test_we_and_plain_jax_find_the_same(tmp_path, name):
    cell = cells_lib.cells(fast=True)[name]
    cell.prepare(tmp_path)
    found = []
    for script, label in ((ours, cells_lib.OURS), (naive, None)):
        side = cell.sides[label or ('plain jax' if 'score' in name else 'ragged_dot')]
        found.append(script.WORKS[side.work](tmp_path, **side.arguments)())
    (key, value), (other, theirs) = (next(iter(x.items())) for x in found)
    assert key == other
    np.testing.assert_allclose(value, theirs, rtol=1e-5)


def test_a_dense_layer_has_the_parameters_that_a_token_meets(tmp_path):
    cells_lib.cells(fast=True)['mixture-64'].prepare(tmp_path)
    mixture, dense = np.load(tmp_path / 'moe.npz'), np.load(tmp_path / 'dense.npz')
    for name in ('gate', 'up', 'down'):
        assert dense[name].size == 8 * mixture[name][0].size


def test_products_are_those_of_projections_layers_and_head(tmp_path):
    config = inputs.dense(160, 2, 64, 96)
    found = inputs.rows_of(160, 4, 8, 8, ragged=False)
    tmp_path.joinpath('config.json').write_text(
        json.dumps(
            dict(
                hidden_size=64,
                intermediate_size=96,
                head_dim=config.head_dim,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                num_hidden_layers=2,
                vocab_size=160,
            )
        )
    )
    np.savez(tmp_path / 'rows.npz', **found)
    layer = 2 * 64 * 32 * (8 + 4) + 3 * 64 * 96  # q and o, k and v; gate, up, down
    assert naive.products(tmp_path)() == {'operations': 6 * (64 * 2 * layer + 32 * 64 * 160)}


def test_the_figure_has_a_range_and_an_aim_for_each_side():
    side = dict(first=9.0, again=3.0, memory=512.0, found={})
    found = {
        'policyopt': side | {'seconds': [1.0, 2.0, 1.0]},
        'trl': side | {'seconds': [2.0, 3.0, 1.0]},
        'tunix': {'failed': 'tunix ended: no memory'},
    }
    figure = Figure()
    page.draw(figure, {'update-8192': found})
    lines = [line.get_xdata() for line in figure.axes[0].lines]
    assert [np.ravel(x).tolist() for x in lines] == [[1.0, 2.0], [1.5], [1.5], [1, 1]]


def test_lengths_have_the_mean_and_the_longest_that_were_asked():
    lengths = inputs.log_normal(1024, 32)
    assert lengths.mean() == pytest.approx(32, rel=0.02)
    assert lengths.max() == pytest.approx(160, rel=0.02)
    assert lengths.min() >= 1


def test_rows_go_from_padding_on_both_sides_to_ours_and_back():
    found = inputs.rows_of(50, 8, 5, 7, ragged=True)
    batch = ours.batch_of(found)
    kept = found['answer_mask'] != 0
    np.testing.assert_array_equal(
        ours.answers_of(found, np.asarray(batch.tokens))[kept], found['answer'][kept]
    )
    for row in range(8):
        prompt = found['prompt'][row][found['prompt_mask'][row] != 0]
        np.testing.assert_array_equal(batch.tokens[row, : len(prompt)], prompt)
        assert int(batch.length[row]) == len(prompt) + kept[row].sum()
        assert int(batch.mask[row].sum()) == kept[row].sum()


def answers(monkeypatch, capfd, work, **arguments):
    """Three answers of a side."""
    asked = json.dumps({'work': 'work', 'folder': 'abc', 'arguments': arguments})
    monkeypatch.setattr(sys, 'stdin', io.StringIO(f'{asked}\n\n\n'))
    monkeypatch.setattr(serve.os, 'dup2', lambda *_: None)  # pytest needs its own
    serve.serve({'work': work})
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith('{')]
    return [json.loads(line) for line in lines]


def test_a_side_answers_in_lines(monkeypatch, capfd):
    def work(folder, times):
        print('what a library prints is no answer')
        return lambda: {'product': times * len(str(folder))}

    found = [answer['found'] for answer in answers(monkeypatch, capfd, work, times=2)]
    assert found == [{'product': 6}] * 3


def test_working_memory_is_what_one_run_takes(monkeypatch, capfd):
    size = 2**26

    def work(folder):
        held = np.ones(size, np.uint8)
        more = iter([4, 2, 1])
        return lambda: {'sum': int(np.ones(next(more) * size, np.uint8)[0] + held[0])}

    found = answers(monkeypatch, capfd, work)
    assert [x['working'] for x in found] == pytest.approx([256, 128, 64], abs=24)
    assert [x['memory'] for x in found] == pytest.approx([320] * 3, abs=24)


def test_rewards_are_digits_from_the_left():
    assert serve.reward('47+85=', '132') == 1
    assert serve.reward('47+85=', '13') == pytest.approx(2 / 3)
    assert serve.reward('47+85=', '232') == pytest.approx(2 / 3)
    assert serve.reward('10+10=', '') == 0


def test_the_page_compares_rounds():
    cell = cells_lib.cells()['update-8192']
    side = dict(first=9.0, again=3.0, memory=512.0)
    found = {
        'policyopt': side | {'seconds': [1.0, 2.0, 1.0], 'found': {'loss': 2.0}},
        'trl': side | {'seconds': [2.0, 3.0, 1.0], 'found': {'loss': 2.00002}},
        'tunix': {'failed': 'tunix ended: no memory'},
    }
    text = '\n'.join(page.lines(cell, found))
    assert '| policyopt | 1 s |  |  | 512 MiB | 9.0 / 3.0 s |' in text
    memory = '512 MiB, 1.0 times ours; 2 **missed**'
    assert f'| TRL | 2 s | 1.50 (1.00-2.00) | 1.5 met | {memory} |' in text
    assert '| tunix | tunix ended: no memory |' in text
    assert 'agree to 1e-05' in text


def test_the_summary_counts_aims_and_names_who_is_ahead():
    side = dict(memory=512.0, found={})
    found = {
        'policyopt': side | {'seconds': [1.0, 2.0]},
        'trl': side | {'seconds': [2.0, 4.0], 'memory': 400.0},
        'tunix': side | {'seconds': [0.5, 1.0]},
        'products alone': side | {'seconds': [0.7, 1.4], 'memory': 100.0},
    }
    assert page.summary({'update-8192': found}) == (
        'Of 3 aims for time 2 are met. Faster than we are: tunix in `update-8192` (0.50). '
        'TRL takes less memory in `update-8192`.'
    )


def test_temporaries_are_beyond_what_was_loaded_and_returned():
    cell = cells_lib.cells()['score-576-full']
    side = dict(first=9.0, again=3.0, memory=900.0, seconds=[1.0], found={'sum': 1.0})
    assert cell.returned == pytest.approx(336.1, abs=0.1)
    found = {
        'policyopt': side | {'working': cell.returned + 20},
        'tunix': side | {'working': cell.returned + 1000},
        'trl': side | {'working': cell.returned - 3},
    }
    text = '\n'.join(page.lines(cell, found))
    assert '| policyopt | 1 s |  |  | 900 MiB; temporaries 20 MiB |' in text
    assert '900 MiB, 1.0 times ours; temporaries 1,000 MiB, 50.0 times ours; 5 met |' in text
    assert 'temporaries 16 MiB, 0.8 times ours; 5 **missed** |' in text


def test_a_missing_environment_says_how_to_get_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(['update-8192', f'--environments={tmp_path}'])
    assert 'make peers' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(['update-8193', f'--environments={tmp_path}'])
    assert 'update-8192' in capsys.readouterr().err


def test_the_page_is_that_of_the_numbers():
    held = json.loads(RESULTS.read_text())
    assert (RESULTS.parent / 'performance.md').read_text() == page.page(held)
    assert set(held['cells']) <= set(cells_lib.cells())
