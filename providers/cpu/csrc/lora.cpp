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
    : slots_(slots), place_(place) {
  for (int64_t part = 0; part < place.parts; part++) width_ += place.columns[part];
  for (int64_t first = 0, end; first < rows; first = end) {
    const int32_t slot = slots.tokens[first];
    const int64_t last = std::min(rows, first + kTaskTokens);
    end = first + 1;
    while (end < last && slots.tokens[end] == slot) end++;
    const int64_t work = lora_work(slots, place, slot);
    if (work) chunks_.push_back({first, end - first, slot});
    work_ += work * (end - first);
  }
}

void LoraSum::set(const float* input, float* output, bool is_added) {
  input_ = input;
  output_ = output;
  is_added_ = is_added;
}

int64_t LoraSum::tasks() const {
  if (work_ < kAloneWork) return chunks_.empty() ? 0 : 1;
  const auto chunks = static_cast<int64_t>(chunks_.size());
  return chunks_.size() < kFewChunks ? chunks * place_.parts : chunks;
}

void LoraSum::run(int64_t index) const {
  const int64_t parts = place_.parts;
  if (work_ < kAloneWork) {
    for (size_t i = 0; i < chunks_.size(); i++) run_chunk(i, 0, parts);
  } else if (chunks_.size() < kFewChunks) {
    run_chunk(static_cast<size_t>(index / parts), index % parts, index % parts + 1);
  } else {
    run_chunk(static_cast<size_t>(index), 0, parts);
  }
}

// Where a projection of an adapter begins; behind the last one, its end.
const char* LoraSum::begin_of(int32_t slot, int64_t part) const {
  int64_t begin = (slot - 1) * slots_.numbers + place_.offset;
  for (int64_t i = 0; i < part; i++)
    begin += lora_rank(slots_, place_, slot, i) *
             (in_lora_panels(place_.depth) + in_lora_panels(place_.columns[i]));
  return slots_.weights + begin * item_bytes(slots_.type);
}

// Projections [first, last) of a chunk. Those of the next one are likely the same thread's.
void LoraSum::run_chunk(size_t index, int64_t first, int64_t last) const {
  const LoraChunk& chunk = chunks_[index];
  const char* end = begin_of(chunk.slot, last);
  const char* next = end;
  if (last == place_.parts && index + 1 < chunks_.size())
    next = begin_of(chunks_[index + 1].slot, 0);
  for (int64_t part = first; part < last; part++) run_part(chunk, part, end, next - end);
}

void LoraSum::run_part(const LoraChunk& chunk, int64_t part, const char* end,
                       int64_t jump) const {
  const int64_t rank = lora_rank(slots_, place_, chunk.slot, part);
  if (rank == 0 && is_added_) return;
  int64_t column = 0;
  for (int64_t i = 0; i < part; i++) column += place_.columns[i];
  Lora call;
  call.type = slots_.type;
  call.end = end;
  call.jump = jump;
  const char* begin = begin_of(chunk.slot, part);
  call.a = begin;
  call.b = begin + rank * in_lora_panels(place_.depth) * item_bytes(slots_.type);
  const int64_t row = chunk.slot * slots_.ranks_stride + place_.ranks + part;
  call.scales = slots_.scales ? slots_.scales + row * slots_.max_rank : nullptr;
  call.input = input_ + chunk.first * place_.depth;
  call.output = output_ + chunk.first * width_ + column;
  call.rank = rank;
  call.depth = place_.depth;
  call.columns = place_.columns[part];
  call.stride = width_;
  call.tokens = chunk.count;
  call.is_added = is_added_;
  active_kernels()->add_lora(call);
}

}  // namespace onnxport
