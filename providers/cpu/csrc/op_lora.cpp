// onnxport.AddLora: what LoRA adapters add to a product, in place. Each token has the slot of its
// own adapter, or 0; where all have 0 nothing is done. The layout of a slot is `slot_layout`'s in
// graphs/lora.py. Adapters in int8 come with scales, others without.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "op.h"

namespace onnxport::op {
namespace {

enum LoraInput : size_t { kProduct, kActivations, kSlots, kRanks, kWeights, kScales, kLoraInputs };

constexpr size_t kMaxParts = 3;          // projections that one product computes
constexpr int64_t kTaskTokens = 4;       // of one adapter
constexpr int64_t kAloneWork = 1 << 16;  // multiplications that are not worth waking a thread for
constexpr size_t kFewChunks = 8;         // whose projections are divided between threads too

struct LoraKernel {
  Api api;
  ort::ElementType stored;     // of adapters: kFloat, kFloat16 or kInt8
  int64_t offset;              // in a slot
  int64_t max_rank;            // rows of each projection in a slot
  int64_t ranks;               // of its first projection, from the start of a slot's ranks
  int64_t parts;               // projections
  int64_t columns[kMaxParts];  // of each
  int64_t width;               // of all

  LoraType type() const {
    if (stored == ort::kInt8) return kLoraInt8;
    return stored == ort::kFloat16 ? kLoraHalf : kLoraFloat;
  }
  int64_t item_bytes() const {
    if (stored == ort::kInt8) return 1;
    return stored == ort::kFloat16 ? 2 : 4;
  }
};

// Numbers of a row in whole panels.
int64_t in_panels(int64_t count) { return (count + kLoraPanel - 1) / kLoraPanel * kLoraPanel; }

// Tokens [first, first + count) of one adapter.
struct Chunk {
  int64_t first, count;
  int32_t slot;
};

struct Run {
  const LoraKernel& kernel;
  const Tensor& input;
  const Tensor& ranks;
  const Tensor& weights;
  const Tensor& scales;
  float* output;
  std::vector<Chunk> chunks;

  int64_t depth() const { return input.dims[1]; }

  // From one slot to the next.
  int64_t ranks_stride() const { return ranks.dims[1] * ranks.dims[2]; }

  const int32_t* ranks_of(int32_t slot) const {
    return ranks.as<const int32_t>() + slot * ranks_stride() + kernel.ranks;
  }

  const float* scales_of(int32_t slot, int64_t part) const {
    if (!scales) return nullptr;
    const int64_t row = slot * ranks_stride() + kernel.ranks + part;
    return scales.as<const float>() + row * kernel.max_rank;
  }

  // Where a projection of an adapter lies; behind the last one, its end.
  const char* begin_of(int32_t slot, int64_t part) const {
    const int32_t* own = ranks_of(slot);
    int64_t begin = (slot - 1) * weights.dims[1] + kernel.offset;
    for (int64_t i = 0; i < part; i++)
      begin += own[i] * (in_panels(depth()) + in_panels(kernel.columns[i]));
    return weights.as<const char>() + begin * kernel.item_bytes();
  }

  // Projections [first, last) of a chunk. Those of the next one are likely the same thread's.
  void add(size_t index, int64_t first, int64_t last) const {
    const Chunk& chunk = chunks[index];
    const char* end = begin_of(chunk.slot, last);
    const char* next = end;
    if (last == kernel.parts && index + 1 < chunks.size())
      next = begin_of(chunks[index + 1].slot, 0);
    for (int64_t part = first; part < last; part++) add_part(chunk, part, end, next - end);
  }

  void add_part(const Chunk& chunk, int64_t part, const char* end, int64_t jump) const {
    const int64_t rank = ranks_of(chunk.slot)[part];
    int64_t column = 0;
    for (int64_t i = 0; i < part; i++) column += kernel.columns[i];
    Lora call;
    call.type = kernel.type();
    call.end = end;
    call.jump = jump;
    const char* begin = begin_of(chunk.slot, part);
    call.a = begin;
    call.b = begin + rank * in_panels(depth()) * kernel.item_bytes();
    call.scales = scales_of(chunk.slot, part);
    call.input = input.as<const float>() + chunk.first * depth();
    call.output = output + chunk.first * kernel.width + column;
    call.rank = rank;
    call.depth = depth();
    call.columns = kernel.columns[part];
    call.stride = kernel.width;
    call.tokens = chunk.count;
    active_kernels()->add_lora(call);
  }
};

std::unique_ptr<LoraKernel> make_lora_kernel(const Api& api, const ort::KernelInfo* info,
                                             ort::ElementType stored) {
  auto kernel = std::make_unique<LoraKernel>();
  LoraKernel& k = *kernel;
  k.api = api;
  k.stored = stored;
  check(api.attribute(info, "offset", &k.offset));
  check(api.attribute(info, "max_rank", &k.max_rank));
  check(api.attribute(info, "ranks", &k.ranks));
  constexpr const char* kNames[kMaxParts] = {"columns0", "columns1", "columns2"};
  k.parts = k.width = 0;
  bool is_negative = k.offset < 0 || k.ranks < 0;
  for (size_t part = 0; part < kMaxParts; part++) {
    check(api.attribute(info, kNames[part], &k.columns[part]));
    k.width += k.columns[part];
    is_negative |= k.columns[part] < 0;
    if (k.columns[part] > 0) k.parts = static_cast<int64_t>(part) + 1;
  }
  if (is_negative || k.max_rank < 1 || k.parts < 1)
    fail(api, ort::kInvalidArgument,
         "AddLora: an attribute is negative, or there are no columns or no ranks");
  return kernel;
}

void expect(const Api& api, bool fits, const char* what, int64_t found, int64_t wanted) {
  if (!fits)
    fail(api, ort::kInvalidArgument, "AddLora: %s must be %lld, found %lld", what,
         static_cast<long long>(wanted), static_cast<long long>(found));
}

// Int8 means nothing without scales, and scales would be passed over without int8.
void check_scales(const LoraKernel& k, const Tensor* in) {
  const Tensor &scales = in[kScales], &ranks = in[kRanks];
  if (bool(scales) != (k.stored == ort::kInt8))
    fail(k.api, ort::kInvalidArgument, "AddLora: adapters in int8 %s, found %s",
         scales ? "alone have scales" : "need scales", scales ? "others" : "none");
  if (!scales) return;
  if (scales.rank != 4)
    fail(k.api, ort::kInvalidArgument, "AddLora: scales have 4 dimensions, found %zu", scales.rank);
  for (size_t axis = 0; axis < 3; axis++)
    expect(k.api, scales.dims[axis] == ranks.dims[axis], "scales' dimensions, as those of ranks,",
           scales.dims[axis], ranks.dims[axis]);
  expect(k.api, scales.dims[3] == k.max_rank, "scales of a projection", scales.dims[3], k.max_rank);
}

// Fails where a call would read or write outside of its inputs.
void check_shapes(const LoraKernel& k, const Tensor* in) {
  const Api& api = k.api;
  const bool flat = in[kProduct].rank == 2 && in[kActivations].rank == 2 && in[kSlots].rank == 1 &&
                    in[kRanks].rank == 3 && in[kWeights].rank == 2;
  if (!flat)
    fail(api, ort::kInvalidArgument, "AddLora: inputs have 2, 2, 1, 3 and 2 dimensions");
  const int64_t rows = in[kProduct].dims[0], depth = in[kActivations].dims[1];
  const auto equal = [&](const char* what, int64_t found, int64_t wanted) {
    expect(api, found == wanted, what, found, wanted);
  };
  equal("the product's columns", in[kProduct].dims[1], k.width);
  equal("the activations' rows", in[kActivations].dims[0], rows);
  equal("the number of token slots", in[kSlots].dims[0], rows);
  equal("the slots with ranks", in[kRanks].dims[0], in[kWeights].dims[0] + 1);
  int64_t end = k.offset;
  for (int64_t part = 0; part < k.parts; part++)
    end += k.max_rank * (in_panels(depth) + in_panels(k.columns[part]));
  const int64_t numbers = in[kWeights].dims[1];
  expect(api, end <= numbers, "the numbers of a slot, at least,", numbers, end);
  const int64_t ranks = in[kRanks].dims[1] * in[kRanks].dims[2];
  expect(api, k.ranks + k.parts <= ranks, "the ranks of a slot, at least,", ranks,
         k.ranks + k.parts);
  check_scales(k, in);
}

// Divides the tokens that have an adapter; returns the multiplications that they take.
int64_t divide(Run& run, const Tensor& slots) {
  const LoraKernel& k = run.kernel;
  const int32_t* slot = slots.as<const int32_t>();
  int64_t work = 0;
  for (int64_t first = 0; first < slots.dims[0];) {
    int64_t end = first + 1;
    const int64_t last = std::min(slots.dims[0], first + kTaskTokens);
    while (end < last && slot[end] == slot[first]) end++;
    if (slot[first] < 0 || slot[first] >= run.ranks.dims[0])
      fail(k.api, ort::kInvalidArgument, "AddLora: slot %d; there are 0 to %lld", slot[first],
           static_cast<long long>(run.ranks.dims[0] - 1));
    const int32_t* ranks = run.ranks_of(slot[first]);
    int64_t own = 0;
    for (int64_t part = 0; slot[first] && part < k.parts; part++) {
      if (ranks[part] < 0 || ranks[part] > k.max_rank)
        fail(k.api, ort::kInvalidArgument, "AddLora: rank %d; there are 0 to %lld", ranks[part],
             static_cast<long long>(k.max_rank));
      own += ranks[part] * (run.depth() + k.columns[part]);
    }
    if (own) run.chunks.push_back({first, end - first, slot[first]});
    work += own * (end - first);
    first = end;
  }
  return work;
}

// Runs all chunks. Few of them are divided further, so that each thread has something to do.
void share(const Run& run, ort::KernelContext* context, int64_t work) {
  const size_t chunks = run.chunks.size(), parts = static_cast<size_t>(run.kernel.parts);
  const bool is_divided = chunks < kFewChunks;
  const size_t tasks = is_divided ? chunks * parts : chunks;
  if (work < kAloneWork || tasks < 2) {
    for (size_t i = 0; i < chunks; i++) run.add(i, 0, run.kernel.parts);
    return;
  }
  const auto whole = [](void* argument, size_t index) {
    const Run& run = *static_cast<const Run*>(argument);
    run.add(index, 0, run.kernel.parts);
  };
  const auto divided = [](void* argument, size_t index) {
    const Run& run = *static_cast<const Run*>(argument);
    const size_t parts = static_cast<size_t>(run.kernel.parts);
    const auto part = static_cast<int64_t>(index % parts);
    run.add(index / parts, part, part + 1);
  };
  void* argument = const_cast<Run*>(&run);
  const Api& api = run.kernel.api;
  if (is_divided)
    check(api.parallel_for(context, divided, tasks, 0, argument));
  else
    check(api.parallel_for(context, whole, tasks, 0, argument));
}

void compute(const LoraKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  constexpr const char* kNames[kLoraInputs] = {"product", "activations", "slots", "ranks",
                                               "weights", "scales"};
  Tensor in[kLoraInputs];
  for (size_t i = 0; i < kLoraInputs; i++) {
    const ort::Value* value = nullptr;
    check(api.input(context, i, &value));
    if (value) in[i] = describe(api, kNames[i], value);
  }
  check_shapes(kernel, in);
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, in[kProduct].dims, in[kProduct].rank, &out));
  check(api.mutable_data(out, &data));
  const int64_t rows = in[kProduct].dims[0];
  if (data != in[kProduct].data)
    std::memcpy(data, in[kProduct].data, static_cast<size_t>(rows * kernel.width) * sizeof(float));

  Run run{kernel,       in[kActivations], in[kRanks],
          in[kWeights], in[kScales],      static_cast<float*>(data),
          {}};
  const int64_t work = divide(run, in[kSlots]);
  if (work) share(run, context, work);
}

// The output is the product's own memory: nothing else reads that.
size_t product_alias(int** inputs, int** outputs) {
  static int zero[] = {0};
  *inputs = *outputs = zero;
  return 1;
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return "AddLora"; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kWeights) return kStored;
    return index == kSlots || index == kRanks ? ort::kInt32 : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kLoraInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == kScales ? ort::kOptional : ort::kRequired;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.create_kernel = [](const ort::CustomOp*, const void* const* table,
                        const ort::KernelInfo* info, void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = make_lora_kernel(api, info, kStored).release(); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<LoraKernel*>(kernel); };
  op.compute = [](void* state, ort::KernelContext* context) -> Status* {
    const LoraKernel& kernel = *static_cast<const LoraKernel*>(state);
    return guarded(kernel.api, [&] { compute(kernel, context); });
  };
  op.may_inplace = op.alias_map = product_alias;
  return op;
}

}  // namespace

ort::CustomOp lora_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp lora_half_operator() { return make_operator<ort::kFloat16>(); }
ort::CustomOp lora_int8_operator() { return make_operator<ort::kInt8>(); }

}  // namespace onnxport::op
