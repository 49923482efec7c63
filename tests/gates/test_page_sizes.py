"""Engines that stress a model with states: sizes that follow from its page make hazards fire."""

import hashlib
import types
from dataclasses import replace

import pytest

from samebits import recipe as recipes
from samebits.casework import engine
from samebits.errors import Refused
from samebits.gates import advice, capsule, fired, forecast, pages, rl, sizes, tasks, workload


def of(page: int, *, interval: int = 4, **sizes: int) -> recipes.Recipe:
    """The recipe of a small hybrid with another page, and one layer with attention in `interval`.

    Its vocabulary is a real one, so that drawn prompts share no page by chance.
    """
    recipe = recipes.load("qwen3.5-tiny")
    model = dict(recipe.data["model"])
    layers = {"num_hidden_layers": interval, "full_attention_interval": interval}
    model["config"] = {**recipe.config, **layers, "vocab_size": 248_320}
    made = {**pages.engine("cpu", page), "block_size": page}
    return replace(
        recipe, data={**recipe.data, "model": model, "engine": {**recipe.engine, **made, **sizes}}
    )


def served(recipe, settings, size, first, tmp_path) -> forecast.Served:
    """An engine that serves the recipe's requests, (how many, tokens of a response) of them."""
    return forecast.Served(recipe, settings, first, workload.main(recipe, tmp_path, *size, 65))


CASES = [
    (of(page, interval=interval), size)
    for page, interval in ((512, 4), (1024, 4), (2048, 4), (1024, 2), (1088, 6))
    for size in ((16, 16), (20, 28), (48, 32))
]


def never(report: dict, name: str) -> list[str]:
    """Hazards of an engine's row that its counters do not have."""
    counts = fired.scheduled(fired.ROWS_OF_STATES[name], report)
    return [hazard for hazard, count in counts.items() if not count]


def test_every_hazard_fires_at_every_page(tmp_path):
    small = [
        (recipes.load(case), size)
        for case in ("qwen3.5-tiny", "qwen3.5-tiny-cpr")
        for size in ((20, 24), (48, 140))
    ]
    work = [(r, pages.sliced(r), size, 0, "rollout_stress") for r, size in [*small, *CASES]]
    work += [(r, pages.paged(r), size, 1, "rollout_paged") for r, size in [*small, *CASES]]
    # What was so before sizes followed from the page: hardly two requests in flight.
    before = (of(2048), pages.sliced(recipes.load("qwen3.5-tiny")), (20, 28), 0, "rollout_stress")
    engines = [served(*given, tmp_path) for *given, _ in [*work, before]]
    *found, last = forecast.counters(tmp_path, engines)
    assert [never(report, w[-1]) for report, w in zip(found, work, strict=True)] == [[]] * len(work)
    assert "preempted" in never(last, before[-1])


def test_the_first_prompt_of_an_rl_step_is_still_cached_at_its_end(tmp_path):
    """Its pages are what a refit has to drop, and nothing is preempted to make room."""
    recipe = recipes.load("qwen3.5-9b-rl-h200")
    asked = tasks.drawn(recipe, recipe.rl["prompts_per_step"]).prompts
    requests = [
        capsule.Request(r.prompt, r.seed, r.max_tokens, "rl")
        for r in rl._requests(asked, recipe.rl, 1)
    ]
    names = ("max_num_seqs", "max_num_batched_tokens", "kv_blocks")
    sizes = {name: recipe.engine[name] for name in names}
    tight = {**sizes, "max_num_seqs": 8, "kv_blocks": 14}
    engines = [forecast.Served(recipe, chosen, 0, requests) for chosen in (sizes, tight)]
    report, least = forecast.counters(tmp_path, engines)
    assert report["cached_pages"] == 1 + pages.states(recipe) and not report.get("resumed")
    assert report["prefix_hit_requests"] == recipe.rl["samples_per_prompt"] - 1
    assert 0 < least["cached_pages"] < report["cached_pages"]  # others took most of them


@pytest.fixture
def run(tmp_path):
    """A run over a large page that has not begun, with changes of its recipe and options."""

    def make(recipe=None, **options):
        recipe = recipe or of(1024)
        return types.SimpleNamespace(
            recipe=recipe, folder=tmp_path, model=tmp_path, options=options, flag=" --record"
        )

    return make


def test_sizes_that_fire_every_hazard_are_said_before_the_run(run, tmp_path, capsys):
    asked = run()
    forecast.check(asked, workload.main(asked.recipe, tmp_path, 16, 16, 65))
    said = capsys.readouterr().err
    assert "rollout_stress, from sizes alone" in said and "rollout_paged, from sizes alone" in said
    assert "preempted 1" in said or "preempted 2" in said


def test_sizes_that_never_preempt_are_refused_before_the_run(run, tmp_path):
    asked = run(stress_blocks=200)
    with pytest.raises(Refused, match="SB0931") as error:
        forecast.check(asked, workload.main(asked.recipe, tmp_path, 16, 16, 65))
    assert "kv_blocks 200" in error.value.seen and "preempted never fired" in error.value.seen
    assert "`stress_blocks`" in error.value.required


def test_a_request_that_never_gets_its_pages_is_refused(run, tmp_path):
    asked = run(stress_blocks=4)
    with pytest.raises(Refused, match="SB0931") as error:
        forecast.check(asked, workload.main(asked.recipe, tmp_path, 16, 16, 65))
    assert "never gets its pages" in error.value.seen


def test_nothing_is_forecast_where_pages_hold_no_states(run, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "counters", None)
    forecast.check(run(recipes.load("qwen3-tiny")), [])
    forecast.check(run(recipes.load("qwen3.5-9b-h200")), [])
    for name in fired.ROWS_OF_STATES:
        (tmp_path / f"{name}.json").touch()
    forecast.check(run(), [])


def test_hazards_of_pages_have_a_size_that_cures_them():
    reasons = [f"leg B: hazard {h} never fired" for h in ("preempted", "prefix_hit")]
    assert all(advice.of(reason, recorded=True) for reason in reasons)


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
    assert not pages.large(recipe.platform, recipe.engine["block_size"])
    assert pages.paged(recipe) == {"max_num_seqs": 64, "kv_blocks": 176}


@pytest.mark.parametrize(
    ("case", "digest"),
    [
        ("qwen3.5-tiny", "20a130786851ed9c"),
        ("qwen3.5-tiny-cpr", "2bec2a0640545a87"),
        ("qwen3.5-9b-h200", "bb511bd532e1418b"),
    ],
)
def test_recorded_cases_have_the_requests_that_they_were_recorded_with(case, digest, tmp_path):
    recipe = recipes.load(case)
    size = sizes.Size.of(recipe, quick=False, record=True)
    requests = workload.main(recipe, tmp_path, size.requests, size.response, 65)
    capsule.write(requests, tmp_path / "capsule.json")
    found = hashlib.sha256((tmp_path / "capsule.json").read_bytes()).hexdigest()
    assert found[:16] == digest


def test_slices_of_large_pages_lie_in_a_chunk_as_those_of_small_ones():
    assert [pages.step(page) for page in (64, 256, 320, 512, 1024)] == [65, 65, 65, 129, 257]
    assert {pages.step(page) % 64 for page in range(64, 5000, 64)} == {1}


def test_large_pages_get_half_of_the_tokens(tmp_path):
    recipe = of(1024)
    few = workload.main(recipe, tmp_path, 16, 16, 257)
    many = capsule.chunked(
        vocabulary=recipe.config["vocab_size"],
        chunk=64,
        page=1024,
        max_model_len=4096,
        max_tokens=16,
        count=16,
        seed=capsule.SEEDS["capsule"],
    )
    total = [sum(len(r.prompt) for r in requests) for requests in (few, many)]
    assert 2 * total[0] < total[1]
    assert {"chunk-plus-one", "page-minus-three", "page-minus-five"} <= {r.tag for r in few}
    first, second = (r.prompt for r in few if r.tag == "shared-prefix")
    assert len(first) == 1024 and second[:1024] == first
    twins = [few[i].prompt for i in capsule.TWINS]
    assert twins[0] == twins[1] and [few[i].tag for i in capsule.TWINS] == ["twin", "twin"]


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
