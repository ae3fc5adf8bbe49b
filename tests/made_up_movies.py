"""Made-up ratings in the format of MovieLens-100K, for the examples that read it."""

import pathlib

import numpy as np

USERS, MOVIES, RATINGS = 60, 90, 1500


def write(folder: pathlib.Path) -> pathlib.Path:
    """Write the three files into a folder."""
    rng = np.random.default_rng(0)

    def write_table(name, heading, rows):
        lines = ["\t".join(heading.split()), *("\t".join(map(str, row)) for row in rows)]
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n")

    write_table(
        "inter",
        "user_id:token item_id:token rating:float timestamp:float",
        [
            (rng.integers(1, USERS + 1), rng.integers(1, MOVIES + 1), rng.integers(1, 6), 1000 + n)
            for n in range(RATINGS)
        ],
    )
    write_table(
        "user",
        "user_id:token age:token gender:token occupation:token zip_code:token",
        [(n + 1, 20 + n % 40, "MF"[n % 2], "writer", f"{n:05}") for n in range(USERS)],
    )
    write_table(
        "item",
        "item_id:token movie_title:token_seq release_year:token class:token_seq",
        [
            (n + 1, f"Movie {n}", 1980 + n % 20, "Comedy Drama"[: 6 + n % 2 * 6])
            for n in range(MOVIES)
        ],
    )
    return folder
