"""Capsules hold the corners of the scheduler; engine answers become streams of the right rows."""

import types

import numpy as np
import pytest

from samebits import prompts
from samebits import recipe as recipes
from samebits.engines.rollout_wire import Completion, Score
from samebits.errors import Refused
from samebits.gates import capsule, semantic, stages, workload

OPTIONS = {
    "vocabulary": 1000,
    "block_size": 16,
    "partition": 256,
    "budget": 64,
    "max_model_len": 512,
    "max_tokens": 20,
    "count": 28,
    "seed": 11,
}


@pytest.fixture(scope="module")
def requests():
    return capsule.synthetic(**OPTIONS)


def test_every_corner_is_there(requests):
    length = {r.tag: len(r.prompt) for r in requests[: capsule.CORNERS]}
    assert length["one-token"] == 1
    assert length["one-block"] == 16
    assert (length["block-minus-one"], length["block-plus-one"]) == (15, 17)
    assert length["budget"] == 64 and length["over-budget"] > 2 * 64
    assert length["over-partition"] > 256
    assert all(r.tag == "random" for r in requests[capsule.CORNERS :])
    assert len(requests) == 28
    shared = [r.prompt for r in requests if r.tag == "shared-prefix"]
    assert len({p[:64] for p in shared}) == 1 and len(set(shared)) == 3


def test_twins_share_a_prompt_and_not_a_seed(requests):
    first, second = (requests[i] for i in capsule.TWINS)
    assert first.prompt == second.prompt and first.seed != second.seed


def test_every_request_fits_the_model(requests):
    assert all(len(r.prompt) + r.max_tokens < OPTIONS["max_model_len"] for r in requests)
    assert all(3 <= token < OPTIONS["vocabulary"] for r in requests for token in r.prompt)


def test_prompt_and_seed_pairs_are_distinct(requests):
    pairs = [(r.prompt, r.seed) for r in requests]
    assert semantic.distinct(pairs) == len(requests)
    with pytest.raises(Refused, match="SB0913") as error:
        semantic.distinct([*pairs, pairs[4]])
    assert "requests 4 and 28" in error.value.seen


def test_a_capsule_is_reproducible_and_survives_a_file(requests, tmp_path):
    again = capsule.synthetic(**OPTIONS)
    paths = tmp_path / "a", tmp_path / "b"
    assert capsule.write(requests, paths[0]) == capsule.write(again, paths[1])
    assert capsule.read(paths[0]) == requests
    other = capsule.synthetic(**{**OPTIONS, "seed": 12})
    assert capsule.write(other, paths[1]) != capsule.write(requests, paths[0])


@pytest.fixture(params=["qwen3-tiny", "smollm2-135m"])
def recipe(request, monkeypatch):
    monkeypatch.setattr(prompts, "tokenizer_of", lambda model: None)
    found = [types.SimpleNamespace(ids=[5, 6, 7 + i]) for i in range(40)]
    monkeypatch.setattr(prompts, "load", lambda recipe, tokenizer: found)
    return recipes.load(request.param)


def test_real_prompts_replace_random_ones_and_no_corner(recipe, tmp_path):
    found = workload.main(recipe, tmp_path, 20, 4, 64)
    tags = [r.tag for r in found]
    assert len(found) == 20 and "prompt" not in tags[: capsule.CORNERS]
    real = prompts.path(recipe).exists()
    assert (tags[capsule.CORNERS :] == ["prompt"] * 8) == real
    assert semantic.distinct((r.prompt, r.seed) for r in found) == 20


def test_control_requests_are_short(recipe, tmp_path):
    found = workload.control(recipe, tmp_path, 8, 4)
    assert len(found) == 8 and all(len(r.prompt) < 64 for r in found)
    assert semantic.distinct((r.prompt, r.seed) for r in found) == 8


REQUEST = capsule.Request((5, 6, 7), 1, 2, "x")
BITS = np.array([1, 2, 3, 4], np.uint32)


def test_decode_rows_start_after_the_prompt():
    done = Completion((8, 9), BITS[:2], 0, "length", "r0")
    digests = {"r0": {3: (11 << 64) | 10, 4: 12}}
    columns = workload.decoded([REQUEST], [done], digests, base=40).columns()
    assert columns["sequence"].tolist() == [40, 40]
    assert columns["position"].tolist() == [3, 4]
    assert columns["token"].tolist() == [8, 9]
    assert columns["digest_low"].tolist() == [10, 12]
    assert columns["digest_high"].tolist() == [11, 0]
    assert workload.sequences([REQUEST], [done]) == [[5, 6, 7, 8, 9]]


def test_scored_rows_start_at_the_second_token():
    columns = workload.scored([[5, 6, 7, 8, 9]], [Score(BITS, "r0")]).columns()
    assert columns["position"].tolist() == [1, 2, 3, 4]
    assert columns["token"].tolist() == [6, 7, 8, 9]
    assert not columns["digest_low"].any()


def test_a_missing_row_is_an_error_and_not_a_shorter_stream():
    with pytest.raises(ValueError):
        workload.scored([[5, 6, 7, 8, 9]], [Score(BITS[:3], "r0")])


def test_the_trainer_and_the_rollout_meet_on_one_key():
    scores = types.SimpleNamespace(
        logprobs=[BITS.view(np.float32)], digests=[[f"{(3 << 64) | i:032x}" for i in range(4)]]
    )
    columns = workload.trained([[5, 6, 7, 8, 9]], scores).columns()
    assert columns["position"].tolist() == [1, 2, 3, 4]
    assert columns["bits"].tolist() == BITS.tolist()
    assert columns["digest_low"].tolist() == [0, 1, 2, 3]
    assert columns["digest_high"].tolist() == [3] * 4


CHUNKED = {
    "vocabulary": 1000,
    "chunk": 64,
    "page": 256,
    "max_model_len": 1024,
    "max_tokens": 20,
    "count": 20,
    "seed": 11,
}


def test_a_chunked_capsule_has_the_corners_of_chunks_and_pages():
    requests = capsule.chunked(**CHUNKED)
    length = {r.tag: len(r.prompt) for r in requests}
    assert [length[f"chunk-{x}"] for x in ("minus-one", "plus-one", "minus-four")] == [63, 65, 60]
    assert (length["one-token"], length["one-chunk"], length["one-page"]) == (1, 64, 256)
    assert 256 - 20 < length["page-minus-five"] < length["page-minus-three"] < 256
    first, *shared = (r for r in requests if r.tag == "shared-prefix")
    assert requests[0] is first and len(first.prompt) > 2 * 256
    assert len(shared) == 2 and all(first.prompt[:512] == r.prompt[:512] for r in shared)
    assert len({r.prompt for r in (first, *shared)}) == 3
    assert [length[f"two-pages-minus-{n}"] for n in (2, 7)] == [510, 505]
    a, b = (requests[i] for i in capsule.TWINS)
    assert a.prompt == b.prompt and a.seed != b.seed and len(requests) == 20
    assert all(len(r.prompt) + r.max_tokens < 1024 for r in requests)
    longer = capsule.chunked(**{**CHUNKED, "page": 600})  # no longer than the model allows
    assert all(len(r.prompt) + r.max_tokens < 1024 for r in longer)


@pytest.mark.parametrize("case", ["qwen3.5-tiny", "qwen3.5-tiny-cpr"])
def test_a_model_with_states_gets_a_chunked_capsule(case, tmp_path):
    recipe = recipes.load(case)
    found = workload.main(recipe, tmp_path, 24, 16, 65)
    assert {"chunk-plus-one", "one-page", "random"} <= {r.tag for r in found}
    assert len(found[0].prompt) > 2 * recipe.engine["block_size"]
    long = workload.control(recipe, tmp_path, 12, 4, 500)
    assert max(len(r.prompt) for r in long) in range(300, 500)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [([1] * 65, 65), ([1, 1, 2], 2), ([16, 16, 33], 0), ([64, 1], 0)],
)
def test_slices_of_one_token_are_never_overstated(pieces, expected):
    company = 15
    fired = {
        "prefill_pieces": company + len(pieces),
        "decode_rows": 40,
        "tokens": company + sum(pieces) + 40,
        "one_token_prompts": company,
    }
    assert stages._one_token_slices(fired) == expected
    assert stages._one_token_slices(fired | {"preempted": 1}) == 0


def test_a_long_prompt_is_the_same_every_time_and_fits():
    recipe = recipes.load("qwen3.5-9b-h200")
    asked, again = (workload.long(recipe, recipe.run["long_prompt"], 160) for _ in range(2))
    assert asked == again and len(asked.prompt) == 32000
    assert len(asked.prompt) + asked.max_tokens <= recipe.engine["max_model_len"]
    assert min(asked.prompt) >= 3 and max(asked.prompt) < recipe.config["vocab_size"]
