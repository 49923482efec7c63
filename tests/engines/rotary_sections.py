"""Runs in a process with the patched tree: vLLM's own rotary sections on the positions of text.

Prints JSON: {"running": whether positions of text count up from zero, "rows": how many differ from
those of the first row in a request without images, prefill and decode, "image": the same with an
image, KIND: {"text": elements of q and k with other bits than `RotaryEmbedding` gives, "image": the
same with an image}}.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, get_rope

from samebits.bench.stock_hybrid import qwen3_5

HEAD, SHARE, THETA, LONGEST = 256, 0.25, 10_000_000, 4096
SECTIONS = [11, 11, 10]
PROMPT, DECODED = 700, 40
KINDS = {"interleaved": True, "blocks": False}


def rows(features: list) -> torch.Tensor:
    """Positions int64[3, PROMPT + DECODED] as the model runner takes them from the model."""
    config = SimpleNamespace(
        video_token_id=7,
        vision_start_token_id=8,
        vision_end_token_id=9,
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )
    model = qwen3_5.Qwen3_5ForConditionalGeneration
    prompt, delta = model._get_mrope_input_positions(
        input_tokens=[1] * PROMPT, mm_features=features, config=config
    )
    decoded = np.zeros((3, DECODED), dtype=np.int64)
    for step in range(DECODED):
        MRotaryEmbedding.get_next_input_positions_tensor(decoded, step, delta, PROMPT + step, 1)
    return torch.cat([prompt, torch.from_numpy(decoded)], dim=1)


def image() -> list:
    grid = SimpleNamespace(data=torch.tensor([1, 16, 24]))
    place = SimpleNamespace(offset=100)
    return [SimpleNamespace(modality="image", mm_position=place, data={"image_grid_thw": grid})]


def differing(positions: torch.Tensor) -> int:
    return int((positions != positions[:1]).sum())


def bits(pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([tensor.view(torch.int16).flatten() for tensor in pair])


def main() -> None:
    text, shown = rows([]), rows(image())
    found: dict = {"rows": differing(text), "image": differing(shown)}
    found["running"] = bool((text[0] == torch.arange(PROMPT + DECODED)).all())
    torch.manual_seed(1)
    q, k = (torch.randn(PROMPT + DECODED, n * HEAD, dtype=torch.bfloat16) for n in (8, 2))
    base = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": SHARE}

    def turned(parameters: dict, positions: torch.Tensor) -> torch.Tensor:
        made = get_rope(HEAD, LONGEST, rope_parameters=parameters, dtype=torch.bfloat16)
        assert isinstance(made, MRotaryEmbedding) == ("mrope_section" in parameters)
        return bits(made.forward_native(positions, q.clone(), k.clone()))

    plain = turned(base, text[0])
    for kind, interleaved in KINDS.items():
        sections = {"mrope_section": SECTIONS, "mrope_interleaved": interleaved}
        found[kind] = {
            name: int((turned(base | sections, positions) != plain).sum())
            for name, positions in (("text", text), ("image", shown))
        }
    print(json.dumps(found))


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        main()
