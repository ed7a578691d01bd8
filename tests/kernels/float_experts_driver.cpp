// Runs serialized layers of experts in floats without ONNX Runtime or Python, for processors that
// have neither here. float_experts_cases.py writes the input; see there for the format.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "drivers.h"
#include "float_experts.h"

namespace {

void run_case() {
  const std::vector<int64_t> sizes = read_array<int64_t>(9);
  const std::vector<float> numbers = read_array<float>(3);
  const onnxport::Swiglu swiglu{numbers[0], numbers[1], numbers[2]};
  onnxport::FloatExperts experts{};
  experts.type = static_cast<onnxport::CacheType>(sizes[0]);
  experts.depth = sizes[1];
  experts.inner = sizes[2];
  experts.n = sizes[3];
  experts.routing = {sizes[4], sizes[5], sizes[6] != 0};
  experts.rows = sizes[8];
  const int64_t bytes = experts.type == onnxport::kFloat32 ? 4 : 2;
  const int64_t features = 2 * sizes[4] * experts.inner, outputs = sizes[4] * experts.n;
  const auto x = read_array<float>(experts.rows * experts.depth);
  const auto logits = read_array<float>(experts.rows * sizes[4]);
  const auto gate_up = read_array<char>(features * experts.depth * bytes);
  const auto down = read_array<char>(outputs * experts.inner * bytes);
  std::vector<float> gate_up_bias, down_bias;
  if (sizes[7]) {
    gate_up_bias = read_array<float>(features);
    down_bias = read_array<float>(outputs);
    experts.gate_up_bias = gate_up_bias.data();
    experts.down_bias = down_bias.data();
    experts.swiglu = &swiglu;
  }
  std::vector<float> output(static_cast<size_t>(experts.rows * experts.n));
  experts.gate_up = gate_up.data();
  experts.down = down.data();
  experts.input = x.data();
  experts.logits = logits.data();
  experts.output = output.data();
  if (run_float_experts(experts, run_on_threads, nullptr) != 0) std::exit(4);
  std::fwrite(output.data(), sizeof(float), output.size(), stdout);
}

}  // namespace

// The argument is the instruction set to use.
int main(int argc, char** argv) {
  if (argc != 2 || !onnxport::set_isa(argv[1])) return 2;
  for (int64_t left = read_array<int64_t>(1)[0]; left > 0; left--) run_case();
  return 0;
}
