// The attention problem in plain pointers and integers, free of ONNX Runtime, so that the same
// code runs as an operator, from ctypes and under sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxport {

// kInt8 has a float32 scale for each token and KV head, computed when the token is written from the
// largest magnitude of its head_size numbers: number = int8 * scale. It is tiled always. Queries and
// softmax weights are rounded to eight bits for it, too, so that products and their sums are of
// integers, and exact: see quads_impl.h.
//
// kInt4 is what kInt8 would store, in coarser steps: of each group of kInt4Group channels `first`,
// an int8 no larger than the least, and a `step` from 1 to 17, so that int8 = first + step * level, a level having four
// bits. Where it is read, int8 is made of it, and all else is as with kInt8.
enum CacheType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt4 = 4 };

// kCanonical: [num_blocks][block_size][kv_heads][head_size], the operator schema's own order.
// kTiled, for every block:
//   key   [kv_heads][block_size / 16][head_size][16], sixteen tokens side by side in a register
//   value [kv_heads][block_size / 16][16][head_size]
// and in int8, where four neighbours in a product lie side by side,
//   key   [kv_heads][block_size / 16][head_size / 4][16][4], four channels of a token
//   value [kv_heads][block_size / 16][4][head_size][4], four tokens of a channel
// with the sixteen scales of each tile after its tokens. A row of the cache tensor is head_size + 4
// bytes then, the layout's [num_blocks][block_size][kv_heads] of them. In int4 levels of two channels
// that are half a group apart share a byte, the first one's in its low half, and these bytes lie as
// int8 does:
//   key   [kv_heads][block_size / 16][head_size / 8][16][4]
//   value [kv_heads][block_size / 16][4][head_size / 2][4]
// then for each group the steps and the firsts of the sixteen tokens, [groups][2][16], then the scales.
// A row has int4_row_bytes(head_size) bytes.
// kPaired, in bfloat16 only, tiles whose neighbours in a product lie side by side:
//   key   [kv_heads][block_size / 16][head_size / 2][16][2], two channels of a token
//   value [kv_heads][block_size / 16][8][head_size][2], two tokens of a channel
// With it queries and softmax weights are rounded to bfloat16 too, and products of pairs are added
// in float. So processors with instructions for that take half the time.
//
// Latent rows, whose first value_size channels are the value too, are in one cache, of one KV head, and
// lie in it as rows do in the canonical layout, for keys want another order than values. In int8
// each has its scale behind it. Tiles are made of 64 rows at a time where they are read, which all
// query heads share. kPaired says for them that products are of pairs.
enum CacheLayout : int64_t { kCanonical = 0, kTiled = 1, kPaired = 2 };

// Tokens in one key tile. The tiled layout is built on it.
constexpr int kTile = 16;

// Bytes of the scale of a token and KV head in an int8 or int4 cache.
constexpr int kScaleBytes = 4;

// Channels that share a step in an int4 cache. The last group of a head may have fewer.
constexpr int kInt4Group = 32;

static inline int64_t int4_groups(int64_t head_size) {
  return (head_size + kInt4Group - 1) / kInt4Group;
}

// Bytes of a token's key or value in one head: levels, a step and a first for each group, the scale.
static inline int64_t int4_row_bytes(int64_t head_size) {
  return head_size / 2 + 2 * int4_groups(head_size) + kScaleBytes;
}

// Whether numbers are integers, with a scale for each token and KV head.
static inline bool is_integer(CacheType type) { return type == kInt8 || type == kInt4; }

// Calls task(argument, i) for every i in [0, count), in any order, on any threads, and returns
// zero once all calls have returned. Another result stops the computation and is handed back.
using Task = void (*)(void* argument, size_t index);
using ParallelFor = int (*)(void* context, size_t count, Task task, void* argument);

// One call of PagedAttention. Every integer is 64 bits wide to keep the layout obvious to ctypes.
// Strides count elements. Absent optional inputs are null.
struct Problem {
  int64_t num_tokens;     // new tokens of all sequences, packed on one axis
  int64_t batch;          // sequences
  int64_t num_heads;      // query heads
  int64_t kv_heads;       // divides num_heads
  int64_t head_size;      // multiple of 8 in [8, 512]; of a latent row, of 16 in [16, 1024]
  int64_t value_size;     // channels of a value and of a head's output: head_size, or fewer of a latent row
  int64_t num_blocks;     // blocks in the cache
  int64_t block_size;     // tokens in a block; a multiple of 16 in the tiled layout
  int64_t table_width;    // columns of block_table
  int64_t window;         // keys a query sees at its own position and before; 0: all of them
  int64_t chunked;        // 1: it sees none ahead of its own chunk, and chunks are as long as that
  int64_t causal;         // 0: every query of a sequence sees all of its keys
  int64_t rotary_dim;     // channels that are rotated; 0: none
  int64_t rotary_offset;  // first rotated channel
  int64_t rotary_rows;    // positions that the cosine and sine tables hold
  int64_t interleaved;    // rotate (0,1),(2,3),... instead of the two halves
  int64_t cache_type;     // CacheType
  int64_t cache_layout;   // CacheLayout
  int64_t latent;         // 1: keys' rows hold the values, see CacheLayout
  int64_t query_stride;   // from one token to the next
  int64_t key_stride;
  int64_t value_stride;

  float scale;         // multiplies query times key
  float softcap;       // 0: none
  float norm_epsilon;  // of the query and key RMSNorm
  float reserved;

  const float* query;  // [num_tokens][num_heads][head_size]
  const float* key;    // [num_tokens][kv_heads][head_size]
  const float* value;  // likewise; null of latent rows
  float* output;       // [num_tokens][num_heads][value_size], contiguous
  void* key_cache;     // updated in place
  void* value_cache;   // null of latent rows
  const int32_t* cumulative_lengths;  // [batch + 1]
  const int32_t* past_lengths;        // [batch]
  const int32_t* block_table;         // [batch][table_width]
  const int32_t* slot_mapping;        // [num_tokens] or null; -1 leaves a token out of the cache
  const float* cosine;                // [rotary_rows][rotary_dim / 2]
  const float* sine;                  // likewise
  const float* head_sink;             // [num_heads] or null
  const float* q_norm_weight;         // [head_size] or null
  const float* k_norm_weight;         // likewise

  ParallelFor parallel_for;  // null: everything on the calling thread
  void* parallel_context;
};

// Writes what is wrong with the problem into message and returns false, or returns true.
// Nothing that passes can make run_attention read or write outside the given buffers.
bool validate(const Problem& problem, char* message, size_t message_size);

// Writes the new keys and values into the cache, then attends. The problem must be valid.
// Returns zero or what parallel_for returned. Throws std::bad_alloc only.
//
// The bits of a sequence's result depend on that sequence alone: not on the rest of the batch, on
// how its tokens were split into calls, or on the number of threads. But for values that are infinite
// or NaN: rows that are multiplied together share keys, and the weight of one that a row does not see
// is zero, so in a cache of floats such a value of a later token makes NaN of those among the tokens
// right before it whose rows go with its own: fewer than a register block of rows has, or than two
// tiles of AMX.
int run_attention(const Problem& problem);

// How many threads sessions have, which work and memory are divided for; 0, or never told: as many as
// there are processors, of which a container may have a part.
void set_session_threads(int64_t threads);

// For tests: how many floats the parts of divided sequences may take together. Returns what it was.
int64_t set_most_state_floats(int64_t floats);

}  // namespace onnxport
