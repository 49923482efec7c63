"""Engines that stress a model with states: sizes that follow from its page make hazards fire."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import recipe as recipes
from samebits.casework import engine
from samebits.errors import Refused
from samebits.gates import capsule, pages, prove, stages, workload

SCRIPT = Path(__file__).with_name("scheduled.py")


def of(page: int, *, interval: int = 4, **sizes: int) -> recipes.Recipe:
    """The recipe of a small hybrid with another page, and one layer with attention in `interval`.

    Its vocabulary is a real one, so that drawn prompts share no page by chance.
    """
    recipe = recipes.load("qwen3.5-tiny")
    model = dict(recipe.data["model"])
    layers = {"num_hidden_layers": interval, "full_attention_interval": interval}
    model["config"] = {**recipe.config, **layers, "vocab_size": 248_320}
    made = {"max_model_len": 4 * page, "block_size": page}
    made["max_num_batched_tokens"] = 2 * page + 128
    return replace(
        recipe, data={**recipe.data, "model": model, "engine": {**recipe.engine, **made, **sizes}}
    )


def scheduled(plan, tmp_path) -> list[dict]:
    """Reports of vLLM's scheduler for [(recipe, settings, (requests, response), first), ...]."""
    work = []
    for recipe, settings, (count, response), first in plan:
        given = {
            "page": recipe.engine["block_size"],
            "max_model_len": recipe.engine["max_model_len"],
            "states": pages.states(recipe),
            "prefix_caching": True,
            "first": first,
            **settings,
        }
        requests = workload.main(recipe, tmp_path, count, response, 65)
        work.append([given, [[r.prompt, r.max_tokens] for r in requests]])
    file = tmp_path / "work.json"
    file.write_text(json.dumps(work))
    recipe = recipes.load("qwen3.5-tiny")
    settings = stages.RolloutSettings.of(recipe, tmp_path)
    own = {**settings.environment(), "VLLM_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, SCRIPT, file], env=own, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


CASES = [
    (of(page, interval=interval), size)
    for page, interval in ((512, 4), (1024, 4), (2048, 4), (1024, 2), (1088, 6))
    for size in ((20, 24), (20, 28), (48, 32))
]
OF_SLICES = [*prove._IN_SLICES, "preempted", "resumed", "mixed_steps", "one_token_prompts"]


def test_every_hazard_fires_at_every_page(tmp_path):
    small = [(recipes.load(c), (20, 24)) for c in ("qwen3.5-tiny", "qwen3.5-tiny-cpr")]
    plan = [(recipe, pages.sliced(recipe), size, 0) for recipe, size in [*small, *CASES]]
    plan += [(recipe, pages.paged(recipe), size, 1) for recipe, size in CASES]
    found = scheduled(plan, tmp_path)
    sliced, paged = found[: -len(CASES)], found[-len(CASES) :]
    assert [[name for name in OF_SLICES if not report[name]] for report in sliced] == [[]] * (
        len(small) + len(CASES)
    )
    names = ("prefix_hit_requests", "resumed_from_state")
    assert [[name for name in names if not r.get(name)] for r in paged] == [[]] * len(CASES)
    # What was so before sizes followed from the page: hardly two requests in flight.
    recipe = of(2048)
    settings = pages.sliced(recipes.load("qwen3.5-tiny"))
    (before,) = scheduled([(recipe, settings, (20, 28), 0)], tmp_path)
    assert before.get("preempted", 0) == 0


@pytest.mark.parametrize("case", ["qwen3.5-tiny", "qwen3.5-tiny-cpr"])
def test_recorded_cases_have_the_settings_that_they_were_recorded_with(case):
    recipe = recipes.load(case)
    sizes = {"max_num_batched_tokens": 65, "max_num_seqs": 16, "kv_blocks": 26}
    assert pages.sliced(recipe) == {**sizes, "prefix_caching": False}
    assert pages.paged(recipe) == {
        "max_num_batched_tokens": 640,
        "max_num_seqs": 16,
        "kv_blocks": 44,
    }


def test_a_case_of_a_gpu_keeps_its_settings_and_requests(tmp_path):
    recipe = recipes.load("qwen3.5-9b-h200")
    assert not pages.large(recipe)
    assert pages.paged(recipe) == {"max_num_seqs": 64, "kv_blocks": 176}


@pytest.mark.parametrize(
    ("case", "digest"),
    [
        ("qwen3.5-tiny", "20a130786851ed9c"),
        ("qwen3.5-tiny-cpr", "2bec2a0640545a87"),
        ("qwen3.5-9b-h200", "d7a38910f0203883"),
    ],
)
def test_recorded_cases_have_the_requests_that_they_were_recorded_with(case, digest, tmp_path):
    recipe = recipes.load(case)
    size = prove.Size.of(recipe, quick=False, record=True)
    requests = workload.main(recipe, tmp_path, size.requests, size.response, 65)
    capsule.write(requests, tmp_path / "capsule.json")
    found = hashlib.sha256((tmp_path / "capsule.json").read_bytes()).hexdigest()
    assert found[:16] == digest


def test_slices_of_large_pages_lie_in_a_chunk_as_those_of_small_ones():
    assert [pages.step(page) for page in (64, 256, 320, 512, 1024)] == [65, 65, 65, 129, 257]
    assert {pages.step(page) % 64 for page in range(64, 5000, 64)} == {1}


def test_large_pages_get_half_of_the_tokens(tmp_path):
    recipe = of(1024)
    few = workload.main(recipe, tmp_path, 20, 28, 257)
    chunk, engine_sizes = 64, recipe.engine
    many = capsule.chunked(
        vocabulary=recipe.config["vocab_size"],
        chunk=chunk,
        page=1024,
        max_model_len=engine_sizes["max_model_len"],
        max_tokens=28,
        count=20,
        seed=capsule.SEEDS["capsule"],
    )
    total = [sum(len(r.prompt) for r in requests) for requests in (few, many)]
    assert 2 * total[0] < 1.1 * total[1]
    tags = {r.tag for r in few}
    assert {"two-pages-minus-2", "two-pages-minus-5", "one-page", "page-minus-three"} <= tags
    first, *shared = (r.prompt for r in few if r.tag == "shared-prefix")
    assert all(first[:1024] == prompt[:1024] for prompt in shared) and len(first) < 2048


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens 255"),
        ({"block_size": 192}, "block_size 192"),
        ({"block_size": 288}, "block_size 288"),
        ({"kv_blocks": 4}, "kv_blocks 4"),
    ],
)
def test_sizes_that_vllm_would_refuse_are_refused_before(sizes, words):
    engine.check(recipes.load("qwen3.5-tiny"))
    with pytest.raises(Refused, match="SB0328") as error:
        engine.check(of(256, **sizes))
    assert words in error.value.seen and next(iter(sizes)) in error.value.required


def test_every_case_has_sizes_that_fit():
    for case in recipes.known_cases():
        engine.check(recipes.load(case))
