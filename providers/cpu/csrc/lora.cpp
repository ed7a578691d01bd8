// Finds adapters in their slots, and divides tokens between them.
#include "lora.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace onnxport {
namespace {

// Of one adapter in a chunk. Many of a product's rows share what unpacking its weights takes.
constexpr int64_t kTaskTokens = 4, kManyTaskTokens = 32;
constexpr int64_t kMostRowUnit = 16;
constexpr int64_t kAloneWork = 1 << 16;  // multiplications that are not worth waking a thread for
constexpr size_t kFewChunks = 8;         // whose projections are divided between threads too

// Of what the numbers of a slot are counted in: those of integers in bytes.
int64_t item_bytes(LoraType type) { return is_integer(type) ? 1 : type == kLoraHalf ? 2 : 4; }

// The product that A in integers is.
MatMul product_of(const LoraPlace& place) {
  MatMul product{};
  product.k = place.depth;
  product.bits = place.bits;
  product.block_size = place.block_size;
  return product;
}

// Whether a row of A is two outputs.
bool has_halves(LoraType type, const LoraPlace& place) {
  return type == kLoraInt8 && place.bits == 4;
}

// The panel that has a row, of so many.
RowPanel panel_of(LoraType type, const LoraPlace& place, int64_t row, int64_t rows) {
  const int64_t outputs_of_row = has_halves(type, place) ? 2 : 1;
  const int64_t whole = kPanel / outputs_of_row, half = kHalfPanel / outputs_of_row;
  const int64_t begin = row / whole * whole, offset = begin / whole * panel_bytes(product_of(place));
  if (rows - begin <= half) return {begin, half, kHalfPanel, offset};
  return {begin, whole, kPanel, offset};
}

// Bytes of a panel.
int64_t bytes_of(const LoraPlace& place, const RowPanel& panel) {
  return panel_bytes(product_of(place), panel.outputs);
}

int64_t product_bytes(LoraType type, const LoraPlace& place, int64_t rows) {
  if (rows == 0) return 0;
  const RowPanel last = panel_of(type, place, rows - 1, rows);
  return last.offset + bytes_of(place, last);
}

// Numbers of B of a projection with so many columns.
int64_t numbers_of_b(LoraType type, int64_t columns, int64_t rank) {
  const int64_t numbers = in_lora_panels(columns);
  if (type != kLoraInt4) return rank * numbers;
  return rank == 0 ? 0 : numbers / kLoraPanel * lora_int4_panel(rank);
}

// Rounds a token's factors to int8 in their place, see lora_int4_factors.
void round_lora_factors(float* factors, int64_t rank) {
  constexpr float kMost = 127.f, kSmallest = 1e-36f;  // 127 over less is no float
  float largest = 0.f;
  bool is_finite = true;
  for (int64_t i = 0; i < rank; i++) {
    largest = std::max(largest, std::fabs(factors[i]));
    is_finite &= std::isfinite(factors[i]);
  }
  const float inverse = is_finite && largest >= kSmallest ? kMost / largest : 0.f;
  const int64_t quads = lora_int4_factors(rank) - 2;
  auto* bytes = reinterpret_cast<char*>(factors);
  int32_t sum = 0;
  for (int64_t i = 0; i < 4 * quads; i++) {
    // what is not finite must not be converted
    const float number = inverse > 0.f && i < rank ? std::nearbyint(factors[i] * inverse) : 0.f;
    const auto rounded = static_cast<int8_t>(number);
    std::memcpy(bytes + i, &rounded, 1);  // a factor's place is behind it
    sum += rounded;
  }
  const int32_t correction = -8 * sum;
  factors[quads] = !is_finite ? std::numeric_limits<float>::quiet_NaN() : largest / kMost;
  std::memcpy(factors + quads + 1, &correction, sizeof correction);
}

}  // namespace

int64_t lora_rank(const LoraSlots& slots, const LoraPlace& place, int32_t slot, int64_t part) {
  return slots.ranks[slot * slots.ranks_stride + place.ranks + part];
}

int64_t lora_numbers(LoraType type, const LoraPlace& place, int64_t rank) {
  const int64_t depth = is_integer(type) ? 0 : in_lora_panels(place.depth);
  int64_t numbers = is_integer(type) ? product_bytes(type, place, place.parts * rank) : 0;
  for (int64_t part = 0; part < place.parts; part++)
    numbers += rank * depth + numbers_of_b(type, place.columns[part], rank);
  return numbers;
}

int64_t lora_work(const LoraSlots& slots, const LoraPlace& place, int32_t slot) {
  int64_t work = 0;
  for (int64_t part = 0; slot && part < place.parts; part++)
    work += lora_rank(slots, place, slot, part) * (place.depth + place.columns[part]);
  return work;
}

LoraSum::LoraSum(const LoraSlots& slots, const LoraPlace& place, int64_t rows)
    : slots_(slots), place_(place), rows_(rows) {
  const int64_t most = has_product() && !has_few_rows() ? kManyTaskTokens : kTaskTokens;
  for (int64_t part = 0; part < place.parts; part++) width_ += place.columns[part];
  for (int64_t first = 0, end; first < rows; first = end) {
    const int32_t slot = slots.tokens[first];
    const int64_t last = std::min(rows, first + most);
    end = first + 1;
    while (end < last && slots.tokens[end] == slot) end++;
    const int64_t work = lora_work(slots, place, slot);
    if (work == 0) continue;
    chunks_.push_back({first, end - first, slot});
    work_ += work * (end - first);
    for (int64_t part = 0; part < place.parts; part++) {
      const int64_t rank = lora_rank(slots, place, slot, part);
      factor_stride_ = std::max(factor_stride_, rank);
      if (slots.type == kLoraInt4)
        factor_stride_ = std::max(factor_stride_, lora_int4_factors(rank));
    }
  }
}

int64_t LoraSum::num_factors() const { return rows_ * place_.parts * factor_stride_; }

void LoraSum::set(const float* input, float* factors) {
  input_ = input;
  factors_ = factors;
}

void LoraSum::set(const MatMulKernels& kernels, const MatMul& product, float* factors) {
  kernels_ = &kernels;
  product_ = product_of(place_);
  product_.rows = product.rows;
  product_.padded_rows = product.padded_rows;
  product_.quants = product.quants;
  product_.scales = product.scales;
  product_.corrections = product.corrections;
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
    if (has_product()) return shrink_product(chunk, first, last);
    for (int64_t part = first; part < last; part++) {
      const char *end = b_of(chunk.slot, part), *next = end;
      if (part + 1 < last)
        next = a_of(chunk.slot, part + 1);
      else if (last == place_.parts && at + 1 < chunks_.size())
        next = begin_of(chunks_[at + 1].slot);
      shrink_part(chunk, part, end, next - end);
    }
  });
}

// All of a projection is read from one end to the other, and then the next one; of integers A of all
// comes first.
void LoraSum::run(int64_t index, float* output, bool is_added) const {
  for_chunks(index, [&](size_t at, int64_t first, int64_t last) {
    const LoraChunk& chunk = chunks_[at];
    const char *end = end_of(chunk.slot, last - 1), *next = end;
    if (last == place_.parts && at + 1 < chunks_.size()) next = begin_of(chunks_[at + 1].slot);
    if (has_product()) shrink_product(chunk, first, last);
    for (int64_t part = first; part < last; part++) {
      if (!has_product()) shrink_part(chunk, part, end, next - end);
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

int64_t LoraSum::rank_of(int32_t slot, int64_t part) const {
  return lora_rank(slots_, place_, slot, part);
}

int64_t LoraSum::ranks_before(int32_t slot, int64_t part) const {
  int64_t ranks = 0;
  for (int64_t i = 0; i < part; i++) ranks += rank_of(slot, i);
  return ranks;
}

const char* LoraSum::begin_of(int32_t slot) const {
  return slots_.weights + ((slot - 1) * slots_.numbers + place_.offset) * item_bytes(slots_.type);
}

// Where A of a projection begins. Of integers it is that of all.
const char* LoraSum::a_of(int32_t slot, int64_t part) const {
  return has_product() || part == 0 ? begin_of(slot) : end_of(slot, part - 1);
}

const char* LoraSum::b_of(int32_t slot, int64_t part) const {
  const int64_t numbers = numbers_of_b(slots_.type, place_.columns[part], rank_of(slot, part));
  return end_of(slot, part) - numbers * item_bytes(slots_.type);
}

// Where B of a projection ends.
const char* LoraSum::end_of(int32_t slot, int64_t part) const {
  const int64_t depth = has_product() ? 0 : in_lora_panels(place_.depth);
  int64_t numbers = 0;
  if (has_product())
    numbers = product_bytes(slots_.type, place_, ranks_before(slot, place_.parts));
  for (int64_t i = 0; i <= part; i++) {
    const int64_t rank = rank_of(slot, i);
    numbers += rank * depth + numbers_of_b(slots_.type, place_.columns[i], rank);
  }
  return begin_of(slot) + numbers * item_bytes(slots_.type);
}

float* LoraSum::factors_of(int64_t row, int64_t part) const {
  return factors_ + (row * place_.parts + part) * factor_stride_;
}

void LoraSum::shrink_part(const LoraChunk& chunk, int64_t part, const char* end,
                          int64_t jump) const {
  LoraShrink call;
  call.type = slots_.type;
  call.a = a_of(chunk.slot, part);
  call.input = input_ + chunk.first * place_.depth;
  call.factors = factors_of(chunk.first, part);
  call.rank = rank_of(chunk.slot, part);
  call.depth = place_.depth;
  call.tokens = chunk.count;
  call.stride = place_.parts * factor_stride_;
  call.end = end;
  call.jump = jump;
  active_kernels()->lora_shrink(call);
}

// The factors of some projections, from the panels that have these. Rows of whole units are
// multiplied, whoever they are.
void LoraSum::shrink_product(const LoraChunk& chunk, int64_t first, int64_t last) const {
  const int64_t begin = ranks_before(chunk.slot, first), end = ranks_before(chunk.slot, last);
  if (begin == end) return;
  const int64_t unit = kernels_->row_unit ? kernels_->row_unit(rows_) : 1;
  const int64_t row = chunk.first / unit * unit;
  const int64_t row_end = std::min(rows_, ceil_div(chunk.first + chunk.count, unit) * unit);
  const int64_t all = ranks_before(chunk.slot, place_.parts);
  alignas(64) float outputs[(kManyTaskTokens + 2 * kMostRowUnit) * kPanel];
  MatMul product = product_;
  for (int64_t next = begin; next < end;) {
    const RowPanel panel = panel_of(slots_.type, place_, next, all);
    product.n = panel.outputs;
    product.weights = reinterpret_cast<const uint8_t*>(a_of(chunk.slot, 0)) + panel.offset;
    const auto multiply =
        panel.outputs == kPanel ? kernels_->multiply : kernels_->multiply_half;
    multiply(product, {0, 1, row, row_end, outputs, panel.outputs});
    read_factors(chunk, first, last, panel, outputs + (chunk.first - row) * panel.outputs);
    next = panel.begin + panel.rows;
  }
  if (slots_.type == kLoraInt4) round_factors(chunk, first, last);
}

void LoraSum::round_factors(const LoraChunk& chunk, int64_t first, int64_t last) const {
  for (int64_t part = first; part < last; part++) {
    const int64_t rank = rank_of(chunk.slot, part);
    for (int64_t token = 0; rank && token < chunk.count; token++)
      round_lora_factors(factors_of(chunk.first + token, part), rank);
  }
}

// What a panel's outputs tell of some projections' factors.
void LoraSum::read_factors(const LoraChunk& chunk, int64_t first, int64_t last,
                           const RowPanel& panel, const float* outputs) const {
  const bool adds_halves = has_halves(slots_.type, place_);
  for (int64_t part = first, before = ranks_before(chunk.slot, first); part < last; part++) {
    const int64_t rank = rank_of(chunk.slot, part);
    const int64_t begin = std::max<int64_t>(0, panel.begin - before);
    const int64_t end = std::min(rank, panel.begin + panel.rows - before);
    const float* scales =
        slots_.scales +
        (chunk.slot * slots_.ranks_stride + place_.ranks + part) * slots_.max_rank;
    for (int64_t token = 0; token < chunk.count; token++) {
      float* factors = factors_of(chunk.first + token, part);
      for (int64_t i = begin; i < end; i++) {
        const float* output = outputs + token * panel.outputs + (before + i - panel.begin);
        factors[i] = (adds_halves ? output[0] + output[panel.rows] : output[0]) * scales[i];
      }
    }
    before += rank;
  }
}

// All but the columns and where they go.
LoraExpand LoraSum::expansion(const LoraChunk& chunk, int64_t part) const {
  LoraExpand call{};
  call.type = slots_.type;
  call.b = b_of(chunk.slot, part);
  call.factors = factors_of(chunk.first, part);
  call.rank = rank_of(chunk.slot, part);
  call.tokens = chunk.count;
  call.factor_stride = place_.parts * factor_stride_;
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
