"""Which rows of a batch belong to one sequence, under all that a scheduler does to it."""

import numpy as np
import torch

from samebits.trace import rows
from samebits.trace.rows import Finder, Piece

BLOCK = 4
WANTED = np.array([7, 8, 9, 7, 5, 6, 7, 1, 2, 3])


def _found(finder, batch):
    """Rows and positions of a pass over (tokens, first position, pages) of every request."""
    pieces, ids = [], []
    for tokens, position, blocks in batch:
        pieces.append(Piece(len(ids), len(tokens), position, blocks))
        ids += tokens
    return [found.tolist() for found in finder.find(np.array(ids), pieces, BLOCK)]


def test_rows_of_one_request_among_others():
    finder = Finder(WANTED)
    other = [1, 2, 3]
    assert _found(finder, [(other, 0, [5]), (WANTED[:6].tolist(), 0, [3, 2])]) == [
        [3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5],
    ]
    # Another request reaches the same position with the same token: not the same sequence.
    assert _found(finder, [([7], 6, [8, 9]), ([7], 6, [3, 2])]) == [[1], [6]]


def test_a_twin_is_followed_until_it_samples_another_token():
    finder, prompt = Finder(WANTED), WANTED[:6].tolist()
    assert _found(finder, [(prompt, 0, [3, 2]), (prompt, 0, [6, 4])])[1] == [*range(6)] * 2
    assert _found(finder, [([9], 6, [3, 2]), ([7], 6, [6, 4])]) == [[1], [6]]
    assert _found(finder, [([1], 7, [3, 2]), ([1], 7, [6, 4])]) == [[1], [7]]
    assert _found(finder, [([2], 8, [3, 2, 1]), ([2], 8, [6, 4, 7])]) == [[1], [8]]


def test_a_hit_of_the_prefix_cache_goes_on_behind_known_pages():
    finder = Finder(WANTED)
    _found(finder, [([*WANTED[:5].tolist(), 50], 0, [3, 2])])  # shares one page of the prefix
    assert _found(finder, [([1] * 5, 0, [8, 9])]) == [[], []]
    assert _found(finder, [(WANTED[4:].tolist(), 4, [8, 7, 6])]) == [[], []]
    finder = Finder(WANTED)
    _found(finder, [(WANTED[:4].tolist(), 0, [3]), ([4, 4], 0, [2])])
    assert _found(finder, [(WANTED[4:].tolist(), 4, [3, 7, 6])])[1] == [4, 5, 6, 7, 8, 9]


def test_a_preempted_request_is_found_again():
    finder = Finder(WANTED)
    _found(finder, [(WANTED[:6].tolist(), 0, [3, 2])])
    _found(finder, [([9, 9, 9, 9], 0, [2])])  # its page goes to another request
    assert _found(finder, [([7], 6, [3, 2])]) == [[], []]
    assert _found(finder, [(WANTED[:7].tolist(), 0, [5, 4])])[1] == [*range(7)]


def test_a_request_behind_the_end_is_another_one():
    finder = Finder(WANTED)
    _found(finder, [(WANTED.tolist(), 0, [3, 2, 1])])
    assert _found(finder, [([4], 10, [3, 2, 1])]) == [[], []]


def test_tables_of_attention_give_the_pieces():
    tables = torch.tensor([[5, 0], [3, 2], [9, 9]]), torch.tensor([0, 3, 4, 4])
    found = rows.paged(*tables, torch.tensor([3, 7, 2]), BLOCK)
    assert found == [Piece(0, 3, 0, [5]), Piece(3, 1, 6, [3, 2])]
    assert rows.packed(torch.tensor([0, 4, 4, 6])) == [Piece(0, 4, 0), Piece(4, 2, 0)]
    finder = Finder(WANTED[:2])
    ids = np.array([1, 2, 3, 4, 7, 8])
    assert finder.find(ids, rows.packed(torch.tensor([0, 4, 6])), 1)[0].tolist() == [4, 5]
