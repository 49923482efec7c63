"""What made-up evidence says of the machine that it ran on."""

INTENT = {
    "kind": "cpu",
    "machine": "x86_64",
    "isa": "AVX2",
    "torch": "2.13.0+cpu",
    "numpy": "2.3.5",
    "numba": "0.68.1",
    "llvmlite": "0.50.0",
}
