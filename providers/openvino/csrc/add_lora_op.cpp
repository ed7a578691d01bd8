// onnxport.AddLora as an operator of OpenVINO's CPU plugin, which runs it as it is. What it computes
// is the CPU provider's kernel, whose library hands it over: nothing of that is built in here.
//
// The plugin gives inputs that are set from outside as they lie in memory, so adapters stay in their
// slots, and it calls evaluate in the arena of threads that it computes in itself.
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "../../cpu/csrc/add_lora.h"

#if defined(_WIN32)
#define ONNXPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace onnxport {
namespace {

using Kernel = int (*)(const AddLoraCall* call, char* message, size_t message_size);

std::atomic<Kernel>& kernel() {
  static std::atomic<Kernel> handed_over{nullptr};
  return handed_over;
}

// Isolated: a thread that waits takes no other work, which could be a call like this one and would use
// the same memory of the thread.
int parallel_for(void*, size_t count, Task task, void* argument) {
  tbb::this_task_arena::isolate([=] {
    tbb::parallel_for(size_t{0}, count, [=](size_t index) { task(argument, index); });
  });
  return 0;
}

Tensor describe(const ov::Tensor& tensor) {
  Tensor result;
  const ov::Shape& shape = tensor.get_shape();
  OPENVINO_ASSERT(shape.size() <= kMaxRank, "AddLora: an input has ", shape.size(), " dimensions");
  result.data = const_cast<void*>(tensor.data());
  result.rank = shape.size();
  for (size_t axis = 0; axis < shape.size(); axis++)
    result.dims[axis] = static_cast<int64_t>(shape[axis]);
  return result;
}

LoraType type_of(const ov::element::Type& type) {
  if (type == ov::element::i8) return kLoraInt8;
  OPENVINO_ASSERT(type == ov::element::f16 || type == ov::element::f32, "AddLora: adapters in ",
                  type, "; float32, float16 and int8 are known");
  return type == ov::element::f16 ? kLoraHalf : kLoraFloat;
}

class AddLoraOp : public ov::op::Op {
 public:
  OPENVINO_OP("AddLora", "onnxport");

  enum Input : size_t { kProduct, kActivations, kSlots, kRanks, kWeights, kScales };

  AddLoraOp() = default;
  explicit AddLoraOp(const ov::OutputVector& inputs) : Op(inputs) {
    constructor_validate_and_infer_types();
  }

  void validate_and_infer_types() override {
    OPENVINO_ASSERT(get_input_size() == kScales || get_input_size() == kScales + 1,
                    "AddLora takes 5 inputs, or 6 with scales, found ", get_input_size());
    set_output_type(0, get_input_element_type(kProduct), get_input_partial_shape(kProduct));
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    auto copy = std::make_shared<AddLoraOp>();
    copy->offset_ = offset_;
    copy->ranks_ = ranks_;
    copy->max_rank_ = max_rank_;
    copy->columns_ = columns_;
    copy->bits_ = bits_;
    copy->block_size_ = block_size_;
    copy->set_arguments(inputs);
    copy->constructor_validate_and_infer_types();
    return copy;
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    visitor.on_attribute("offset", offset_);
    visitor.on_attribute("ranks", ranks_);
    visitor.on_attribute("max_rank", max_rank_);
    visitor.on_attribute("columns0", columns_[0]);
    visitor.on_attribute("columns1", columns_[1]);
    visitor.on_attribute("columns2", columns_[2]);
    visitor.on_attribute("bits", bits_);
    visitor.on_attribute("block_size", block_size_);
    return true;
  }

  bool has_evaluate() const override { return true; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const ov::Tensor& product = inputs[kProduct];
    OPENVINO_ASSERT(product.get_element_type() == ov::element::f32 &&
                        inputs[kActivations].get_element_type() == ov::element::f32 &&
                        inputs[kSlots].get_element_type() == ov::element::i32 &&
                        inputs[kRanks].get_element_type() == ov::element::i32,
                    "AddLora: product and activations must be float32, slots and ranks int32");
    outputs[0].set_shape(product.get_shape());
    std::memcpy(outputs[0].data(), product.data(), product.get_byte_size());
    AddLora node{type_of(inputs[kWeights].get_element_type()), {}, max_rank_};
    node.place.offset = offset_;
    node.place.ranks = ranks_;
    node.place.bits = bits_;
    node.place.block_size = block_size_;
    std::copy(columns_.begin(), columns_.end(), node.place.columns);
    for (size_t part = 0; part < kLoraParts; part++)  // as count_parts, which is the kernel's
      if (columns_[part] > 0) node.place.parts = static_cast<int64_t>(part) + 1;
    AddLoraCall call{&node, {}, describe(inputs[kActivations]), describe(outputs[0]), parallel_for,
                     nullptr};
    call.adapters.slots = describe(inputs[kSlots]);
    call.adapters.ranks = describe(inputs[kRanks]);
    call.adapters.weights = describe(inputs[kWeights]);
    if (inputs.size() > kScales) call.adapters.scales = describe(inputs[kScales]);
    const Kernel add = kernel().load(std::memory_order_acquire);
    OPENVINO_ASSERT(add, "AddLora: no kernel was handed over");
    char message[512] = "";
    OPENVINO_ASSERT(add(&call, message, sizeof message) == 0, message);
    return true;
  }

 private:
  int64_t offset_ = 0, ranks_ = 0, max_rank_ = 0, bits_ = 0, block_size_ = 0;
  std::array<int64_t, kLoraParts> columns_{};
};

}  // namespace
}  // namespace onnxport

// Lets all AddLora of this process compute with this function, onnxport_cpu_add_lora.
ONNXPORT_EXPORT void onnxport_openvino_use(onnxport::Kernel add) {
  onnxport::kernel().store(add, std::memory_order_release);
}

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>(
    {std::make_shared<ov::OpExtension<onnxport::AddLoraOp>>()}));
