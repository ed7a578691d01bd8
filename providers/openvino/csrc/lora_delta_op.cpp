// onnxport.LoraDelta, an operator for OpenVINO's CPU plugin: what LoRA adapters add to a product. What it
// computes is AddLora's kernel, which the CPU provider's library hands over: nothing of that is built
// in here.
//
// A node takes microseconds before it computes anything, and more of them for each input. So it has two
// inputs, the activations and the slots of tokens, and an attribute that says whose adapters: these are
// handed over, too, and stay where they are. The sum with the product is the plugin's own, which adds
// while it does something else.
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

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

// The slots of a loaded model.
struct Adapters {
  int64_t type;  // LoraType
  Tensor ranks, weights, scales;
};

namespace {

using Kernel = int (*)(const AddLoraCall* call, char* message, size_t message_size);

// What was handed over to this process.
class Given {
 public:
  static Given& the() {
    static Given given;
    return given;
  }

  void set_kernel(Kernel kernel) { kernel_.store(kernel, std::memory_order_release); }

  Kernel kernel() const {
    const Kernel found = kernel_.load(std::memory_order_acquire);
    OPENVINO_ASSERT(found, "LoraDelta: no kernel was handed over");
    return found;
  }

  void set(int64_t model, const Adapters* adapters) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (adapters)
      adapters_[model] = *adapters;
    else
      adapters_.erase(model);
  }

  Adapters find(int64_t model) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = adapters_.find(model);
    OPENVINO_ASSERT(found != adapters_.end(), "LoraDelta: model ", model, " has no adapters");
    return found->second;
  }

 private:
  std::atomic<Kernel> kernel_{nullptr};
  mutable std::mutex mutex_;
  std::map<int64_t, Adapters> adapters_;
};

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
  OPENVINO_ASSERT(shape.size() <= kMaxRank, "LoraDelta: an input has ", shape.size(),
                  " dimensions");
  result.data = const_cast<void*>(tensor.data());
  result.rank = shape.size();
  for (size_t axis = 0; axis < shape.size(); axis++)
    result.dims[axis] = static_cast<int64_t>(shape[axis]);
  return result;
}

class LoraDelta : public ov::op::Op {
 public:
  OPENVINO_OP("LoraDelta", "onnxport");

  enum Input : size_t { kActivations, kSlots, kInputs };

  LoraDelta() = default;

  void validate_and_infer_types() override {
    OPENVINO_ASSERT(get_input_size() == kInputs, "LoraDelta takes activations and slots, found ",
                    get_input_size(), " inputs");
    const ov::PartialShape& shape = get_input_partial_shape(kActivations);
    OPENVINO_ASSERT(shape.rank().is_static() && shape.rank().get_length() == 2,
                    "LoraDelta: activations must have 2 dimensions, found ", shape);
    set_output_type(0, ov::element::f32, {shape[0], ov::Dimension(width())});
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    auto copy = std::make_shared<LoraDelta>();
    copy->model_ = model_;
    copy->offset_ = offset_;
    copy->ranks_ = ranks_;
    copy->max_rank_ = max_rank_;
    copy->columns_ = columns_;
    copy->bits_ = bits_;
    copy->block_size_ = block_size_;
    copy->adapter_bits_ = adapter_bits_;
    copy->set_arguments(inputs);
    copy->constructor_validate_and_infer_types();
    return copy;
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    visitor.on_attribute("model", model_);
    visitor.on_attribute("offset", offset_);
    visitor.on_attribute("ranks", ranks_);
    visitor.on_attribute("max_rank", max_rank_);
    visitor.on_attribute("columns0", columns_[0]);
    visitor.on_attribute("columns1", columns_[1]);
    visitor.on_attribute("columns2", columns_[2]);
    visitor.on_attribute("bits", bits_);
    visitor.on_attribute("block_size", block_size_);
    visitor.on_attribute("adapter_bits", adapter_bits_);
    return true;
  }

  bool has_evaluate() const override { return true; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const ov::Tensor& activations = inputs[kActivations];
    OPENVINO_ASSERT(activations.get_element_type() == ov::element::f32 &&
                        inputs[kSlots].get_element_type() == ov::element::i32,
                    "LoraDelta: activations must be float32, and slots int32");
    outputs[0].set_shape({activations.get_shape()[0], static_cast<size_t>(width())});
    const Adapters adapters = Given::the().find(model_);
    AddLora node{static_cast<LoraType>(adapters.type), {}, max_rank_};
    if (adapter_bits_ == 4) node.type = kLoraInt4;
    node.place.offset = offset_;
    node.place.ranks = ranks_;
    node.place.bits = bits_;
    node.place.block_size = block_size_;
    std::copy(columns_.begin(), columns_.end(), node.place.columns);
    count_parts(node.place);
    const AddLoraCall call{
        &node,
        {describe(inputs[kSlots]), adapters.ranks, adapters.weights, adapters.scales},
        describe(activations),
        describe(outputs[0]),
        false,
        parallel_for,
        nullptr};
    char message[512] = "";
    OPENVINO_ASSERT(Given::the().kernel()(&call, message, sizeof message) == 0, message);
    return true;
  }

 private:
  int64_t width() const { return columns_[0] + columns_[1] + columns_[2]; }

  int64_t model_ = 0, offset_ = 0, ranks_ = 0, max_rank_ = 0, bits_ = 0, block_size_ = 0;
  int64_t adapter_bits_ = 0;
  std::array<int64_t, kLoraParts> columns_{};
};

}  // namespace
}  // namespace onnxport

// Lets all LoraDelta of this process compute with this function, onnxport_cpu_add_lora.
ONNXPORT_EXPORT void onnxport_openvino_set_kernel(onnxport::Kernel kernel) {
  onnxport::Given::the().set_kernel(kernel);
}

// Lets those whose attribute `model` says so read these adapters, in memory that stays; null: none.
ONNXPORT_EXPORT void onnxport_openvino_set_adapters(int64_t model,
                                                    const onnxport::Adapters* adapters) {
  onnxport::Given::the().set(model, adapters);
}

// Size of the Adapters structure, so that a caller can check its own declaration of it.
ONNXPORT_EXPORT size_t onnxport_openvino_adapters_size() { return sizeof(onnxport::Adapters); }

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>(
    {std::make_shared<ov::OpExtension<onnxport::LoraDelta>>()}));
