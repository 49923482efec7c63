from samebits.evidence import DifferenceReport, Side


def test_values_follow_from_the_width_of_the_bits():
    assert Side("a", "3f80").value == "1.0"
    assert Side("a", "bf800000").value == "-1.0"
    assert Side("a", "3ff0000000000000").value == "1.0"
    assert Side("a", "0" * 32).value == "-"


def test_the_report_descends_to_one_element_and_ends_with_a_command():
    report = DifferenceReport(
        leg="C",
        comparison="trainer-prefill",
        sequence=4,
        position=17,
        token=1203,
        left=Side("trainer_score", "bf800000"),
        right=Side("engine_prefill", "bf800001"),
        command="samebits prove qwen3-tiny --leg C --sequence 4",
        step=2,
        layer=1,
        region="gemm.row",
        element=(16, 3),
        element_left=Side("trainer_score", "3f80"),
        element_right=Side("engine_prefill", "3f81"),
        differing=12,
        elements=4096,
    )
    text = str(report)
    words = ["step", "sequence 4", "bf800001", "layer", "gemm.row", "12 of 4096", "[16, 3]", "3f81"]
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert text.splitlines()[-1] == "repeat: samebits prove qwen3-tiny --leg C --sequence 4"
    assert report.as_dict()["element"] == (16, 3)


def test_an_untraced_difference_says_so():
    side = Side("rollout", "bf800000")
    text = str(DifferenceReport("B", "decode-prefill", 0, 1, 2, side, side, "samebits prove x"))
    assert "not traced" in text
