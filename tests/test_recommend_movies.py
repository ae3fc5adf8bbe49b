"""The example of tf_scratchpipe, on made-up ratings in the files' own format."""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import pytest

from tests import made_up_movies

PATH = pathlib.Path(__file__).parent.parent / "examples" / "recommend_movies.py"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("recommend_movies", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return made_up_movies.write(tmp_path_factory.mktemp("ml-100k"))


def test_both_tables_learn_the_same(example, folder, capsys):
    options = ["--epochs", "2", "--batch-size", "16", "--slots", "60", "--width", "4"]
    found = example.main(["--data", str(folder), *options])
    assert found["train_hit_rate"] == 1.0
    for name, values in found["plain"].items():
        # The sums of gradients of equal ids are taken in another order.
        np.testing.assert_allclose(found["cached"][name], values, atol=1e-3)
    printed = capsys.readouterr().out
    assert "The cache of the movie table" in printed
    assert "AUC" in printed


def test_the_later_ratings_of_each_user_are_held_out(example):
    users, times = np.array([0, 1, 0, 0, 0, 0]), np.array([5, 1, 4, 3, 2, 1])
    assert example.is_late(users, times).tolist() == [True, False, False, False, False, False]


def test_missing_data_is_said_with_what_to_install(example, tmp_path, capsys):
    with pytest.raises(SystemExit):
        example.main(["--data", str(tmp_path)])
    assert "pip install --no-deps recbole" in capsys.readouterr().err
