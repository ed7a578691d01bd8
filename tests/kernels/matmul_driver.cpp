// Runs serialized products without ONNX Runtime or Python, for processors that have neither here.
// matmul_standalone.py writes the input and reads the output; see there for the format.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "matmul.h"

namespace {

using onnxport::MatMul;

template <class T>
std::vector<T> read_array(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  const size_t got = std::fread(values.data(), sizeof(T), values.size(), stdin);
  if (got != values.size()) std::exit(3);
  return values;
}

// Three threads that take the tasks from the last to the first.
int run_on_threads(void*, size_t count, onnxport::Task task, void* argument) {
  std::atomic<size_t> left{count};
  const auto work = [&] {
    for (size_t i = left.load(); i > 0;)
      if (left.compare_exchange_weak(i, i - 1)) {
        task(argument, i - 1);
        i = left.load();
      }
  };
  std::thread second(work), third(work);
  work();
  second.join();
  third.join();
  return 0;
}

void run_one() {
  const std::vector<int64_t> sizes = read_array<int64_t>(5);
  MatMul m{};
  m.k = sizes[0];
  m.n = sizes[1];
  m.bits = sizes[2];
  m.block_size = sizes[3];
  m.rows = sizes[4];
  const auto x = read_array<float>(m.rows * m.k);
  const auto quants = read_array<uint8_t>(m.n * num_blocks(m) * m.block_size * m.bits / 8);
  const auto scales = read_array<float>(m.n * num_blocks(m));
  const size_t bytes = static_cast<size_t>(num_panels(m) * panel_bytes(m));
  auto* packed = static_cast<uint8_t*>(std::aligned_alloc(64, bytes));
  pack_weights(m, quants.data(), scales.data(), packed);
  std::vector<float> output(static_cast<size_t>(m.rows * m.n));
  m.weights = packed;
  m.input = x.data();
  m.output = output.data();
  if (run_matmul(*onnxport::active_matmul(), m, run_on_threads, nullptr) != 0) std::exit(4);
  std::fwrite(output.data(), sizeof(float), output.size(), stdout);
  std::free(packed);
}

}  // namespace

// The argument is the instruction set to use, or none to print the best one's name.
int main(int argc, char** argv) {
  if (argc == 1) {
    const onnxport::MatMulKernels* best = onnxport::active_matmul();
    std::printf("%s\n", best ? best->name : "none");
    return 0;
  }
  if (!onnxport::set_matmul_isa(argv[1])) return 2;
  for (int64_t left = read_array<int64_t>(1)[0]; left > 0; left--) run_one();
  return 0;
}
