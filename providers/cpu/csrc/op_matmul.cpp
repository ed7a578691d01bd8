// onnxport.MatMulNBits: com.microsoft.MatMulNBits at accuracy level 4 with our own kernels. Weights
// are packed once, when the session is made.
#include <memory>

#include "matmul.h"
#include "op.h"
#include "pages.h"

namespace onnxport::op {
namespace {

enum MatMulInput : size_t { kActivations, kQuants, kScales, kMatMulInputs };

struct MatMulKernel {
  Api api;
  WeightMemory weights;
  MatMul settings;  // a call fills in the rest

  MatMulKernel(const Api& a, const MatMul& m)
      : api(a), weights(static_cast<size_t>(num_panels(m) * panel_bytes(m))), settings(m) {
    settings.weights = weights.data();
  }
};

int64_t read_attribute(const Api& api, const ort::KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api.attribute(info, name, &value));
  return value;
}

Tensor constant(const Api& api, const ort::KernelInfo* info, MatMulInput input, const char* name) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api.constant_input(info, input, &is_constant, &value));
  if (!is_constant)
    fail(api, ort::kNotImplemented, "MatMulNBits: %s must be an initializer", name);
  return describe(api, name, value);
}

int64_t elements(const Tensor& tensor) {
  int64_t count = 1;
  for (size_t i = 0; i < tensor.rank; i++) count *= tensor.dims[i];
  return count;
}

void expect_elements(const Api& api, const char* name, const Tensor& tensor, int64_t wanted) {
  if (elements(tensor) != wanted)
    fail(api, ort::kInvalidArgument, "MatMulNBits: %s must have %lld elements, found %lld", name,
         static_cast<long long>(wanted), static_cast<long long>(elements(tensor)));
}

std::unique_ptr<MatMulKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  if (!active_matmul())
    fail(api, ort::kNotImplemented, "MatMulNBits: this processor has no AVX2 or dot products of int8");
  MatMul m{};
  m.k = read_attribute(api, info, "K");
  m.n = read_attribute(api, info, "N");
  m.bits = read_attribute(api, info, "bits");
  m.block_size = read_attribute(api, info, "block_size");
  const bool known = (m.bits == 4 || m.bits == 8) && m.block_size >= 16 &&
                     m.block_size <= kLargestBlock && (m.block_size & (m.block_size - 1)) == 0;
  if (!known || m.k < 1 || m.n < 1)
    fail(api, ort::kNotImplemented,
         "MatMulNBits takes 4 or 8 bits in blocks of 16, 32, 64, 128 or 256, found K %lld, N %lld, "
         "bits %lld, block_size %lld",
         static_cast<long long>(m.k), static_cast<long long>(m.n), static_cast<long long>(m.bits),
         static_cast<long long>(m.block_size));
  const Tensor quants = constant(api, info, kQuants, "B");
  const Tensor scales = constant(api, info, kScales, "scales");
  expect_elements(api, "B", quants, m.n * num_blocks(m) * m.block_size * m.bits / 8);
  expect_elements(api, "scales", scales, m.n * num_blocks(m));
  auto kernel = std::make_unique<MatMulKernel>(api, m);
  pack_weights(m, quants.as<const uint8_t>(), scales.as<const float>(), kernel->weights.data());
  // The runtime keeps the weights as they were for as long as the session lives. Where it mapped
  // them from the artifact, they need not stay in memory twice.
  forget_file_pages(quants.data, static_cast<size_t>(elements(quants)));
  return kernel;
}

void compute(const MatMulKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* value = nullptr;
  check(api.input(context, kActivations, &value));
  Tensor input = describe(api, "A", value);
  MatMul call = kernel.settings;
  if (input.dims[input.rank - 1] != call.k)
    fail(api, ort::kInvalidArgument, "MatMulNBits: A's last dimension must be %lld, found %lld",
         static_cast<long long>(call.k), static_cast<long long>(input.dims[input.rank - 1]));
  call.rows = elements(input) / call.k;
  call.input = input.as<const float>();
  input.dims[input.rank - 1] = call.n;
  ort::Value* out = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, input.dims, input.rank, &out));
  check(api.mutable_data(out, &data));
  call.output = static_cast<float*>(data);
  Parallel parallel{api, context};
  if (run_matmul(*active_matmul(), call, parallel_for, &parallel) != 0) check(parallel.status);
}

}  // namespace

ort::CustomOp matmul_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return "MatMulNBits"; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    return index == kQuants ? ort::kUint8 : ort::kFloat;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kMatMulInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) -> int {
    return ort::kRequired;
  };
  op.create_kernel = [](const ort::CustomOp*, const void* const* table,
                        const ort::KernelInfo* info, void** out) -> Status* {
    const Api api{table};
    return guarded(api, [&] { *out = make_kernel(api, info).release(); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<MatMulKernel*>(kernel); };
  op.compute = [](void* state, ort::KernelContext* context) -> Status* {
    const MatMulKernel& kernel = *static_cast<const MatMulKernel*>(state);
    return guarded(kernel.api, [&] { compute(kernel, context); });
  };
  const auto none = [](int**, int**) { return size_t{0}; };
  op.may_inplace = op.alias_map = none;
  return op;
}

}  // namespace onnxport::op
