"""Tables of recorded GPU rows."""

import pytest

from samebits.bench import gdn_cost, pages

BASE = {"unit": "us", "hardware": "a GPU", "date": "2026-01-02", "others": []}


def row(work, ours, against, time, target=None):
    ratio = round(ours / time, 3)
    met = None if target is None else ratio <= target
    other = {"name": against, "time": time}
    judged = {"ratio": ratio, "target": target, "met": met}
    return BASE | judged | {"work": work, "ours": ours, "against": other}


ROWS = [
    row("gemm o 1 x 64 x 32 bf16", 1.0, "cuBLAS", 2.0, 1.1),
    row("gemm o 8 x 64 x 32 bf16", 3.0, "cuBLAS", 2.0, 1.1),
    row("gemm o 8 x 64 x 32 bf16, 4 leaves", 2.0, "cuBLAS", 2.0, 1.15),
    row("rotary 8 x 8 bf16", 10.0, "bytes / 4.3 TB/s", 9.0, 1.25),
    row("rotary 4 x 4 bf16", 10.0, "bytes / 4.3 TB/s", 5.0, 1.25),
    row("attention decode", 9.0, "flash", 10.0, 1.1),
    row("attention decode", 9.0, "cuDNN", 6.0, 1.1),
    row("lm_head + logprob", 9.0, "cuBLAS", 6.0, None),
    row("gdn cpr, decode, 4 heads", 9.0, "fla", 6.0, 0.75),
    row("gdn cpr, decode, 8 heads", 3.0, "fla", 6.0, 0.65),
    row("gdn cpr, train 1 x 9, 8 heads", 5.0, "fla chunk", 10.0, 0.9),
    row("gdn cpr, train 1 x 9, 8 heads", 5.0, "FlashQLA", 2.5, 1.25),
    row("gdn cpr, layer train 1 x 9, 8 heads", 5.0, "cuBLAS and fla", 4.0, 1.1),
    row("gdn chunk_row, decode, 8 heads", 1234.0, "fla", 6.0, 0.65),
]


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (
            pages.products,
            [
                "| product | N x K | target | M = 1 | M = 8 |",
                "| o | 32 x 64 | 1.10 | 0.50 | **1.50** |",
                "| o, 4 leaves | 32 x 64 | 1.15 | - | 1.00 |",
            ],
        ),
        (
            pages.rates,
            ["| rotary 8 x 8 bf16 | 10.0 | 0.80 | 0.90 |", "| 10.0 | 0.80 | **0.50** |"],
        ),
        (
            pages.attention,
            [
                "| work | ours | target | to flash | to cuDNN |",
                "| attention decode | 9.0 us | 1.10 | 0.90 | **1.50** |",
            ],
        ),
        (pages.head, ["| lm_head + logprob | 9.0 us | - | 1.50 |"]),
        (
            lambda rows: pages.gdn(rows, "cpr"),
            [
                "| decode | 0.75, 0.65 | 9.0 (**1.50**) | 3.0 (0.50) |",
                "| train 1 x 9 | 0.90 | - | 5.0 (0.50) |",
                "| train 1 x 9, to FlashQLA | 1.25 | - | 5.0 (**2.00**) |",
                "| layer train 1 x 9 | 1.10 | - | 5.0 (**1.25**) |",
            ],
        ),
    ],
)
def test_a_table_has_the_rows_of_its_kind_and_marks_what_is_missed(table, lines):
    text = table(ROWS)
    assert text.startswith("a GPU, 2026-01-02:")
    for line in lines:
        assert line in text
    assert "1,234" not in text  # another schedule's


def test_engines_have_a_line_for_each_configuration():
    mine = row("rollout of toys", 2.0, "V2", 1.0, 1.053)
    mine["against"]["differ"] = "7 of 9"
    mine["others"] = [{"name": "V1", "time": 4.0}, {"name": "V0", "not_measured": "no such"}]
    text = pages.engines([*ROWS, mine])
    for line in (
        "| rollout of toys | aligned | 2.0 us |  | 0 differ |",
        "|  | V2 | 1.0 us | **2.00** | 7 of 9 differ |",
        "|  | V1 | 4.0 us | 0.50 | - |",
        "|  | V0 | not measured |  | no such |",
    ):
        assert line in text
    states = row("memory of states, toy", 3.0, "V2", 2.0, None) | {"unit": "MiB"}
    text = pages.engines([mine, states])
    assert "| memory of states, toy | aligned | 3.0 MiB |  | - |" in text
    assert "|  | V2 | 2.0 MiB | 1.50 | - |" in text
    assert "targets 1.05, of" in text
    assert "gemm" not in text


def test_a_time_of_gdn_is_held_against_what_its_kernels_move():
    rows = [
        row("gdn chunk_row, decode 16 x 1, closing, 8 heads", 10.0, "fla", 6.0, 2.0),
        row("gdn chunk_row, prefill 1 x 128, 8 heads", 100.0, "fla", 6.0, 0.9),
        row("gdn chunk_row, prefill 1 x 128, 8 heads", 100.0, "FlashQLA", 6.0, 1.25),
        row("gdn chunk_row, prefill 1 x 128, 4 heads", 50.0, "fla", 6.0, 0.9),
        *ROWS,
    ]
    lines = [line.split(" | ") for line in pages.gdn_ceilings(rows).splitlines()[4:]]
    assert [line[:3] for line in lines] == [
        ["| decode 16 x 1, closing", "8", "10.0"],
        ["| prefill 1 x 128", "4", "50.0"],
        ["| prefill 1 x 128", "8", "100.0"],
    ]
    layer = gdn_cost.Layer(4, 8)
    moved = gdn_cost.prefill("chunk_row", layer).moved * 128 * 8
    assert lines[2][3:5] == [f"{moved / 1e6:,.0f}", f"{moved / 4.3e6 / 100:.2f}"]
    closing = gdn_cost.decode_step(63, layer)
    assert closing.moved > 2 * gdn_cost.decode_step(62, layer).moved
    assert lines[0][4] == f"{closing.moved * 16 * 8 / 4.3e6 / 10:.2f}"
    # Over all rows of a chunk the mean is what a decoded token costs.
    steps = sum((gdn_cost.decode_step(i, layer).moved for i in range(64)), 0.0) / 64
    assert steps == pytest.approx(gdn_cost.decode("chunk_row", layer).moved)
    assert pages.gdn_ceilings([]) == "Not measured."


def test_passes_of_a_layer_stand_beside_native_ones():
    assert pages.gdn_passes(ROWS) == "Not measured."
    passes = {"core": [2.0, 3.0], "gate": [1.0, None]}
    table = pages.gdn_passes([row("passes of decode", 3.0, "fla", 3.0) | {"passes": passes}])
    assert "| pass | decode | native |" in table
    assert "| gate | 1.0 | - |" in table and "| sum | 3.0 | 3.0 |" in table
