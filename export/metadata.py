"""Names that a graph and its runtime share: inputs, outputs and the graph's metadata. Imports nothing."""

# As optimum, onnxruntime-genai and transformers.js name them.
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
LOGITS = "logits"
PAST, PRESENT = "past_key_values.", "present."  # followed by layer and state: `past_key_values.0.key`
KEEP_LOGITS = "num_logits_to_keep"  # optional input: 0 gives the logits of all positions, n those of the last n
ROPE_CACHES = ("cos_cache", "sin_cache", "local_cos_cache", "local_sin_cache")  # constants; see `rope_of` of the model

# Keys and values of the graph's metadata.
DATA_BYTES_KEY = "data_bytes"  # size that the data file must have
RUNTIME_KEY = "onnxruntime"  # the oldest version that a graph was tried with
OLDEST_RUNTIME = "1.31"
KERNELS_DOMAIN = "sportsllm"  # of the operators of `export/kernels`
KERNELS_KEY = "kernels"  # version of the kernels that the graph calls; absent where it calls none
CACHE_KEY = "cache"  # one of the next two; in place where an export does not say
IN_PLACE_CACHE = "shared"  # past and present are one buffer with room to grow; sequences are padded on the right
CONCAT_CACHE = "growing"  # present is past followed by the new tokens, a new tensor; masked columns do not count


def past_name(layer: int, state: str) -> str:
    """Of the input with what a layer has cached; tokens are on the last axis but one."""
    return f"{PAST}{layer}.{state}"


def present_name(layer: int, state: str) -> str:
    """Of the output with the new tokens added."""
    return f"{PRESENT}{layer}.{state}"


def cache_scale_name(layer: int, state: str) -> str:
    """The constant of an INT8 cache's scales of one state that a layer's attention caches."""
    short = {"key": "k", "value": "v"}.get(state, state)
    return f"model.layers.{layer}.self_attn.{short}_scale"
