"""The main example, small."""

import importlib.util
import pathlib
import types

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
SMALL = "--limit 200 --epochs 1 --max-length 8 --units 16 --batch-size 32".split()


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("translate_names", FOLDER / "translate_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_trains_scores_and_shows_the_plan(example, capsys):
    scores = example.main([*SMALL, "--skip-peaks"])
    printed = capsys.readouterr().out
    assert 0 <= scores["chrf"] <= 100
    assert 0 < scores["copy_chrf"] < 100
    assert "regions recomputed" in printed
    assert "predicted peak after" in printed


def test_pairs_differ_and_no_source_is_on_both_sides_of_the_split(example):
    pairs = example.read_pairs("de", 24)
    train, held_out = example.split_pairs(pairs, seed=0, limit=None)
    assert len(pairs) > 3000
    assert all(source != target for source, target in pairs)
    assert not {source for source, _ in train} & {source for source, _ in held_out}


def test_the_alphabet_reads_what_it_writes(example):
    alphabet = example.Alphabet(["Tatar", "Krimtatarisch"])
    rows = alphabet.encode(["Tatar", "matsch"], 10)
    assert [alphabet.decode(row) for row in rows] == ["Tatar", "matsch"]


def test_an_unknown_language_is_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--language", "xx"])
    assert "no catalogues for this language. Received: 'xx'" in capsys.readouterr().err


@pytest.mark.slow
def test_it_measures_less_memory_with_echo(example):
    peaks = example.main([*SMALL, "--max-length", "16", "--units", "64"])["peaks"]
    assert peaks["echo"]["peak_bytes"] < peaks["none"]["peak_bytes"]
