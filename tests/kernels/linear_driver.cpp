// Runs serialized convolutions and gated delta nets without ONNX Runtime or Python, for processors
// that have neither here. linear_cases.py writes the input; see there for the format.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "causal_conv.h"
#include "delta_net.h"
#include "drivers.h"
#include "kernels.h"
#include "tensor.h"

namespace {

constexpr int64_t kSlots = 9;

struct States {
  std::vector<int32_t> lengths, reads, writes;
  std::vector<float> pool;

  States(int64_t batch, int64_t state)
      : lengths(read_array<int32_t>(batch + 1)),
        reads(read_array<int32_t>(batch)),
        writes(read_array<int32_t>(batch)),
        pool(read_array<float>(kSlots * state)) {}

  onnxport::StateSlots slots(int64_t tokens) const {
    return {static_cast<int64_t>(reads.size()), tokens, kSlots, lengths.data(), reads.data(),
            writes.data()};
  }
};

void put(const std::vector<float>& values) {
  if (std::fwrite(values.data(), sizeof(float), values.size(), stdout) != values.size())
    std::exit(4);
}

void run_conv() {
  const std::vector<int64_t> sizes = read_array<int64_t>(6);
  const int64_t tokens = sizes[1], channels = sizes[2], taps = sizes[3];
  States states(sizes[0], channels * (taps - 1));
  const auto x = read_array<float>(tokens * channels);
  const auto weights = read_array<float>(taps * channels);
  const auto bias = read_array<float>(sizes[5] ? channels : 0);
  std::vector<float> output(x.size());
  onnxport::CausalConv conv{};
  conv.slots = states.slots(tokens);
  conv.channels = channels;
  conv.taps = taps;
  conv.has_silu = sizes[4] != 0;
  conv.input = x.data();
  conv.weights = weights.data();
  conv.bias = sizes[5] ? bias.data() : nullptr;
  conv.pool = states.pool.data();
  conv.output = output.data();
  onnxport::check_slots(conv.slots);
  if (onnxport::run_causal_conv(conv, run_on_threads, nullptr) != 0) std::exit(5);
  put(output);
  put(states.pool);
}

void run_delta() {
  const std::vector<int64_t> sizes = read_array<int64_t>(12);
  const float scale = read_array<float>(1)[0];
  const int64_t tokens = sizes[1];
  onnxport::DeltaNet net{};
  net.key_heads = sizes[2];
  net.value_heads = sizes[3];
  net.key_size = sizes[4];
  net.value_size = sizes[5];
  net.is_normalized = sizes[6] != 0;
  net.has_sigmoid = sizes[7] != 0;
  net.has_delta_rule = sizes[9] != 0;
  net.has_steps = sizes[10] != 0;
  net.has_channels = sizes[11] != 0;
  net.scale = scale;
  const int64_t keys = net.key_heads * net.key_size, values = net.value_heads * net.value_size;
  States states(sizes[0], values * net.key_size);
  const auto query = read_array<float>(tokens * keys);
  const auto key = read_array<float>(tokens * keys);
  const auto value = read_array<float>(tokens * values);
  const int64_t decays = net.value_heads * (net.has_channels ? net.key_size : 1);
  const auto decay = read_array<float>(tokens * decays);
  const auto beta = read_array<float>(sizes[9] ? tokens * net.value_heads : 0);
  const auto a_log = read_array<float>(sizes[8] ? net.value_heads : 0);
  const auto dt_bias = read_array<float>(sizes[8] ? decays : 0);
  std::vector<float> output(value.size());
  net.slots = states.slots(tokens);
  net.query_stride = net.key_stride = keys;
  net.value_stride = values;
  net.query = query.data();
  net.key = key.data();
  net.value = value.data();
  net.decay = decay.data();
  net.beta = sizes[9] ? beta.data() : nullptr;
  if (sizes[8]) {
    net.a_log = a_log.data();
    net.dt_bias = dt_bias.data();
  }
  net.pool = states.pool.data();
  net.output = output.data();
  onnxport::check_sizes(net);
  onnxport::check_slots(net.slots);
  if (onnxport::run_delta_net(net, run_on_threads, nullptr) != 0) std::exit(5);
  put(output);
  put(states.pool);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || !onnxport::set_isa(argv[1])) return 2;
  for (int64_t left = read_array<int64_t>(1)[0]; left > 0; left--)
    read_array<int64_t>(1)[0] ? run_delta() : run_conv();
  return 0;
}
