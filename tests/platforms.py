"""What made-up evidence and contracts say of the machine that they are of."""

INTENT = {
    "kind": "cpu",
    "machine": "x86_64",
    "isa": "AVX2",
    "torch": "2.13.0+cpu",
    "numpy": "2.3.5",
    "numba": "0.68.1",
    "llvmlite": "0.50.0",
}

GPU = {
    "kind": "sm90",
    "machine": "x86_64",
    "chip": "NVIDIA H200",
    "compute_capability": "9.0",
    "torch": "2.11.0",
    "cuda": "13.0",
    "triton": "3.6.0",
    "ptxas": "12.9",
}
