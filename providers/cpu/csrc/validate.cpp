// Checks that make the kernels safe on any input: cheap next to the attention itself, O(tokens +
// blocks in use) integers a call.
#include <cstdarg>
#include <cstdio>

#include "kernels.h"

namespace onnxport {
namespace {

using Long = long long;

struct Report {
  char* message;
  size_t size;

  // Always false, to be returned.
  bool operator()(const char* format, ...) const {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, size, format, arguments);
    va_end(arguments);
    return false;
  }
};

bool validate_latent(const Problem& p, const Report& fail) {
  if (p.kv_heads != 1)
    return fail("a latent cache has one KV head, found kv_num_heads %lld", Long{p.kv_heads});
  if (p.head_size < kTile || p.head_size > kMaxLatentSize || p.head_size % kTile != 0)
    return fail("head_size of a latent cache must be a multiple of %d from %d to %d, found %lld",
                kTile, kTile, kMaxLatentSize, Long{p.head_size});
  if (p.value_size < kTile || p.value_size > p.head_size || p.value_size % kTile != 0)
    return fail("v_head_size must be a multiple of %d from %d to the head_size %lld, found %lld",
                kTile, kTile, Long{p.head_size}, Long{p.value_size});
  if (p.cache_type == kInt4) return fail("a latent cache may not be int4");
  if (p.cache_layout == kTiled)
    return fail("a latent cache has the canonical or the paired cache layout, not the tiled one");
  return true;
}

bool validate_head(const Problem& p, const Report& fail) {
  if (p.latent) return validate_latent(p, fail);
  if (p.head_size < 8 || p.head_size > kMaxHeadSize || p.head_size % 8 != 0)
    return fail("head_size must be a multiple of 8 from 8 to %d, found %lld", kMaxHeadSize,
                Long{p.head_size});
  if (p.value_size != p.head_size)
    return fail("values are as wide as keys, unless they are latent, found %lld and %lld",
                Long{p.value_size}, Long{p.head_size});
  return true;
}

bool validate_sizes(const Problem& p, const Report& fail) {
  if (p.num_heads < 1 || p.kv_heads < 1 || p.num_heads % p.kv_heads != 0)
    return fail("num_heads must be a positive multiple of kv_num_heads, found %lld and %lld",
                Long{p.num_heads}, Long{p.kv_heads});
  if (!validate_head(p, fail)) return false;
  if (p.block_size < 1 || p.num_blocks < 0 || p.num_tokens < 0 || p.batch < 0 || p.table_width < 0)
    return fail("a size is negative or the block size is zero");
  if (p.num_tokens > INT32_MAX / p.num_heads)
    return fail("num_tokens x num_heads must stay below 2^31, found %lld x %lld",
                Long{p.num_tokens}, Long{p.num_heads});
  if (p.cache_type < kFloat32 || p.cache_type > kInt4)
    return fail("unknown cache type %lld", Long{p.cache_type});
  if (p.cache_layout < kCanonical || p.cache_layout > kPaired)
    return fail("unknown cache layout %lld", Long{p.cache_layout});
  if (p.cache_layout != kCanonical && !p.latent && p.block_size % kTile != 0)
    return fail("the %s cache layout needs a block size that is a multiple of %d, found %lld",
                p.cache_layout == kTiled ? "tiled" : "paired", kTile, Long{p.block_size});
  if (p.cache_layout == kPaired && p.cache_type != kBFloat16)
    return fail("the paired cache layout holds bfloat16 only");
  if (has_integers(p) && !p.latent && p.cache_layout != kTiled)
    return fail("an %s cache needs the tiled cache layout, which has room for its scales",
                p.cache_type == kInt8 ? "int8" : "int4");
  if (!p.q_norm_weight != !p.k_norm_weight)
    return fail("q_norm_weight and k_norm_weight must be given together");
  if (p.window < 0 || p.softcap < 0) return fail("the window and the softcap may not be negative");
  if (p.chunked && !p.window) return fail("chunks need a window, which says how long they are");
  if (p.rotary_dim == 0) return true;
  if (p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_offset < 0 ||
      p.rotary_offset + p.rotary_dim > p.head_size)
    return fail("rotary channels [%lld, %lld) do not fit a head of %lld", Long{p.rotary_offset},
                Long{p.rotary_offset + p.rotary_dim}, Long{p.head_size});
  if (!p.cosine || !p.sine) return fail("rotary embedding needs cos_cache and sin_cache");
  return true;
}

bool validate_table(const Problem& p, int64_t sequence, int64_t first, int64_t total,
                    const Report& fail) {
  if (total > p.table_width * p.block_size)
    return fail(
        "sequence %lld has %lld tokens, more than the %lld blocks of %lld in its "
        "block_table row hold",
        Long{sequence}, Long{total}, Long{p.table_width}, Long{p.block_size});
  const int32_t* table = p.block_table + sequence * p.table_width;
  for (int64_t i = first / p.block_size; i * p.block_size < total; i++)
    if (table[i] < 0 || table[i] >= p.num_blocks)
      return fail("block_table[%lld][%lld] must be in [0, %lld), found %d", Long{sequence}, Long{i},
                  Long{p.num_blocks}, table[i]);
  return true;
}

bool validate_sequences(const Problem& p, const Report& fail) {
  const int32_t* cumulative = p.cumulative_lengths;
  if (cumulative[0] != 0)
    return fail("cumulative_sequence_length must begin with 0, found %d", cumulative[0]);
  for (int64_t i = 0; i < p.batch; i++) {
    if (cumulative[i + 1] < cumulative[i])
      return fail("cumulative_sequence_length must not decrease, found %d after %d at %lld",
                  cumulative[i + 1], cumulative[i], Long{i + 1});
    if (p.past_lengths[i] < 0)
      return fail("past_seqlens[%lld] must not be negative, found %d", Long{i}, p.past_lengths[i]);
  }
  if (cumulative[p.batch] != p.num_tokens)
    return fail("cumulative_sequence_length must end with the number of tokens %lld, found %d",
                Long{p.num_tokens}, cumulative[p.batch]);
  for (int64_t i = 0; i < p.batch; i++) {
    const int64_t added = cumulative[i + 1] - cumulative[i];
    if (added == 0) continue;
    const int64_t total = p.past_lengths[i] + added;
    if (p.rotary_dim && total > p.rotary_rows)
      return fail("sequence %lld reaches position %lld, but cos_cache and sin_cache hold %lld",
                  Long{i}, Long{total - 1}, Long{p.rotary_rows});
    // Blocks that slid out of the window may have been given away.
    if (!validate_table(p, i, visible_keys(p, i, 0).first, total, fail)) return false;
  }
  return true;
}

bool validate_slots(const Problem& p, const Report& fail) {
  if (!p.slot_mapping) return true;
  const int64_t slots = p.num_blocks * p.block_size;
  for (int64_t i = 0; i < p.num_tokens; i++)
    if (p.slot_mapping[i] < -1 || p.slot_mapping[i] >= slots)
      return fail("slot_mapping[%lld] must be -1 or in [0, %lld), found %d", Long{i}, Long{slots},
                  p.slot_mapping[i]);
  return true;
}

}  // namespace

bool validate(const Problem& problem, char* message, size_t message_size) {
  const Report fail{message, message_size};
  return validate_sizes(problem, fail) && validate_sequences(problem, fail) &&
         validate_slots(problem, fail);
}

}  // namespace onnxport
