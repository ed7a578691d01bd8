// What one instruction set offers to the driver in attention.cpp. Each is compiled from the same
// sources with its own flags.
#pragma once

#include <math.h>

#include "attention.h"
#include "causal_conv.h"
#include "delta_net.h"

namespace onnxport {

constexpr int kChunk = 64;      // keys between two softmax updates
constexpr int kSegment = 512;   // keys whose result is kept apart and merged in order
constexpr int kRowBlock = 128;  // query rows that share the loaded keys
constexpr int kTurnRows = 16;   // query rows of each of several heads, at most, that take turns
constexpr int kMostScoreRows = 32;
constexpr int kMaxHeadSize = 512;
constexpr int kMaxLatentSize = 1024;

// A row is one query head of one token. The rows of a kv head are numbered token by token, the
// group's heads of a token side by side, so rows r0..r1 are contiguous in the prepared queries.
struct RowBlock {
  int32_t sequence;
  int32_t kv_head;
  int32_t row_begin;  // counted from the sequence's first new token
  int32_t row_end;
  // Not 0: the rows are this sequence's and those of the sequences behind it, and only the first so
  // many keys are meant, which all of them have in the same blocks of the cache.
  int32_t shared_keys = 0;
};

// [first, last) keys.
struct KeyRange {
  int64_t first, last;
};

// What a thread reads of the cache for a row block, or for a segment of its keys, and around it.
struct Reading {
  KeyRange own = {0, 0};
  bool is_asked_for = false;  // the first chunk of it was, while the thread did what came before
  // What comes next: these keys of so many of a sequence's heads, which may be none.
  int32_t sequence = 0, kv_head = 0, heads = 1;
  KeyRange next = {0, 0};
};

// Online softmax state of up to kRowBlock rows, base-2 logarithms throughout.
struct State {
  float* maximum;  // [rows]
  float* sum;      // [rows][16], partial sums by vector lane
  float* value;    // [rows][padded value size], not yet divided by the sum
};

constexpr int64_t kLoraPanel = 64;  // numbers of a row side by side; PANEL in graphs/lora.py

enum LoraType { kLoraFloat, kLoraHalf, kLoraInt8, kLoraInt4 };

// Integers come with scales, and A is a product's weights: see lora.h.
static inline bool is_integer(LoraType type) { return type == kLoraInt8 || type == kLoraInt4; }

// An adapter's rows of A and of B lie in panels: kLoraPanel numbers of the first row, as many of the
// second, and so on to the last, then the next numbers of the first. So all is read from one end to
// the other. What a thread reads is asked for ahead: once that would be behind `end`, it is `jump`
// bytes further on; null: nothing is.

// The first half of what one LoRA adapter adds to one projection: factors = input a^T. Not of
// adapters in integers.
struct LoraShrink {
  LoraType type;
  const void* a;        // [panels of depth][rank][kLoraPanel]
  const float* input;   // [tokens][depth]
  float* factors;       // [tokens][stride], of which `rank`
  int64_t rank, depth, tokens, stride;
  const char* end;
  int64_t jump;
};

// The second half, for some columns of the projection: output = (output or 0) + factors b.
//
// B in int4 is multiplied in integers, and factors are as round_lora_factors leaves them. A panel is
// int8 scales of its columns, [kLoraPanel], and for each eight rows [kLoraPanel / 16][16][4] bytes: the
// low four bits of byte i of a column are the number of row i and 8 more than that, the high ones row
// 4 + i's.
struct LoraExpand {
  LoraType type;
  const void* b;         // [panels of columns][rank][kLoraPanel]; of int4 [panels][lora_int4_panel()]
  const float* factors;  // [tokens][factor_stride], of int4 lora_int4_factors() of each token
  float* output;         // [tokens][stride], from column_begin on
  int64_t rank, column_begin, column_end, tokens, factor_stride, stride;
  bool is_added;  // else the output is set
  const char* end;
  int64_t jump;
};

constexpr int64_t kLoraInt4Rows = 8;  // of B, whose numbers lie together

// Bytes of a panel of B in int4.
static inline int64_t lora_int4_panel(int64_t rank) {
  const int64_t groups = (rank + kLoraInt4Rows - 1) / kLoraInt4Rows;
  return kLoraPanel + groups * (kLoraInt4Rows / 2 * kLoraPanel);
}

// Factors of a token that B in int4 is multiplied with, in floats' places: int8 quads, zeros for rows
// behind the last, then their scale, and minus eight times their sum as an integer.
static inline int64_t lora_int4_factors(int64_t rank) {
  return (rank + kLoraInt4Rows - 1) / kLoraInt4Rows * (kLoraInt4Rows / 4) + 2;
}

// A SiLU with parameters, of g = min(gate, limit) and u = min(max(up, -limit), limit):
//
//   output = g / (1 + exp(-alpha * g)) * (u + up_offset)
struct Swiglu {
  float alpha = 1.f, up_offset = 0.f, limit = INFINITY;
};

// The gate of a feed-forward layer: output[i] = activation(gate[i]) * up[i].
struct Gate {
  const float *gate, *up;
  const float *gate_added, *up_added;  // what is added to them first; null: nothing
  float* output;                       // overlaps none of them
  int64_t count;
  bool is_gelu;                    // GELU as tanh approximates it, else SiLU
  const Swiglu* swiglu = nullptr;  // which takes the SiLU's place; null: it does not
  bool is_relu2 = false;           // ReLU's square of `gate`, and there is no up
};

// Products with weights in floats, one row of which is an output's:
//
//   output[r][n] = sum over i of inputs[r][i] * weights[n][i]
//
// The bits of a number depend on its row and its weights alone.
struct RowProduct {
  CacheType type;              // of the weights, but for kInt8
  const void* weights;         // [outputs][depth]
  const float* const* inputs;  // [rows], each [depth]
  float* output;               // [rows][stride], of which `outputs`
  int64_t depth, rows, outputs, stride;
};

constexpr int64_t kConvChannels = 256;  // of a convolution, that a task has at most

// Some channels of a sequence of a CausalConv.
struct ConvPart {
  const float* input;    // [tokens][stride], of which `channels`
  const float* weights;  // [taps][stride], likewise
  const float* bias;     // [channels]; null: none
  const float* from;     // [channels][taps - 1], the state
  float* to;             // likewise, and elsewhere
  float* output;         // [tokens][stride]
  int64_t tokens, channels, stride, taps;
  bool has_silu;
};

// Tokens of a DeltaNet that are made ready.
struct DeltaTokens {
  int64_t first, count;  // of the net's tokens
  float* keys;      // [key_heads][count][2][padded key_size], a key, then the query times the scale
  float* products;  // [key_heads][count], of both; not set without the delta rule
  float* decays;    // [count][value_heads], exp(g); of channels [padded key_size] each, 0 behind
  float* betas;     // [count][value_heads]; without the delta rule steps
};

// Rows [row_begin, row_end) of a value head's state, and what takes them from the tokens before
// token_begin to those before token_end, which are of one sequence.
struct DeltaRows {
  int64_t head, row_begin, row_end, token_begin, token_end;
  const float* from;  // [rows][key_size]
  float* to;          // likewise; may be the same
};

struct Kernels {
  const char* name;

  // Whether the paired layout is multiplied faster than floats.
  bool prefers_pairs;

  // Whether a float16 cache costs no more than one of floats where neither has to come from memory.
  bool converts_half;

  // How many heads of the same rows are attended to in turns, at most: 1, one after the other.
  int32_t most_turns;

  // Norm, rotation and scaling of the queries of tokens [begin, end) into queries
  // [kv_heads][num_tokens * group][query_floats], in bfloat16 for the paired layout, as integers for
  // a cache of those; their keys and values into the cache.
  void (*prepare)(const Problem& problem, float* queries, int64_t begin, int64_t end);

  // Attends over all of the block's keys, with so many heads from its own on, and writes the output.
  // Heads take turns, chunk by chunk: side by side in the cache, they are read faster together.
  // Several, at most most_turns, have at most kTurnRows rows each.
  void (*attend)(const Problem& problem, const float* queries, const RowBlock& block, int32_t heads,
                 const Reading& reading, float* scratch);

  // Attends over one segment and leaves its state; finish merges them in order.
  void (*attend_segment)(const Problem& problem, const float* queries, const RowBlock& block,
                         const Reading& reading, int64_t segment, const State& state,
                         float* scratch);
  void (*finish)(const Problem& problem, const RowBlock& block, const State* states,
                 int64_t num_states);

  void (*gate)(const Gate& call);

  void (*lora_shrink)(const LoraShrink& call);
  void (*lora_expand)(const LoraExpand& call);

  void (*multiply_rows)(const RowProduct& call);

  void (*convolve)(const ConvPart& part);

  // Keys, queries and products of tokens [begin, end) of those that are made ready.
  void (*prepare_delta)(const DeltaNet& net, const DeltaTokens& tokens, int64_t begin, int64_t end);
  // Changes rows of a state by tokens, and writes what they add to the output.
  void (*update_delta)(const DeltaNet& net, const DeltaTokens& tokens, const DeltaRows& rows);
};

// Null where this build or this processor cannot run them.
const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_amx();
const Kernels* kernels_neon();

// The set in use: the best one, unless set_isa chose. set_isa(null) returns to the best one and
// an unknown or unsupported name returns false and changes nothing.
const Kernels* active_kernels();
bool set_isa(const char* name);

// static, not inline alone: an instruction set's object must never provide code to another's.
static inline int64_t padded(int64_t head_size) { return (head_size + 15) / 16 * 16; }

static inline bool has_integers(const Problem& p) {
  return is_integer(static_cast<CacheType>(p.cache_type));
}

// Floats that one prepared query takes up. For a cache of integers it is head_size int8, their scale,
// and what a sum of products with uint8 keys begins with.
static inline int64_t query_floats(const Problem& p) {
  if (has_integers(p)) return p.head_size / 4 + 2;
  return p.cache_layout == kPaired ? p.head_size / 2 : p.head_size;
}

// Floats of one State for so many rows.
static inline int64_t state_floats(int64_t rows, int64_t value_size) {
  return rows * (16 + padded(value_size)) + (rows + 15) / 16 * 16;
}

static inline State state_at(float* memory, int64_t rows) {
  const int64_t maxima = (rows + 15) / 16 * 16;
  return {memory, memory + maxima, memory + maxima + rows * 16};
}

// Floats of scratch that attend and attend_segment need.
static inline int64_t scratch_floats(const Problem& p) {
  const int64_t tiles = 2 * kChunk * padded(p.head_size) + kTile * padded(p.head_size);
  return 2 * state_floats(kRowBlock, p.value_size) + tiles + kMostScoreRows * kChunk;
}

// The keys that a row sees, from its token's index among the sequence's new tokens.
static inline KeyRange visible_keys(const Problem& p, int64_t sequence, int64_t token) {
  const int64_t past = p.past_lengths[sequence];
  const int64_t total = past + p.cumulative_lengths[sequence + 1] - p.cumulative_lengths[sequence];
  const int64_t position = past + token;
  const int64_t slid = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  const int64_t first = p.chunked ? position - position % p.window : slid;
  return {first, p.causal ? position + 1 : total};
}

}  // namespace onnxport
