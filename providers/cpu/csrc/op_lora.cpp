// onnxport.AddLora for ONNX Runtime: see add_lora.h. It adds in place.
#include <cstring>
#include <memory>

#include "op_adapters.h"
#include "op_weights.h"

namespace onnxport::op {
namespace {

enum LoraInput : size_t { kProduct, kActivations, kAdapters, kWeights = kAdapters + 2, kScales };
constexpr size_t kLoraInputs = kAdapters + kAdapterInputs;

struct LoraKernel {
  Api api;
  AddLora node;
};

template <LoraType kType>
std::unique_ptr<LoraKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  AddLora node{kType, read_place(api, info), read_attribute(api, info, "max_rank")};
  if (kType == kLoraInt8) {
    node.type = read_integer_type(api, info, "AddLora");
    node.place.bits = read_attribute(api, info, "bits");
    node.place.block_size = read_attribute(api, info, "block_size");
  }
  check_node(node);
  return std::make_unique<LoraKernel>(LoraKernel{api, node});
}

void compute(const LoraKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* values[2] = {};
  check(api.input(context, kProduct, &values[0]));
  check(api.input(context, kActivations, &values[1]));
  const Tensor product = describe(api, "product", values[0]);
  Parallel parallel{api, context};
  AddLoraCall call{&kernel.node,
                   read_adapters(api, context, kAdapters),
                   describe(api, "activations", values[1]),
                   product,
                   true,
                   parallel_for,
                   &parallel};
  call.output.data = open_output(api, context, product);
  if (call.output.data != product.data)
    std::memcpy(call.output.data, product.data,
                static_cast<size_t>(elements(product)) * sizeof(float));
  if (add_lora(call) != 0) check(parallel.status);
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
  op.name = [](const ort::CustomOp*) { return "AddLora"; };
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
