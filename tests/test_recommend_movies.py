"""The example of tf_scratchpipe, on made-up ratings in the files' own format."""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parent.parent / "examples" / "recommend_movies.py"
USERS, MOVIES, RATINGS = 60, 90, 1500


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("recommend_movies", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("ml-100k")

    def write(name, heading, rows):
        lines = ["\t".join(heading.split()), *("\t".join(map(str, row)) for row in rows)]
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n")

    write(
        "inter",
        "user_id:token item_id:token rating:float timestamp:float",
        [
            (rng.integers(1, USERS + 1), rng.integers(1, MOVIES + 1), rng.integers(1, 6), 1000 + n)
            for n in range(RATINGS)
        ],
    )
    write(
        "user",
        "user_id:token age:token gender:token occupation:token zip_code:token",
        [(n + 1, 20 + n % 40, "MF"[n % 2], "writer", f"{n:05}") for n in range(USERS)],
    )
    write(
        "item",
        "item_id:token movie_title:token_seq release_year:token class:token_seq",
        [
            (n + 1, f"Movie {n}", 1980 + n % 20, "Comedy Drama"[: 6 + n % 2 * 6])
            for n in range(MOVIES)
        ],
    )
    return folder


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
