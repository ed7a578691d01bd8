// onnxport.MatMulNBits: com.microsoft.MatMulNBits at accuracy level 4 with our own kernels. Weights
// are packed once, when the session is made, and kernels that have the same ones share them (see
// shared_weights.h). With the inputs skip and gamma it normalizes A + skip
// first (see Norm), and returns that sum, too, and if asked for what was normalized. With the input
// exact, int32 and one for each row, only so many of a row's largest outputs are sure to be exact,
// and all others are less; zero: all are (see coarse.h). With the input summary_scales, float and one
// for each row, the output 3 is what summaries.h says of the rows, [rows, summary_floats(N)]; of a
// row whose outputs are not all exact there is nothing in it but that. With the inputs of adapters,
// which are integers, and the attributes of AddLora it is an AddLora, too, behind the bias and to the bit;
// all outputs are exact then, and there are no summaries. With the input allowed, which is exact's,
// int32 and [rows, N / 32 rounded up] or [0, ...] for all, bits say which of a row's outputs count,
// see coarse.h. Both may be written while the model runs, what is allowed first; exact is read once,
// and before it. With the input races, which is exact's, too, double and [rows, 2] or [0, 2] for none,
// rows draw from all that may come, see there. With the input zero_points, uint8, blocks have these, as
// com.microsoft.MatMulNBits' own; or with the input offsets, float16 and [N, blocks], these.
#include <atomic>
#include <memory>
#include <optional>

#include "coarse.h"
#include "coarse_run.h"
#include "op_adapters.h"
#include "op_weights.h"
#include "pages.h"
#include "shared_weights.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "MatMulNBits";

enum MatMulInput : size_t {
  kActivations,
  kQuants,
  kScales,
  kSkip,
  kGamma,
  kBias,
  kExact,
  kSummaryScales,
  kAdapters,
  kAdapterRanks,
  kAdapterWeights,
  kAdapterScales,
  kAllowed,
  kRaces,
  kZeroPoints,
  kOffsets,
  kMatMulInputs
};
static_assert(kAllowed == kAdapters + kAdapterInputs, "adapters have so many inputs");

constexpr ZeroInputs kZeros{kZeroPoints, kOffsets, "zero_points", "offsets"};

struct MatMulKernel {
  Api api;
  std::shared_ptr<SharedWeights> weights;
  std::optional<WeightMemory> zeros;
  MatMul settings;     // a call fills in the rest
  ProductLora lora{};  // likewise; without a largest rank there are no adapters
  CoarseProduct* coarse = nullptr;  // the weights'; null where it does not suit
  mutable std::atomic<int64_t> resting{0};  // see CoarseProduct::run
};

void read_lora(const Api& api, const ort::KernelInfo* info, const MatMul& m, ProductLora& lora) {
  if (!read_max_rank(api, info, &lora.slots.max_rank)) return;
  lora.slots.type = read_integer_type(api, info, kName);
  lora.place = read_place(api, info);
  lora.place.depth = m.k;
  lora.place.bits = m.bits;
  lora.place.block_size = m.block_size;
  check_place(kName, lora.place, lora.slots.max_rank);
  int64_t width = 0;
  for (int64_t columns : lora.place.columns) width += columns;
  if (width != m.n)
    fail(api, ort::kInvalidArgument, "%s: adapters must add to N, %lld, columns, found %lld", kName,
         static_cast<long long>(m.n), static_cast<long long>(width));
}

template <ort::ElementType kStored>
std::unique_ptr<MatMulKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  MatMul m{};
  m.k = read_attribute(api, info, "K");
  m.n = read_attribute(api, info, "N");
  m.bits = read_attribute(api, info, "bits");
  m.block_size = read_attribute(api, info, "block_size");
  m.norm.epsilon = read_epsilon(api, info, kName);
  check_product(kName, m);
  const Weights weights = read_weights(api, info, kName, m, {kQuants, "B", "scales"});
  m.half_scales = are_halves(stored_scales(weights, kStored), elements(weights.scales));
  m.bias = read_bias(api, info, kName, m, kBias);
  auto kernel = std::make_unique<MatMulKernel>();
  kernel->api = api;
  kernel->settings = m;
  read_lora(api, info, m, kernel->lora);
  kernel->weights = share_weights(m, weights.quants.as<const uint8_t>(),
                                  stored_scales(weights, kStored));
  kernel->settings.weights = kernel->weights->data();
  forget_weights(weights, kStored);
  if (const auto* zeros = read_zeros(api, info, kName, m, kZeros)) {
    kernel->settings.has_offsets = m.has_offsets;
    kernel->settings.zeros = pack_zeros_into(
        kernel->zeros, m, [&](uint16_t* packed) { pack_zeros(m, zeros, packed); });
    forget_file_pages(zeros, static_cast<size_t>(m.n * stored_zero_bytes(m)));
  }
  kernel->coarse = kernel->weights->coarse(kernel->settings);
  return kernel;
}

// What a call is asked for, of up to kMostCoarseRows rows.
struct Asked {
  bool is_few = false;  // else all outputs
  int32_t exact[kMostCoarseRows];
  const uint32_t* allowed = nullptr;
  const Race* races = nullptr;
};

void check_rows(const Api& api, const Tensor& input, const char* name, int64_t rows,
                int64_t numbers, const char* described) {
  if (elements(input) != rows * numbers)
    fail(api, ort::kInvalidArgument, "%s: %s must have %s for each of %lld rows, found %lld", kName,
         name, described, static_cast<long long>(rows),
         static_cast<long long>(elements(input)));
}

Asked read_asked(const MatMulKernel& kernel, const ort::KernelContext* context, int64_t rows) {
  const Api& api = kernel.api;
  Asked asked;
  const ort::Value* exact_value = optional_input(api, context, kExact);
  const ort::Value* allowed_value = optional_input(api, context, kAllowed);
  const ort::Value* races_value = optional_input(api, context, kRaces);
  if ((allowed_value || races_value) && !exact_value)
    fail(api, ort::kInvalidArgument, "%s: the input %s needs exact", kName,
         allowed_value ? "allowed" : "races");
  if (!exact_value) return asked;
  const Tensor exact = describe(api, "exact", exact_value);
  check_rows(api, exact, "exact", rows, 1, "a number");
  if (allowed_value) {
    const Tensor allowed = describe(api, "allowed", allowed_value);
    if (elements(allowed)) {
      check_rows(api, allowed, "allowed", rows, num_panels(kernel.settings),
                 "a bit for each output");
      asked.allowed = allowed.as<const uint32_t>();
    }
  }
  if (races_value) {
    const Tensor races = describe(api, "races", races_value);
    if (elements(races)) {
      check_rows(api, races, "races", rows, 2, "two numbers");
      asked.races = races.as<const Race>();
    }
  }
  asked.is_few = rows <= kMostCoarseRows;
  const volatile int32_t* numbers = exact.as<const int32_t>();
  for (int64_t row = 0; asked.is_few && row < rows; row++) asked.exact[row] = numbers[row];
  std::atomic_thread_fence(std::memory_order_acquire);  // what is allowed was written before
  return asked;
}

// Gives a call the memory of its summaries, if the node makes some, in which no row has one yet.
void read_summaries(const Api& api, ort::KernelContext* context, MatMul& call) {
  constexpr size_t kSummaries = 3;
  const ort::Value* value = optional_input(api, context, kSummaryScales);
  const int64_t floats = rows::summary_floats(call.n), dims[] = {call.rows, floats};
  size_t outputs = 0;
  check(api.output_count(context, &outputs));
  ort::Value* out = nullptr;
  if (outputs > kSummaries) check(api.output(context, kSummaries, dims, 2, &out));
  if (!value != !out)
    fail(api, ort::kInvalidArgument,
         "%s: summaries need summary_scales and a fourth output; there is no %s", kName,
         value ? "fourth output" : "summary_scales");
  if (!value) return;
  const Tensor scales = describe(api, "summary_scales", value);
  check_rows(api, scales, "summary_scales", call.rows, 1, "a number");
  void* data = nullptr;
  check(api.mutable_data(out, &data));
  call.summary_scales = scales.as<const float>();
  call.summaries = static_cast<float*>(data);
  for (int64_t row = 0; row < call.rows; row++)
    *rows::summary_at(call.summaries + row * floats, call.n).scale = rows::kNothing;
}

void compute(const MatMulKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  Tensor input = read_activations(api, context, kName, kernel.settings.k);
  MatMul call = kernel.settings;
  call.rows = elements(input) / call.k;
  call.input = input.as<const float>();
  read_norm(api, context, kName, input, kSkip, call);
  input.dims[input.rank - 1] = call.n;
  call.output = static_cast<float*>(open_output(api, context, input));
  read_summaries(api, context, call);
  if (!call.bias) refuse_input(api, context, kName, kBias, "bias");
  refuse_zeros(api, context, kName, call, kZeros);
  Parallel parallel{api, context};
  const MatMulKernels& kernels = *active_matmul();
  const Asked asked = read_asked(kernel, context, call.rows);
  ProductLora lora = kernel.lora;
  const bool has_lora = read_optional_adapters(api, context, kName, kAdapters, call.rows,
                                               {lora.place}, &lora.slots);
  if (has_lora && call.summaries)
    fail(api, ort::kInvalidArgument, "%s: summaries of outputs that adapters add to are not made",
         kName);
  const int result = asked.is_few && kernel.coarse && !has_lora
                         ? kernel.coarse->run(kernels, call, asked.exact, asked.allowed,
                                              asked.races, kernel.resting, parallel_for, &parallel)
                         : run_matmul(kernels, call, parallel_for, &parallel,
                                      has_lora ? &lora : nullptr);
  if (result != 0) check(parallel.status);
}

template <ort::ElementType kStored>
ort::CustomOp make_operator() {
  ort::CustomOp op = product_operator<kSkip, kMatMulInputs>();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{4}; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    if (index == kScales) return kStored;
    if (index == kOffsets) return ort::kFloat16;
    if (index == kExact || index == kAllowed) return ort::kInt32;
    if (index == kAdapters || index == kAdapterRanks) return ort::kInt32;
    if (index == kAdapterWeights) return ort::kInt8;
    if (index == kRaces) return ort::kDouble;
    return index == kQuants || index == kZeroPoints ? ort::kUint8 : ort::kFloat;
  };
  set_kernel<MatMulKernel, make_kernel<kStored>, compute>(op);
  return op;
}

}  // namespace

ort::CustomOp matmul_operator() { return make_operator<ort::kFloat>(); }
ort::CustomOp matmul_half_operator() { return make_operator<ort::kFloat16>(); }

}  // namespace onnxport::op
