"""How far an export's logits may differ from the model's, and why."""

from __future__ import annotations

from export.parity.comparison import Comparison, Limits

# Float32 in another order of additions. Measured: 2e-6 to 1e-5 of the spread for 5 to 12 layers, trained or fresh;
# 5e-6 for 32 fresh layers, and 1e-4 where these have weights six times as large, so that they amplify any difference.
EXACT = Limits(error=3e-4, kl=1e-6, greedy_match=0.99)
# With an INT8 cache a number near the middle between two steps goes either way with the order of additions, and then
# differs by a whole step. Measured: error 1e-3 to 2e-2, KL up to 3e-6; 30 layers of SmolLM2-135M, which amplify any
# difference, 0.16 and 2e-4. What such differences cost a model is measured (`int8_cache_limits`).
EXACT_INT8_CACHE = Limits(error=0.1, kl=1e-4, greedy_match=0.98)
# Float32's order of additions moves keys and values by about as much: a few units in the last place.
MOVED = 1e-6
_TIMES_MOVED = 3
# The deployed pass bounds what rounding costs; finding mistakes is the exact pass's work. Where a fresh model's best
# token leads by less than the rounding noise, greedy choices differ although nothing is wrong: `greedy_match` is low.
DEPLOYED = {
    # Over a float16 cache, where ONNX Runtime's operator computes scores and sums in float16. Measured: error 1e-3 to
    # 3e-2, KL up to 1.4e-6.
    "fp32": Limits(error=0.3, kl=1e-3, greedy_match=0.9),
    # Weights rounded to 11 bits. Measured: error 2e-3 to 5e-3, KL up to 1e-6, all but 0.3% of choices agree.
    "fp16": Limits(error=0.1, kl=1e-3, greedy_match=0.9),
    # Activations rounded to int8 in blocks; the weights' own bits play no part, the reference has the same. Measured:
    # error 0.03 to 0.13, KL up to 9e-4 (trained, block 128), 95% (97M, fresh) to 99% (trained) of choices agree.
    "int8": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
    "int4": Limits(error=1.0, kl=1e-2, greedy_match=0.75),
}
# A GGUF file read back: scales rounded to 11 bits, and codes of -128 moved by one. Measured: error up to 0.11.
READ_BACK = Limits(error=0.3, kl=5e-3, greedy_match=0.9)
# Activations rounded to int8 with one scale for the whole tensor. Measured, trained, on random tokens: error 0.5 to
# 1.2, KL up to 5e-3, 93% of choices agree.
DEPLOYED_PER_ROW = Limits(error=4.0, kl=5e-2, greedy_match=0.6)
# A token whose experts are nearly level is sent to another one by any rounding; its logits are then another model's.
# Measured, fresh: error up to 2.5 in one token of 200, KL as without experts.
EXPERTS_ERROR = 10.0
# Where blocks of tokens have nearly level scores, the order of additions chooses others, and the token sees them.
# Measured, fresh, with four blocks: error 1.3 in one token of 430, , of 11 decoded ones 9e-3; with an index key
# of the wrong sign KL 0.026 to 0.036. What sees no more than is selected keeps the limits of the exact pass.
SELECTED = Limits(error=10.0, kl=1.5e-2, greedy_match=0.75)
# The same with int8 activations. Measured: error 2.2, KL 3e-3, 73% of 11 choices agree.
SELECTED_DEPLOYED = Limits(error=10.0, kl=5e-2, greedy_match=0.6)


def int8_cache_limits(moved: Comparison) -> Limits:
    """Limits of the exact pass with an INT8 cache, never wider than those of the deployed pass.

    Args:
        moved: the reference beside itself with keys and values moved by `MOVED` before they are rounded.
    """
    least, most = EXACT_INT8_CACHE, DEPLOYED["int8"]
    return Limits(
        error=min(max(least.error, _TIMES_MOVED * moved.relative_error), most.error),
        kl=min(max(least.kl, _TIMES_MOVED * moved.kl), most.kl),
        greedy_match=max(min(least.greedy_match, 1 - _TIMES_MOVED * (1 - moved.greedy_match)), most.greedy_match),
    )
