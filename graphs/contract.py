"""The graph contract: every input and output name, dtype and shape, written once.

The paged names are those of onnxruntime-genai's paged models, the GQA names those of its
Generator, so that artifacts interoperate. Sequences are packed on one token axis; there is no
padding and no attention mask in the paged graph.
"""

from __future__ import annotations

from typing import Final

# Paged graph, inputs.
INPUT_IDS: Final = "input_ids"  # int64 [num_tokens]
BLOCK_TABLE: Final = "block_table"  # int32 [batch, max_num_blocks]
CUMULATIVE_SEQUENCE_LENGTHS: Final = "cumulative_sequence_lengths"  # int32 [batch + 1], new tokens
PAST_SEQUENCE_LENGTHS: Final = "past_sequence_lengths"  # int32 [batch], tokens already cached
# The longest chunk; the longest sequence, new tokens included; and at least how long that is, which
# is the same again but where a step is recorded for others. Of bounds 0 means that it is not known.
ATTENTION_METADATA: Final = "attention_metadata"  # int32 [3], host
LOGITS_INDICES: Final = "logits_indices"  # int32 [num_logits], rows of input_ids needing logits

# Paged graph, inputs of models with layers that keep a state of each sequence, in slots. The state
# that a row begins with is in one, of which 0 has all zeros, for a sequence that begins; and that
# behind its last new token is written to another, which no row of the step reads, and is not 0.
STATE_READS: Final = "state_reads"  # int32 [batch]
STATE_WRITES: Final = "state_writes"  # int32 [batch], distinct

# Paged graph, inputs of lowered graphs that need not compute all logits: how many of a row's
# largest ones must be exact, 0 for all; others may be anything less than the last of these. And of
# which ones that is said: those whose bit i % 32 of word i // 32 is set, or of all where there are
# no rows. What is not allowed may be any finite number, and ALL_ALLOWED asks for all that is. A
# row's number may be written while the graph runs, once its words are: while it is 0, these are
# not read.
# A row may draw from all that it may get, as graphs/noise.py says: by its random number, and what
# its logits are multiplied by, for which the largest ones are then those with the largest sums. A
# factor of 0, or no rows, means the logits as they are.
EXACT_LOGITS: Final = "exact_logits"  # int32 [num_logits]
RACES: Final = "races"  # float64 [num_races, 2]
ALLOWED_TOKENS: Final = "allowed_tokens"  # int32 [num_allowed, mask_words(vocab)]
ALL_ALLOWED: Final = -1

# Paged graph, an input and an output of lowered graphs that can tell more of rows of logits than
# these. What to tell: NO_SUMMARY, or NO_SUMS, or with the sums of exp2((x - largest) * scale) for a
# scale above 0. serving/native/csrc/rows/summary.h says how it is laid out; its last number is what
# was told: what was asked for, or less. Where the row's logits are not all exact, it is of them as
# they are, without sums, and all smallest values are -inf.
SUMMARY_SCALES: Final = "summary_scales"  # float32 [num_logits]
LOGITS_SUMMARIES: Final = "logits_summaries"  # float32 [num_logits, summary_floats(vocab)]
NO_SUMMARY: Final = -1.0
NO_SUMS: Final = 0.0

# Paged graph, an output of lowered graphs that tell what their model makes of each token: what
# chosen layers read of the residual stream, side by side. A draft head (`graphs.draft_spec`)
# guesses by it what follows: a token is given to it with what the model made of the one before,
# or, where the model has not computed that, with what the head itself did. Of these two inputs
# one is zeros in each row. Where the graph has the input TELLS_STATES, it tells nothing, and leaves
# the output as it is, while that is 0.
TELLS_STATES: Final = "tells_states"  # int32 [1]
HIDDEN_STATES: Final = "hidden_states"  # float32 [num_tokens, features]
TARGET_HIDDEN_STATES: Final = "target_hidden_states"  # head, input: float32 [num_tokens, features]
DRAFT_HIDDEN_STATES: Final = "draft_hidden_states"  # head, input: float32 [num_tokens, hidden]
LAST_HIDDEN_STATES: Final = "last_hidden_states"  # head, output: float32 [num_logits, hidden]

# Paged graph, an input that a lowering for compiled shapes has instead of ATTENTION_METADATA. Only
# its length counts, and is the name of its dimension too: query tokens in an attention tile.
QUERY_TILE: Final = "query_tile"  # int8 [query_tile]

# Both graphs, outputs.
LOGITS: Final = "logits"  # paged: [num_logits, vocab]; GQA: [batch, seq, vocab]

# GQA graph, inputs besides INPUT_IDS (int64 [batch, seq]).
ATTENTION_MASK: Final = "attention_mask"  # int64 [batch, total_sequence_length]

# Symbolic dimensions.
NUM_TOKENS: Final = "num_tokens"
BATCH: Final = "batch"
BATCH_PLUS_ONE: Final = "batch_plus_one"
MAX_NUM_BLOCKS: Final = "max_num_blocks"
NUM_LOGITS: Final = "num_logits"
NUM_ALLOWED: Final = "num_allowed"  # num_logits or 0
NUM_RACES: Final = "num_races"  # num_logits or 0
NUM_BLOCKS: Final = "num_blocks"
BLOCK_SIZE: Final = "block_size"
NUM_STATES: Final = "num_states"  # slots, the one of zeros included

MICROSOFT: Final = "com.microsoft"  # domain of PagedAttention, GroupQueryAttention, MatMulNBits
ONNX_OPSET: Final = 21
MICROSOFT_OPSET: Final = 1
IR_VERSION: Final = 10
IR_VERSION_POWERS: Final = 12  # of a graph that has tensors of FLOAT8E8M0: the first to know them


def summary_floats(vocab: int) -> int:
    """Return how many numbers LOGITS_SUMMARIES has for a row of so many logits."""
    return -(-vocab // 1024) * 19 + 1


def mask_words(vocab: int) -> int:
    """Return how many words ALLOWED_TOKENS has for a row of so many logits."""
    return -(-vocab // 32)


def block_table(group: int) -> str:
    """Block table input of a group of layers, see `graphs.cache_groups`; the first is BLOCK_TABLE.

    Graphs whose layers are in several groups are lowered ones. All tables have one shape.
    """
    return f"{BLOCK_TABLE}.{group}" if group else BLOCK_TABLE


def past_key(layer: int) -> str:
    """Key cache input of `layer`; paged: [num_blocks, block_size, kv_heads, head_size]."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Value cache input of `layer`, shaped as its key cache."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """Key cache output of `layer`; the paged graph's aliases its input."""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """Value cache output of `layer`; the paged graph's aliases its input."""
    return f"present.{layer}.value"


def past_conv_state(layer: int) -> str:
    """Input of `layer`: [num_states, channels, kernel - 1], of the activations' type.

    The last inputs of the convolution, the latest last.
    """
    return f"past_conv_state.{layer}"


def present_conv_state(layer: int) -> str:
    """Output of `layer`, which aliases its input."""
    return f"present_conv_state.{layer}"


def past_recurrent_state(layer: int) -> str:
    """Input of `layer`: float32 [num_states, value_heads, value_size, key_size]."""
    return f"past_recurrent_state.{layer}"


def present_recurrent_state(layer: int) -> str:
    """Output of `layer`, which aliases its input."""
    return f"present_recurrent_state.{layer}"


def gqa_past_conv_state(layer: int) -> str:
    """GQA graph, input of `layer`: [batch, channels, kernel - 1], of the activations' type."""
    return f"past_key_values.{layer}.conv_state"


def gqa_present_conv_state(layer: int) -> str:
    """GQA graph, output of `layer`."""
    return f"present.{layer}.conv_state"


def gqa_past_recurrent_state(layer: int) -> str:
    """GQA graph, input of `layer`: float32 [batch, value_heads, key_size, value_size]."""
    return f"past_key_values.{layer}.recurrent_state"


def gqa_present_recurrent_state(layer: int) -> str:
    """GQA graph, output of `layer`."""
    return f"present.{layer}.recurrent_state"


# What MatMulNBits and QMoE may bring their activations to, by their attribute accuracy_level.
ACCURACY_LEVELS: Final = {0: "unset", 1: "float32", 2: "float16", 3: "bfloat16", 4: "int8"}
INT8_LEVEL: Final = 4
