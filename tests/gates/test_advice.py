"""A verdict that was not observed says what to raise, where a size is the cure."""

import pytest

from samebits.gates import advice


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("leg B: hazard preempted never fired", "`requests` and `response`"),
        ("leg A: hazard batch_16 never fired", "16"),
        ("leg A, x/y: control k_cut_by_rows did not diverge", "`control_requests`"),
        ("leg A, x/y: control stock did not diverge in 32 tokens, but in 8", "`control_prompt`"),
        ("leg A: 12 tokens of the 400 that the recipe asks for", "`alone`"),
    ],
)
def test_a_size_that_is_too_small_is_named(reason, words):
    quick, recorded = (str(advice.of(reason, recorded=flag)) for flag in (False, True))
    assert words in quick and words in recorded
    assert "--record" in quick and "--record" not in recorded


@pytest.mark.parametrize(
    "reason", ["leg C, x/y: 3 of 9 tokens differ", "leg E: hazard refit never fired"]
)
def test_a_reason_that_no_size_cures_has_no_hint(reason):
    assert advice.of(reason, recorded=False) is None
