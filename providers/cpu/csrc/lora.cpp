// Finds adapters in their slots, and divides tokens between them.
#include "lora.h"

#include <algorithm>

namespace onnxport {
namespace {

constexpr int64_t kTaskTokens = 4;       // of one adapter
constexpr int64_t kAloneWork = 1 << 16;  // multiplications that are not worth waking a thread for
constexpr size_t kFewChunks = 8;         // whose projections are divided between threads too

int64_t item_bytes(LoraType type) { return type == kLoraInt8 ? 1 : type == kLoraHalf ? 2 : 4; }

}  // namespace

int64_t lora_rank(const LoraSlots& slots, const LoraPlace& place, int32_t slot, int64_t part) {
  return slots.ranks[slot * slots.ranks_stride + place.ranks + part];
}

int64_t lora_work(const LoraSlots& slots, const LoraPlace& place, int32_t slot) {
  int64_t work = 0;
  for (int64_t part = 0; slot && part < place.parts; part++)
    work += lora_rank(slots, place, slot, part) * (place.depth + place.columns[part]);
  return work;
}

LoraSum::LoraSum(const LoraSlots& slots, const LoraPlace& place, int64_t rows)
    : slots_(slots), place_(place), rows_(rows) {
  for (int64_t part = 0; part < place.parts; part++) width_ += place.columns[part];
  for (int64_t first = 0, end; first < rows; first = end) {
    const int32_t slot = slots.tokens[first];
    const int64_t last = std::min(rows, first + kTaskTokens);
    end = first + 1;
    while (end < last && slots.tokens[end] == slot) end++;
    const int64_t work = lora_work(slots, place, slot);
    if (work == 0) continue;
    chunks_.push_back({first, end - first, slot});
    work_ += work * (end - first);
    for (int64_t part = 0; part < place.parts; part++)
      largest_rank_ = std::max(largest_rank_, lora_rank(slots, place, slot, part));
  }
}

int64_t LoraSum::num_factors() const { return rows_ * place_.parts * largest_rank_; }

void LoraSum::set(const float* input, float* factors) {
  input_ = input;
  factors_ = factors;
}

int64_t LoraSum::tasks() const {
  if (work_ < kAloneWork) return chunks_.empty() ? 0 : 1;
  const auto chunks = static_cast<int64_t>(chunks_.size());
  return chunks_.size() < kFewChunks ? chunks * place_.parts : chunks;
}

// Calls f(index of a chunk, first part, last part) for all that a task has.
template <class F>
void LoraSum::for_chunks(int64_t index, F f) const {
  const int64_t parts = place_.parts;
  if (work_ < kAloneWork) {
    for (size_t i = 0; i < chunks_.size(); i++) f(i, 0, parts);
  } else if (chunks_.size() < kFewChunks) {
    f(static_cast<size_t>(index / parts), index % parts, index % parts + 1);
  } else {
    f(static_cast<size_t>(index), 0, parts);
  }
}

// What comes next of A is the next projection's, or the next chunk's, which is likely the same
// thread's.
void LoraSum::shrink(int64_t index) const {
  for_chunks(index, [&](size_t at, int64_t first, int64_t last) {
    const LoraChunk& chunk = chunks_[at];
    for (int64_t part = first; part < last; part++) {
      const char *end = b_of(chunk.slot, part), *next = end;
      if (part + 1 < last)
        next = begin_of(chunk.slot, part + 1);
      else if (last == place_.parts && at + 1 < chunks_.size())
        next = begin_of(chunks_[at + 1].slot, 0);
      shrink_part(chunk, part, end, next - end);
    }
  });
}

// All of a projection is read from one end to the other, and then the next one.
void LoraSum::run(int64_t index, float* output, bool is_added) const {
  for_chunks(index, [&](size_t at, int64_t first, int64_t last) {
    const LoraChunk& chunk = chunks_[at];
    const char *end = begin_of(chunk.slot, last), *next = end;
    if (last == place_.parts && at + 1 < chunks_.size()) next = begin_of(chunks_[at + 1].slot, 0);
    for (int64_t part = first; part < last; part++) {
      shrink_part(chunk, part, end, next - end);
      LoraExpand call = expansion(chunk, part);
      if (call.rank == 0 && is_added) continue;
      call.output = output + chunk.first * width_ + column_of(part);
      call.stride = width_;
      call.column_begin = 0;
      call.column_end = place_.columns[part];
      call.is_added = is_added;
      call.end = end;
      call.jump = next - end;
      active_kernels()->lora_expand(call);
    }
  });
}

int64_t LoraSum::column_of(int64_t part) const {
  int64_t column = 0;
  for (int64_t i = 0; i < part; i++) column += place_.columns[i];
  return column;
}

// Where a projection of an adapter begins; behind the last one, its end.
const char* LoraSum::begin_of(int32_t slot, int64_t part) const {
  int64_t begin = (slot - 1) * slots_.numbers + place_.offset;
  for (int64_t i = 0; i < part; i++)
    begin += lora_rank(slots_, place_, slot, i) *
             (in_lora_panels(place_.depth) + in_lora_panels(place_.columns[i]));
  return slots_.weights + begin * item_bytes(slots_.type);
}

const char* LoraSum::b_of(int32_t slot, int64_t part) const {
  const int64_t numbers = lora_rank(slots_, place_, slot, part) * in_lora_panels(place_.depth);
  return begin_of(slot, part) + numbers * item_bytes(slots_.type);
}

float* LoraSum::factors_of(int64_t row, int64_t part) const {
  return factors_ + (row * place_.parts + part) * largest_rank_;
}

void LoraSum::shrink_part(const LoraChunk& chunk, int64_t part, const char* end,
                          int64_t jump) const {
  LoraShrink call;
  call.type = slots_.type;
  call.a = begin_of(chunk.slot, part);
  const int64_t row = chunk.slot * slots_.ranks_stride + place_.ranks + part;
  call.scales = slots_.scales ? slots_.scales + row * slots_.max_rank : nullptr;
  call.input = input_ + chunk.first * place_.depth;
  call.factors = factors_of(chunk.first, part);
  call.rank = lora_rank(slots_, place_, chunk.slot, part);
  call.depth = place_.depth;
  call.tokens = chunk.count;
  call.stride = place_.parts * largest_rank_;
  call.end = end;
  call.jump = jump;
  active_kernels()->lora_shrink(call);
}

// All but the columns and where they go.
LoraExpand LoraSum::expansion(const LoraChunk& chunk, int64_t part) const {
  LoraExpand call{};
  call.type = slots_.type;
  call.b = b_of(chunk.slot, part);
  call.factors = factors_of(chunk.first, part);
  call.rank = lora_rank(slots_, place_, chunk.slot, part);
  call.tokens = chunk.count;
  call.factor_stride = place_.parts * largest_rank_;
  return call;
}

// Calls f(chunk) for what a block has of each chunk.
template <class F>
void LoraSum::for_rows(const LoraBlock& block, F f) const {
  const auto ends_before = [](const LoraChunk& chunk, int64_t row) {
    return chunk.first + chunk.count <= row;
  };
  auto chunk = std::lower_bound(chunks_.begin(), chunks_.end(), block.row_begin, ends_before);
  for (; chunk != chunks_.end() && chunk->first < block.row_end; ++chunk) {
    const int64_t first = std::max(chunk->first, block.row_begin);
    const int64_t last = std::min(chunk->first + chunk->count, block.row_end);
    f(LoraChunk{first, last - first, chunk->slot});
  }
}

void LoraSum::expand(int64_t part, const LoraBlock& block) const {
  for_rows(block, [&](const LoraChunk& chunk) {
    LoraExpand call = expansion(chunk, part);
    if (call.rank == 0) return;
    call.output = block.output + (chunk.first - block.row_begin) * block.stride;
    call.stride = block.stride;
    call.column_begin = block.column_begin;
    call.column_end = block.column_end;
    call.is_added = true;
    active_kernels()->lora_expand(call);
  });
}

void LoraSum::expand_product(const LoraBlock& block) const {
  for (int64_t part = 0, first = 0; part < place_.parts; first += place_.columns[part], part++) {
    LoraBlock own = block;
    own.column_begin = std::max(block.column_begin, first) - first;
    own.column_end = std::min(block.column_end, first + place_.columns[part]) - first;
    if (own.column_begin >= own.column_end) continue;
    own.output = block.output + (first + own.column_begin - block.column_begin);
    expand(part, own);
  }
}

}  // namespace onnxport
