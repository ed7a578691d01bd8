// onnxport.AddLora: what LoRA adapters add to a product, in place. Each token has the slot of its
// own adapter, or 0; where all have 0 nothing is done. The layout of a slot is `slot_layout`'s in
// graphs/lora.py.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "op.h"

namespace onnxport::op {
namespace {

enum LoraInput : size_t { kProduct, kActivations, kSlots, kRanks, kWeights, kLoraInputs };

constexpr size_t kMaxParts = 3;          // projections that one product computes
constexpr int64_t kTaskTokens = 4;       // of one adapter
constexpr int64_t kAloneWork = 1 << 16;  // multiplications that are not worth waking a thread for

struct LoraKernel {
  Api api;
  ort::ElementType stored;     // of adapters: kFloat or kFloat16
  int64_t a, b;                // in a slot
  int64_t max_rank;            // rows of each projection in a slot
  int64_t ranks;               // of its first projection, from the start of a slot's ranks
  int64_t parts;               // projections
  int64_t columns[kMaxParts];  // of each
  int64_t width;               // of all
};

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
  float* output;
  std::vector<Chunk> chunks;

  int64_t depth() const { return input.dims[1]; }

  const int32_t* ranks_of(int32_t slot) const {
    return ranks.as<const int32_t>() + slot * ranks.dims[1] * ranks.dims[2] + kernel.ranks;
  }

  const void* at(int64_t element) const {
    const int64_t bytes = kernel.stored == ort::kFloat16 ? 2 : 4;
    return weights.as<const char>() + element * bytes;
  }

  void task(size_t index) const {
    const Chunk& chunk = chunks[index];
    const int64_t slot = (chunk.slot - 1) * weights.dims[1];
    const int32_t* own = ranks_of(chunk.slot);
    int64_t column = 0;
    for (int64_t part = 0; part < kernel.parts; part++) {
      Lora call;
      call.a = at(slot + kernel.a + part * kernel.max_rank * depth());
      call.b = at(slot + kernel.b + column);
      call.is_half = kernel.stored == ort::kFloat16;
      call.input = input.as<const float>() + chunk.first * depth();
      call.output = output + chunk.first * kernel.width + column;
      call.rank = own[part];
      call.depth = depth();
      call.columns = kernel.columns[part];
      call.stride = kernel.width;
      call.tokens = chunk.count;
      active_kernels()->add_lora(call);
      column += kernel.columns[part];
    }
  }
};

std::unique_ptr<LoraKernel> make_lora_kernel(const Api& api, const ort::KernelInfo* info,
                                             ort::ElementType stored) {
  auto kernel = std::make_unique<LoraKernel>();
  LoraKernel& k = *kernel;
  k.api = api;
  k.stored = stored;
  check(api.attribute(info, "a", &k.a));
  check(api.attribute(info, "b", &k.b));
  check(api.attribute(info, "max_rank", &k.max_rank));
  check(api.attribute(info, "ranks", &k.ranks));
  constexpr const char* kNames[kMaxParts] = {"columns0", "columns1", "columns2"};
  k.parts = k.width = 0;
  for (size_t part = 0; part < kMaxParts; part++) {
    check(api.attribute(info, kNames[part], &k.columns[part]));
    k.width += k.columns[part];
    if (k.columns[part] > 0) k.parts = static_cast<int64_t>(part) + 1;
  }
  if (k.a < 0 || k.b < 0 || k.max_rank < 1 || k.ranks < 0 || k.parts < 1)
    fail(api, ort::kInvalidArgument, "AddLora: an attribute is negative, or there are no columns");
  return kernel;
}

void expect(const Api& api, bool fits, const char* what, int64_t found, int64_t wanted) {
  if (!fits)
    fail(api, ort::kInvalidArgument, "AddLora: %s must be %lld, found %lld", what,
         static_cast<long long>(wanted), static_cast<long long>(found));
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
  const int64_t ends[] = {k.a + k.parts * k.max_rank * depth, k.b + k.max_rank * k.width};
  const int64_t numbers = in[kWeights].dims[1];
  for (int64_t end : ends)
    expect(api, end <= numbers, "the numbers of a slot, at least,", numbers, end);
  const int64_t ranks = in[kRanks].dims[1] * in[kRanks].dims[2];
  expect(api, k.ranks + k.parts <= ranks, "the ranks of a slot, at least,", ranks,
         k.ranks + k.parts);
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

void compute(const LoraKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  constexpr const char* kNames[kLoraInputs] = {"product", "activations", "slots", "ranks",
                                               "weights"};
  Tensor in[kLoraInputs];
  for (size_t i = 0; i < kLoraInputs; i++) {
    const ort::Value* value = nullptr;
    check(api.input(context, i, &value));
    in[i] = describe(api, kNames[i], value);
  }
  check_shapes(kernel, in);
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, in[kProduct].dims, in[kProduct].rank, &out));
  check(api.mutable_data(out, &data));
  const int64_t rows = in[kProduct].dims[0];
  if (data != in[kProduct].data)
    std::memcpy(data, in[kProduct].data, static_cast<size_t>(rows * kernel.width) * sizeof(float));

  Run run{kernel, in[kActivations], in[kRanks], in[kWeights], static_cast<float*>(data), {}};
  const int64_t work = divide(run, in[kSlots]);
  if (work < kAloneWork || run.chunks.size() < 2) {
    for (size_t i = 0; i < run.chunks.size(); i++) run.task(i);
    return;
  }
  check(api.parallel_for(
      context,
      [](void* argument, size_t index) { static_cast<const Run*>(argument)->task(index); },
      run.chunks.size(), 0, &run));
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
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int {
    return ort::kRequired;
  };
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

}  // namespace onnxport::op
