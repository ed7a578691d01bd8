// Runs serialized products and feed-forward layers without ONNX Runtime or Python, for processors that have neither here.
// matmul_standalone.py writes the input and reads the output; see there for the format.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "coarse.h"
#include "drivers.h"
#include "experts.h"
#include "kernels.h"
#include "mlp.h"

namespace {

using onnxport::MatMul;

struct Stored {
  MatMul product{};
  std::vector<float> x, scales;
  std::vector<float> skip, gamma, residual;  // of a norm; empty for none
  std::vector<uint8_t> quants, exponents;    // exponents, E8M0, in place of scales
  std::vector<uint8_t> zero_points;          // or offsets; empty for none
  std::vector<uint16_t> zeros;               // packed

  onnxport::Scales stored_scales() const {
    if (product.is_fp4) return {exponents.data(), onnxport::Scales::kE8M0};
    return scales.data();
  }
};

Stored read_product() {
  const std::vector<int64_t> sizes = read_array<int64_t>(8);
  Stored stored;
  MatMul& m = stored.product;
  m.k = sizes[0];
  m.n = sizes[1];
  m.bits = sizes[2];
  m.block_size = sizes[3];
  m.rows = sizes[4];
  stored.x = read_array<float>(m.rows * m.k);
  stored.quants = read_array<uint8_t>(m.n * num_blocks(m) * m.block_size * m.bits / 8);
  m.is_fp4 = sizes[6] != 0;
  if (m.is_fp4)
    stored.exponents = read_array<uint8_t>(m.n * num_blocks(m));
  else
    stored.scales = read_array<float>(m.n * num_blocks(m));
  m.half_scales = onnxport::are_halves(stored.stored_scales(), m.n * num_blocks(m));
  m.has_offsets = sizes[7] == 2;
  if (sizes[7] != 0) stored.zero_points = read_array<uint8_t>(m.n * stored_zero_bytes(m));
  if (sizes[5] != 0) {
    m.norm.epsilon = read_array<float>(1)[0];
    stored.skip = read_array<float>(m.rows * m.k);
    stored.gamma = read_array<float>(m.k);
    stored.residual.resize(stored.skip.size());
  }
  return stored;
}

// How many of each row's outputs must be exact, which are allowed, empty: all, and how it draws.
struct Asked {
  std::vector<int32_t> exact;
  std::vector<uint32_t> allowed;
  std::vector<onnxport::Race> races;  // empty: none
};

std::vector<Asked> read_calls(const MatMul& m) {
  std::vector<Asked> calls(static_cast<size_t>(read_array<int64_t>(1)[0]));
  for (Asked& asked : calls) {
    asked.exact = read_array<int32_t>(m.rows);
    if (read_array<int64_t>(1)[0]) asked.allowed = read_array<uint32_t>(m.rows * num_panels(m));
    if (read_array<int64_t>(1)[0]) asked.races = read_array<onnxport::Race>(m.rows);
  }
  return calls;
}

// Points a call to where its input, norm and weights are.
void connect(MatMul& m, Stored& stored, const uint8_t* weights) {
  m.weights = weights;
  m.input = stored.x.data();
  if (stored.gamma.empty()) return;
  m.norm.gamma = stored.gamma.data();
  m.norm.skip = stored.skip.data();
  m.norm.residual = stored.residual.data();
}

// Packs zero points or offsets, if there are some, for so many calls that have them as `pack` does.
template <class Pack>
void connect_zeros(MatMul& m, Stored& stored, Pack pack, int64_t count = 1) {
  if (stored.zero_points.empty()) return;
  stored.zeros.resize(static_cast<size_t>(count * packed_zeros(m)));
  pack(stored.zero_points.data(), stored.zeros.data());
  m.zeros = stored.zeros.data();
}

struct Packed {
  explicit Packed(const MatMul& m, int64_t count = 1)
      : data(static_cast<uint8_t*>(std::aligned_alloc(
            64, static_cast<size_t>(count * num_panels(m) * panel_bytes(m))))) {}
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  ~Packed() { std::free(data); }

  uint8_t* data;
};

void write(const std::vector<float>& output, const Stored& stored, int result) {
  if (result != 0) std::exit(4);
  std::fwrite(output.data(), sizeof(float), output.size(), stdout);
  std::fwrite(stored.residual.data(), sizeof(float), stored.residual.size(), stdout);
}

void run_product() {
  Stored stored = read_product();
  MatMul m = stored.product;
  const Packed packed(m);
  pack_weights(m, stored.quants.data(), stored.stored_scales(), packed.data);
  std::vector<float> output(static_cast<size_t>(m.rows * m.n));
  connect(m, stored, packed.data);
  connect_zeros(m, stored, [&](const uint8_t* from, uint16_t* to) { pack_zeros(m, from, to); });
  m.output = output.data();
  write(output, stored, run_matmul(*onnxport::active_matmul(), m, run_on_threads, nullptr));
}

// The calls of a product one after the other; and of those that are to be concurrent, all at once.
void run_coarse() {
  Stored stored = read_product();
  const std::vector<Asked> calls = read_calls(stored.product);
  const bool at_once = read_array<int64_t>(1)[0] != 0;
  MatMul m = stored.product;
  const Packed packed(m);
  pack_weights(m, stored.quants.data(), stored.stored_scales(), packed.data);
  connect(m, stored, packed.data);
  onnxport::CoarseProduct coarse(m);
  std::atomic<int64_t> rest{0};
  std::vector<std::vector<float>> outputs(calls.size());
  std::vector<int> results(calls.size());
  const auto run = [&](size_t i) {
    outputs[i].resize(static_cast<size_t>(m.rows * m.n));
    MatMul call = m;
    call.output = outputs[i].data();
    const Asked& asked = calls[i];
    results[i] = coarse.run(*onnxport::active_matmul(), call, asked.exact.data(),
                            asked.allowed.empty() ? nullptr : asked.allowed.data(),
                            asked.races.empty() ? nullptr : asked.races.data(), rest,
                            run_on_threads, nullptr);
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < calls.size(); i++)
    if (at_once)
      threads.emplace_back(run, i);
    else
      run(i);
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < calls.size(); i++) write(outputs[i], stored, results[i]);
}

void run_layer() {
  Stored first = read_product(), second = read_product();
  onnxport::GatedMlp mlp{second.product.k, first.product, second.product};
  complete(mlp);
  const Packed gate_up(mlp.gate_up), down(mlp.down);
  pack_gate_up(mlp, first.quants.data(), first.stored_scales(), gate_up.data);
  pack_weights(mlp.down, second.quants.data(), second.stored_scales(), down.data);
  std::vector<float> output(static_cast<size_t>(mlp.gate_up.rows * mlp.down.n));
  connect(mlp.gate_up, first, gate_up.data);
  mlp.down.weights = down.data;
  connect_zeros(mlp.gate_up, first,
                [&](const uint8_t* from, uint16_t* to) { pack_gate_up_zeros(mlp, from, to); });
  connect_zeros(mlp.down, second,
                [&](const uint8_t* from, uint16_t* to) { pack_zeros(mlp.down, from, to); });
  mlp.down.output = output.data();
  write(output, first, run_mlp(*onnxport::active_matmul(), mlp, run_on_threads, nullptr));
}

void run_experts() {
  Stored first = read_product(), second = read_product();
  const std::vector<int64_t> sizes = read_array<int64_t>(4);
  const std::vector<float> numbers = read_array<float>(3);
  const onnxport::Swiglu swiglu{numbers[0], numbers[1], numbers[2]};
  std::vector<float> gate_up_bias, down_bias;
  if (sizes[3]) {
    gate_up_bias = read_array<float>(first.product.n);
    down_bias = read_array<float>(second.product.n);
  }
  const std::vector<float> logits = read_array<float>(first.product.rows * sizes[0]);
  onnxport::GatedExperts experts{{second.product.k, first.product, second.product},
                                 {sizes[0], sizes[1], sizes[2] != 0},
                                 logits.data()};
  onnxport::GatedMlp& expert = experts.expert;
  complete(expert);
  expert.down.n = second.product.n / sizes[0];
  const Packed gate_up(expert.gate_up, sizes[0]), down(expert.down, sizes[0]);
  pack_experts_gate_up(experts, first.quants.data(), first.stored_scales(), gate_up.data);
  pack_experts_down(experts, second.quants.data(), second.stored_scales(), down.data);
  std::vector<float> output(static_cast<size_t>(first.product.rows * expert.down.n));
  connect(expert.gate_up, first, gate_up.data);
  expert.down.weights = down.data;
  connect_zeros(
      expert.gate_up, first,
      [&](const uint8_t* from, uint16_t* to) { pack_experts_gate_up_zeros(experts, from, to); },
      sizes[0]);
  connect_zeros(
      expert.down, second,
      [&](const uint8_t* from, uint16_t* to) { pack_experts_down_zeros(experts, from, to); },
      sizes[0]);
  expert.down.output = output.data();
  if (sizes[3]) {
    experts.gate_up_bias = gate_up_bias.data();
    expert.down.bias = down_bias.data();
    expert.swiglu = &swiglu;
  }
  write(output, first, run_experts(*onnxport::active_matmul(), experts, run_on_threads, nullptr));
}

}  // namespace

// The arguments are the instruction sets to use, of products and, if not the best, of the rest; or
// none to print the name of the best of products.
int main(int argc, char** argv) {
  if (argc == 1) {
    const onnxport::MatMulKernels* best = onnxport::active_matmul();
    std::printf("%s\n", best ? best->name : "none");
    return 0;
  }
  if (!onnxport::set_matmul_isa(argv[1])) return 2;
  if (argc > 2 && !onnxport::set_isa(argv[2])) return 2;
  const std::vector<int64_t> counts = read_array<int64_t>(4);
  for (int64_t left = counts[0]; left > 0; left--) run_product();
  for (int64_t left = counts[1]; left > 0; left--) run_layer();
  for (int64_t left = counts[2]; left > 0; left--) run_coarse();
  for (int64_t left = counts[3]; left > 0; left--) run_experts();
  return 0;
}
