// onnxport.AddLora for ONNX Runtime's CUDA execution provider: one launch of the kernel in add_lora.cu,
// which the model brings along as a compiled module. Activations and adapters have one type, float32,
// float16 or bfloat16, and the sum goes where the product is.
#include <cstdint>
#include <memory>

#include "../add_lora.h"
#include "driver.h"
#include "op_values.h"

namespace onnxport::op {
namespace {

enum LoraInput : size_t { kProduct, kActivations, kSlots, kRanks, kWeights, kImage, kInputs };
constexpr const char* kNames[kInputs] = {"product", "activations", "slots",
                                         "ranks",   "weights",     "image"};
constexpr size_t kDims[kInputs] = {2, 2, 1, 3, 2, 1};
constexpr int kHostMemory = -2;  // OrtMemTypeCPUInput
constexpr uintptr_t kAlignment = 16;

struct CudaLora {
  Api api;
  onnxport_cuda::AddLora settings;  // a call fills in the rest
  size_t item_bytes;
  cuda::Function* function;
};

template <size_t kItemBytes>
std::unique_ptr<CudaLora> make_kernel(const Api& api, const ort::KernelInfo* info) {
  onnxport_cuda::AddLora call{};
  int64_t offset = 0, ranks = 0, max_rank = 0;
  check(api.attribute(info, "offset", &offset));
  check(api.attribute(info, "ranks", &ranks));
  check(api.attribute(info, "max_rank", &max_rank));
  if (offset < 0 || ranks < 0 || max_rank < 1 || max_rank > onnxport_cuda::kMostRank)
    fail(api, ort::kInvalidArgument,
         "AddLora: offset %lld, ranks %lld and max_rank %lld; offsets are not negative, and "
         "max_rank is 1 to %d",
         static_cast<long long>(offset), static_cast<long long>(ranks),
         static_cast<long long>(max_rank), onnxport_cuda::kMostRank);
  call.offset = offset;
  call.first_rank = static_cast<int>(ranks);
  call.max_rank = static_cast<int>(max_rank);
  constexpr const char* kColumns[] = {"columns0", "columns1", "columns2"};
  for (const char* name : kColumns) {
    int64_t columns = 0;
    check(api.attribute(info, name, &columns));
    if (columns < 0 || columns > INT32_MAX)
      fail(api, ort::kInvalidArgument, "AddLora: %s is %lld", name, static_cast<long long>(columns));
    if (columns > 0) call.columns[call.parts++] = static_cast<int>(columns);
  }
  if (call.parts == 0) fail(api, ort::kInvalidArgument, "AddLora: no columns");

  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api.constant_input(info, kImage, &is_constant, &value));
  if (!is_constant || !value)
    fail(api, ort::kInvalidArgument, "AddLora: the compiled kernel is not a constant");
  const Tensor image = describe(api, kNames[kImage], value);
  cuda::Function* function = cuda::Driver::get().function(
      image.data, static_cast<size_t>(image.dims[0]), "add_lora");
  return std::make_unique<CudaLora>(CudaLora{api, call, kItemBytes, function});
}

bool is_aligned(const CudaLora& kernel, const onnxport_cuda::AddLora& call, int64_t width) {
  const auto begins = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0;
  };
  const auto whole = [&](int64_t numbers) {
    return static_cast<size_t>(numbers) * kernel.item_bytes % kAlignment == 0;
  };
  bool parts = true;
  for (int part = 0; part < call.parts; part++) parts &= whole(call.columns[part]);
  return begins(call.product) && begins(call.input) && begins(call.output) && parts &&
         whole(width) && whole(call.depth);
}

void compute(const CudaLora& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  Tensor in[kImage];
  for (size_t index = 0; index < kImage; index++) {
    const ort::Value* value = nullptr;
    check(api.input(context, index, &value));
    in[index] = describe(api, kNames[index], value);
    if (in[index].rank != kDims[index])
      fail(api, ort::kInvalidArgument, "AddLora: %s must have %zu dimensions, found %zu",
           kNames[index], kDims[index], in[index].rank);
  }
  onnxport_cuda::AddLora call = kernel.settings;
  int64_t width = 0;
  for (int part = 0; part < call.parts; part++) width += call.columns[part];
  const int64_t rows = in[kProduct].dims[0], slots = in[kWeights].dims[0];
  if (in[kProduct].dims[1] != width || in[kActivations].dims[0] != rows ||
      in[kSlots].dims[0] != rows || in[kRanks].dims[0] != slots + 1 || rows > INT32_MAX)
    fail(api, ort::kInvalidArgument,
         "AddLora: product [%lld, %lld], activations of %lld rows, %lld slots of rows, ranks of "
         "%lld and weights of %lld slots; the product must have %lld columns, all as many rows, and "
         "ranks one slot more than weights",
         static_cast<long long>(rows), static_cast<long long>(in[kProduct].dims[1]),
         static_cast<long long>(in[kActivations].dims[0]),
         static_cast<long long>(in[kSlots].dims[0]), static_cast<long long>(in[kRanks].dims[0]),
         static_cast<long long>(slots), static_cast<long long>(width));
  const int64_t stride = in[kRanks].dims[1] * in[kRanks].dims[2];
  if (call.first_rank + call.parts > stride)
    fail(api, ort::kInvalidArgument, "AddLora: ranks end before those of the product");
  const int64_t depth = in[kActivations].dims[1], numbers = in[kWeights].dims[1];
  if (depth > INT32_MAX) fail(api, ort::kInvalidArgument, "AddLora: activations are too wide");
  int64_t needed = call.offset;  // by an adapter that has the largest rank in each part
  for (int part = 0; part < call.parts; part++)
    needed += int64_t{call.max_rank} * onnxport_cuda::kPanel *
              (onnxport_cuda::panels_of(static_cast<int>(depth)) +
               onnxport_cuda::panels_of(call.columns[part]));
  const auto is_at_line = [&](int64_t count) {
    return static_cast<size_t>(count) * kernel.item_bytes % kAlignment == 0;
  };
  if (numbers < needed || !is_at_line(numbers) || !is_at_line(call.offset) ||
      reinterpret_cast<uintptr_t>(in[kWeights].data) % kAlignment != 0)
    fail(api, ort::kInvalidArgument,
         "AddLora: slots of %lld numbers, and the product %lld from a slot's start; a slot must have "
         "%lld numbers at least, and both must lie at multiples of %d bytes",
         static_cast<long long>(numbers), static_cast<long long>(call.offset),
         static_cast<long long>(needed), static_cast<int>(kAlignment));
  call.product = in[kProduct].data;
  call.input = in[kActivations].data;
  call.slots = in[kSlots].as<const int>();
  call.ranks = in[kRanks].as<const int>();
  call.weights = in[kWeights].data;
  call.output = open_output(api, context, in[kProduct]);
  call.numbers = numbers;
  call.rows = static_cast<int>(rows);
  call.depth = static_cast<int>(depth);
  call.num_slots = static_cast<int>(slots);
  call.ranks_stride = static_cast<int>(stride);
  call.is_aligned = is_aligned(kernel, call, width);
  if (rows == 0) return;
  const onnxport_cuda::Launch launch = onnxport_cuda::plan(call);
  void* stream = nullptr;
  check(api.compute_stream(context, &stream));
  void* arguments[] = {&call};
  cuda::Driver::get().launch(kernel.function, launch.blocks_x, launch.blocks_y, launch.threads,
                             launch.shared_bytes, static_cast<cuda::Stream*>(stream), arguments);
}

// The output is the product's own memory: nothing else reads that.
size_t product_alias(int** inputs, int** outputs) {
  static int zero[] = {0};
  *inputs = *outputs = zero;
  return 1;
}

template <ort::ElementType kType, size_t kItemBytes>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return "AddLora"; };
  op.execution_provider = [](const ort::CustomOp*) {
    return cuda::is_stand_in() ? "CPUExecutionProvider" : "CUDAExecutionProvider";
  };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    switch (index) {
      case kSlots:
      case kRanks: return ort::kInt32;
      case kImage: return ort::kUint8;
      default: return kType;
    }
  };
  op.input_memory_type = [](const ort::CustomOp*, size_t index) {
    return index == kImage ? kHostMemory : 0;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return kType; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  set_kernel<CudaLora, make_kernel<kItemBytes>, compute>(op);
  op.may_inplace = op.alias_map = product_alias;
  return op;
}

Status* register_operators(ort::SessionOptions* options, const ort::ApiBase* base) {
  const void* const* table = base->get_api(ort::kApiVersion);
  if (!table)
    return Api{base->get_api(1)}.create_status(
        ort::kNotImplemented, "onnxport's CUDA operators need ONNX Runtime 1.24 or newer");
  const Api api{table};
  static const ort::CustomOp operators[] = {make_operator<ort::kFloat, 4>(),
                                            make_operator<ort::kFloat16, 2>(),
                                            make_operator<ort::kBFloat16, 2>()};
  return guarded(api, [&] {
    ort::CustomOpDomain* domain = nullptr;  // kept by the runtime, never freed
    check(api.create_domain("onnxport", &domain));
    for (const ort::CustomOp& op : operators) check(api.add_operator(domain, &op));
    check(api.add_domain(options, domain));
  });
}

}  // namespace
}  // namespace onnxport::op

#if defined(_WIN32)
#define ONNXPORT_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXPORT_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The entry point that SessionOptions.register_custom_ops_library looks for.
ONNXPORT_EXPORT onnxport::ort::Status* ONNXPORT_ORT_CALL
RegisterCustomOps(onnxport::ort::SessionOptions* options, const onnxport::ort::ApiBase* base) {
  return onnxport::op::register_operators(options, base);
}
