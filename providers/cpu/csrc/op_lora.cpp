// onnxport.AddLora: what LoRA adapters add to a product, in place. Each token has the slot of its
// own adapter, or 0; where all have 0 nothing is done. Adapters in int8 come with scales, others
// without; activations are quantized for these, as for weights of `bits` bits in blocks of `block_size`
// inputs.
#include <cstring>
#include <memory>

#include "op_adapters.h"
#include "op_weights.h"
#include "product.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "AddLora";

enum LoraInput : size_t { kProduct, kActivations, kAdapters, kWeights = kAdapters + 2, kScales };
constexpr size_t kLoraInputs = kAdapters + kAdapterInputs;

struct LoraKernel {
  Api api;
  LoraType type;    // of adapters
  LoraPlace place;  // a call fills in its depth
  int64_t max_rank;
  int64_t width;  // of all projections
};

// What a call works in, the calling thread's.
struct Workspace {
  Buffer factors;
  Quantized quantized;
};

struct Run {
  LoraSum sum;
  float* output;
};

// A product that adapters in int8 add to, whose weights nobody needs.
MatMul product_of(const LoraPlace& place, int64_t depth, int64_t rows) {
  MatMul product{};
  product.k = depth;
  product.n = 1;
  product.bits = place.bits;
  product.block_size = place.block_size;
  product.rows = rows;
  return product;
}

template <LoraType kType>
std::unique_ptr<LoraKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  auto kernel = std::make_unique<LoraKernel>(LoraKernel{api, kType, read_place(api, info), 0, 0});
  check(api.attribute(info, "max_rank", &kernel->max_rank));
  const LoraPlace& place = kernel->place;
  for (int64_t columns : place.columns) kernel->width += columns;
  check_place(api, kName, place, kernel->max_rank);
  if (kType == kLoraInt8) {
    kernel->place.bits = read_attribute(api, info, "bits");
    kernel->place.block_size = read_attribute(api, info, "block_size");
    check_product(api, kName, product_of(kernel->place, 1, 0));  // its depth is a call's
  }
  return kernel;
}

// Fails where a call would read or write outside of the product and the activations.
void check_shapes(const LoraKernel& k, const Tensor& product, const Tensor& activations) {
  if (product.rank != 2 || activations.rank != 2)
    fail(k.api, ort::kInvalidArgument,
         "%s: product and activations must have 2 dimensions, found %zu and %zu", kName,
         product.rank, activations.rank);
  const auto equal = [&](const char* what, int64_t found, int64_t wanted) {
    if (found != wanted)
      fail(k.api, ort::kInvalidArgument, "%s: %s must be %lld, found %lld", kName, what,
           static_cast<long long>(wanted), static_cast<long long>(found));
  };
  equal("the product's columns", product.dims[1], k.width);
  equal("the activations' rows", activations.dims[0], product.dims[0]);
}

// A product whose activations are quantized.
MatMul quantize(const MatMulKernels& kernels, const LoraPlace& place, const float* input,
                int64_t rows, Quantized& quantized, Parallel& parallel) {
  if (place.depth < 1)
    fail(parallel.api, ort::kInvalidArgument, "%s: adapters in int8 need activations of a number "
         "or more, found none", kName);
  MatMul call = product_of(place, place.depth, rows);
  call.input = input;
  quantized.reserve(kernels, call);
  Product product(kernels, call);
  const auto quantize = [](void* argument, size_t index) {
    static_cast<const Product*>(argument)->quantize(static_cast<int64_t>(index));
  };
  if (run_tasks(product.quantize_tasks(), quantize, &product, parallel_for, &parallel) != 0)
    check(parallel.status);
  return call;
}

void compute(const LoraKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* values[2] = {};
  check(api.input(context, kProduct, &values[0]));
  check(api.input(context, kActivations, &values[1]));
  const Tensor product = describe(api, "product", values[0]);
  const Tensor activations = describe(api, "activations", values[1]);
  check_shapes(kernel, product, activations);
  LoraPlace place = kernel.place;
  place.depth = activations.dims[1];
  const int64_t rows = product.dims[0];
  const LoraSlots slots =
      read_adapters(api, context, kName, kAdapters, kernel.type, kernel.max_rank, rows, {place});
  void* data = open_output(api, context, product);
  if (data != product.data)
    std::memcpy(data, product.data, static_cast<size_t>(rows * kernel.width) * sizeof(float));
  thread_local Workspace space;
  Run run{LoraSum(slots, place, rows), static_cast<float*>(data)};
  if (run.sum.is_empty()) return;
  Parallel parallel{api, context};
  const float* input = activations.as<const float>();
  float* factors = space.factors.reserve<float>(static_cast<size_t>(run.sum.num_factors()));
  if (kernel.type == kLoraInt8) {
    const MatMulKernels& kernels = *active_matmul();
    run.sum.set(kernels, quantize(kernels, place, input, rows, space.quantized, parallel), factors);
  } else {
    run.sum.set(input, factors);
  }
  const auto add = [](void* argument, size_t index) {
    const Run& own = *static_cast<const Run*>(argument);
    own.sum.run(static_cast<int64_t>(index), own.output, true);
  };
  if (run_tasks(run.sum.tasks(), add, &run, parallel_for, &parallel) != 0) check(parallel.status);
}

// The output is the product's own memory: nothing else reads that.
size_t product_alias(int** inputs, int** outputs) {
  static int zero[] = {0};
  *inputs = *outputs = zero;
  return 1;
}

template <ort::ElementType kStored, LoraType kType>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kWeights) return kStored;
    return index == kAdapters || index == kAdapters + 1 ? ort::kInt32 : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return kLoraInputs; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == kScales ? ort::kOptional : ort::kRequired;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  set_kernel<LoraKernel, make_kernel<kType>, compute>(op);
  op.may_inplace = op.alias_map = product_alias;
  return op;
}

}  // namespace

ort::CustomOp lora_operator() { return make_operator<ort::kFloat, kLoraFloat>(); }
ort::CustomOp lora_half_operator() { return make_operator<ort::kFloat16, kLoraHalf>(); }
ort::CustomOp lora_int8_operator() { return make_operator<ort::kInt8, kLoraInt8>(); }

}  // namespace onnxport::op
