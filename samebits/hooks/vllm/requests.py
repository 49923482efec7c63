"""Which sampling settings a request may carry: those for which the logprob means one thing.

vLLM takes raw logprobs before temperature, penalties and masks; a trainer scores the plain
softmax. The two agree only when the sampler changes nothing, so everything else is refused.
"""

from __future__ import annotations

from samebits import runtime
from samebits.errors import Refused

# field of vllm.SamplingParams -> values that leave the distribution alone
_NEUTRAL: dict[str, tuple] = {
    "n": (1,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "extra_args": (None, {}),
}


def check(params) -> None:
    """Refuse a request whose sampling settings are outside the list (SB0509, SB0510).

    Temperature is 1.0 with a seed of the request's own, or 0 for a request that only scores its
    prompt (max_tokens 1, prompt_logprobs set).
    """
    from vllm import SamplingParams

    if not runtime.aligned():
        return
    if not isinstance(params, SamplingParams):
        raise _outside("a pooling request", "a generation request")
    for name, allowed in _NEUTRAL.items():
        value = getattr(params, name)
        if value not in allowed:
            raise _outside(f"{name}={value!r}", f"{name}={allowed[0]!r}")
    scoring = params.max_tokens == 1 and params.prompt_logprobs is not None
    if params.temperature != 1.0 and not (params.temperature == 0.0 and scoring):
        raise _outside(f"temperature={params.temperature!r}", "temperature=1.0")
    if params.temperature == 1.0 and params.seed is None:
        raise Refused(
            "SB0510",
            seen="a sampled request without a seed",
            required="a seed per request, so that one seed gives one text in any batch",
            hint="samebits explain SB0510",
        )


def _outside(seen: str, required: str) -> Refused:
    return Refused("SB0509", seen=seen, required=required, hint="samebits explain SB0509")
