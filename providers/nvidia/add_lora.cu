// What LoRA adapters add to a product, in one kernel, so that a step that is replayed has as few more
// as it can. Compiled when a model is loaded, behind add_lora.h, with NUMBER_TYPE the ONNX number of the
// type of activations and adapters: 1 float32, 10 float16, 16 bfloat16.
//
// A row's factors x A^T are computed by whoever computes a tile of its outputs, several times over where
// there are several tiles: handing them on would take a second kernel. 8 threads read 64 numbers that
// lie side by side, so a warp reads 4 rows of A, or of B, at once. Sums are float32.

#ifndef ONNXPORT_KERNEL  // by which tests compile it for the host
#define ONNXPORT_KERNEL extern "C" __global__
extern __shared__ float shared[];
#endif

namespace onnxport_cuda {

constexpr int kRun = 8;                    // numbers that a thread reads at once
constexpr int kRuns = kPanel / kRun;       // threads beside each other
constexpr int kTogether = kWarp / kRuns;   // rows that a warp reads at once
constexpr int kSums = 8;                   // rows of A whose sums a thread has
constexpr int kRanks = kTogether * kSums;  // and a warp
constexpr unsigned int kAllLanes = 0xffffffffu;

#if NUMBER_TYPE == 1
typedef float Number;
inline float widened(Number value) { return value; }
inline Number narrowed(float value) { return value; }
#else
typedef unsigned short Number;  // its bits
#if NUMBER_TYPE == 10
inline float widened(Number bits) { return float_of_half(bits); }
inline Number narrowed(float value) { return half_of_float(value); }
#elif NUMBER_TYPE == 16
inline float widened(Number bits) { return float_of_bfloat16(bits); }
inline Number narrowed(float value) { return bfloat16_of_float(value); }
#else
#error "NUMBER_TYPE is 1, 10 or 16"
#endif
#endif

struct alignas(16) Run {
  Number numbers[kRun];
};

// Numbers [begin, begin + kRun) of a row of `count`; what is behind the row is 0.
inline void read_row(const Number* row, int begin, int count, int is_aligned,
                     float (&values)[kRun]) {
  if (is_aligned && begin + kRun <= count) {
    const Run run = *reinterpret_cast<const Run*>(row + begin);
    for (int i = 0; i < kRun; i++) values[i] = widened(run.numbers[i]);
    return;
  }
  for (int i = 0; i < kRun; i++) values[i] = begin + i < count ? widened(row[begin + i]) : 0.0f;
}

// Writes what read_row reads.
inline void write_row(Number* row, int begin, int count, int is_aligned,
                      const float (&values)[kRun]) {
  if (is_aligned && begin + kRun <= count) {
    Run run;
    for (int i = 0; i < kRun; i++) run.numbers[i] = narrowed(values[i]);
    *reinterpret_cast<Run*>(row + begin) = run;
    return;
  }
  for (int i = 0; i < kRun; i++)
    if (begin + i < count) row[begin + i] = narrowed(values[i]);
}

// Sums over lanes whose numbers differ in the bits of `first` to `last`; all of them get it.
inline float sum_over(float value, int first, int last) {
  for (int bit = first; bit <= last; bit *= 2) value += __shfl_xor_sync(kAllLanes, value, bit);
  return value;
}

// The factors [first, first + kRanks) of a row, as far as panels `begin`, `begin + step` and so on make
// them: those of rank first + lane / kRuns + i * kTogether in sums[i].
inline void shrink(const AddLora& call, const Number* input, const Number* a, int rank, int first,
                   int begin, int step, float (&sums)[kSums]) {
  const int lane = threadIdx.x % kWarp, run = lane % kRuns * kRun;
  const int row = first + lane / kRuns;
  for (int i = 0; i < kSums; i++) sums[i] = 0.0f;
#pragma unroll 2
  for (int panel = begin; panel < panels_of(call.depth); panel += step) {
    float values[kRun];
    read_row(input, panel * kPanel + run, call.depth, call.is_aligned, values);
    const Number* numbers = a + (static_cast<long long>(panel) * rank + row) * kPanel + run;
    Run rows[kSums];  // all are on their way before the first is needed
#pragma unroll
    for (int i = 0; i < kSums; i++)
      if (row + i * kTogether < rank)
        rows[i] = *reinterpret_cast<const Run*>(numbers + i * kTogether * kPanel);
#pragma unroll
    for (int i = 0; i < kSums; i++)
      if (row + i * kTogether < rank)
        for (int j = 0; j < kRun; j++) sums[i] += values[j] * widened(rows[i].numbers[j]);
  }
  for (int i = 0; i < kSums; i++) sums[i] = sum_over(sums[i], 1, kRuns / 2);
}

}  // namespace onnxport_cuda

// A block computes a tile of columns, of one row with all its warps or of one row with each.
ONNXPORT_KERNEL void __launch_bounds__(512) add_lora(
    const __grid_constant__ onnxport_cuda::AddLora call) {
  using namespace onnxport_cuda;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const bool is_alone = call.warps_per_row == 1;
  const int row = is_alone ? blockIdx.y * warps + warp : blockIdx.y;
  const int first_panel = is_alone ? 0 : warp, step = call.warps_per_row;
  if (row >= call.rows) return;

  int part = 0, tile = blockIdx.x, column = 0, width = 0;
  for (int i = 0; i < call.parts; i++) width += call.columns[i];
  for (; part < call.parts; part++) {
    const int tiles = (panels_of(call.columns[part]) + call.tile_panels - 1) / call.tile_panels;
    if (tile < tiles) break;
    tile -= tiles;
    column += call.columns[part];
  }
  if (part == call.parts) return;
  const int columns = call.columns[part];
  const int begin = tile * call.tile_panels;
  const int end = min(begin + call.tile_panels, panels_of(columns));
  const Number* product = static_cast<const Number*>(call.product) + 1LL * row * width + column;
  Number* output = static_cast<Number*>(call.output) + 1LL * row * width + column;
  const Number* input = static_cast<const Number*>(call.input) + 1LL * row * call.depth;

  const int slot = call.slots[row];
  const bool has_slot = slot > 0 && slot <= call.num_slots;
  const int* ranks = call.ranks + 1LL * (has_slot ? slot : 0) * call.ranks_stride + call.first_rank;
  const int rank = has_slot ? min(ranks[part], call.max_rank) : 0;
  if (rank == 0 && product == output) return;
  const Number* a = static_cast<const Number*>(call.weights);
  if (rank > 0) {
    a += (slot - 1) * call.numbers + call.offset;
    const int deep = panels_of(call.depth) * kPanel;
    for (int i = 0; i < part; i++)
      a += static_cast<long long>(ranks[i]) * (deep + panels_of(call.columns[i]) * kPanel);
  }
  const Number* b = a + static_cast<long long>(rank) * panels_of(call.depth) * kPanel;

  float* factors = shared + (is_alone ? warp * call.max_rank : 0);
  float* all_sums = shared + call.max_rank;  // [warps][kRanks]
  for (int first = 0; first < rank; first += kRanks) {
    float sums[kSums];
    shrink(call, input, a, rank, first, first_panel, step, sums);
    float* found = is_alone ? factors + first : all_sums + warp * kRanks;
    if (lane % kRuns == 0)
      for (int i = 0; i < kSums; i++)
        if (first + lane / kRuns + i * kTogether < rank) found[lane / kRuns + i * kTogether] = sums[i];
    if (is_alone) continue;
    __syncthreads();
    if (warp == 0 && first + lane < rank) {
      float sum = 0.0f;
      for (int i = 0; i < warps; i++) sum += all_sums[i * kRanks + lane];
      factors[first + lane] = sum;
    }
    __syncthreads();
  }
  __syncwarp();

  const int run = lane % kRuns * kRun;
  for (int panel = begin + first_panel; panel < end; panel += step) {
    float added[kRun] = {};
    const Number* numbers = b + static_cast<long long>(panel) * rank * kPanel + run;
#pragma unroll 4
    for (int i = lane / kRuns; i < rank; i += kTogether) {
      const Run weights = *reinterpret_cast<const Run*>(numbers + i * kPanel);
      const float factor = factors[i];
      for (int j = 0; j < kRun; j++) added[j] += factor * widened(weights.numbers[j]);
    }
    for (int j = 0; j < kRun; j++) added[j] = sum_over(added[j], kRuns, kWarp / 2);
    if (lane >= kRuns) continue;
    float values[kRun];
    read_row(product, panel * kPanel + run, columns, call.is_aligned, values);
    for (int j = 0; j < kRun; j++) values[j] += added[j];
    write_row(output, panel * kPanel + run, columns, call.is_aligned, values);
  }
}
