#include "coarse.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>

#include "coarse_plane.h"
#include "product.h"

namespace onnxport {
namespace {

constexpr double kVariance = 24;  // of e: (17 * 17 - 1) / 12
constexpr double kDeviations = 7;
// What else an output may be wrong by, for one block and scales of one: half a step where the sum
// of the dither is rounded to whole steps; and what rounding of floats makes in both products, at
// most 6e-8 * 2 * (blocks + 3) of each block's share, which is not above |w| * |x| with |w| below
// (127 + 8) * sqrt(256).
constexpr double kRoundedDither = 0.51 * kCoarseStep;
constexpr double kRoundedFloats = 0.08;
constexpr int64_t kMostBlocks = 300;
// Where outputs are so small that floats lose bits, each rounding may make 1.4e-45 more, and there
// are up to 18 times kMostBlocks.
constexpr double kLeastError = FLT_MIN;
// With less than this, no block's share or sum of some exceeds a float, as these are not above
// 2160 / kRoundedFloats times the error.
constexpr double kMostError = 1e33;
constexpr int64_t kMostRows = 16;

constexpr int64_t kGrowingCalls = 8;  // in which the plane is made
// If more than this fraction of the panels is computed twice, so many calls do without the plane.
constexpr int64_t kRestingCalls = 64, kPayingShare = 3;

// The largest ones of some numbers.
class Largest {
 public:
  explicit Largest(int64_t count) : count_(count) {
    std::fill(numbers_, numbers_ + kMostExact, -INFINITY);
  }

  void add(float number) {
    if (!(number > numbers_[0])) return;
    std::pop_heap(numbers_, numbers_ + count_, std::greater<float>());
    numbers_[count_ - 1] = number;
    std::push_heap(numbers_, numbers_ + count_, std::greater<float>());
  }

  // The least of them, or what is less than all where there are not enough.
  float last() const { return numbers_[0]; }

 private:
  float numbers_[kMostExact];
  const int64_t count_;
};

// Memory of a call, kept from call to call.
struct Workspace {
  Quantized all, coarse;
  Buffer deviations, rounded, maxima, most, marks, panels, order;
};

// Multiplies the outputs of a panel by a factor and returns the largest one; if one is not finite,
// NaN. Lane by lane, which becomes vectors.
float scaled_top(float* outputs, int64_t count, float factor) {
  constexpr int64_t kLanes = 8;
  float tops[kLanes], check[kLanes] = {};
  std::fill(tops, tops + kLanes, -INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const float x = outputs[i + lane] * factor;
      outputs[i + lane] = x;
      tops[lane] = tops[lane] < x ? x : tops[lane];
      check[lane] += x * 0.f;
    }
  for (; i < count; i++) {
    outputs[i] *= factor;
    tops[0] = std::max(tops[0], outputs[i]);
    check[0] += outputs[i] * 0.f;
  }
  float top = -INFINITY;
  for (int64_t lane = 0; lane < kLanes; lane++) top = std::max(top, tops[lane]);
  for (float one : check) top = one == one ? top : NAN;
  return top;
}

// What there is of a plane.
struct Plane {
  const uint8_t* weights;
  const uint8_t* dither;
  const float* largest_scales;
  int64_t ready;  // panels
};

struct Run {
  const MatMulKernels& kernels;
  MatMul call, plane;
  const int32_t* exact;
  const uint8_t* dither;
  const float* largest_scales;
  const int64_t ready, panels, blocks;
  Workspace& space;
  // [rows][blocks]: squared deviations and rounding errors of an output, for a scale of one.
  // Squares of floats need a double's range.
  double *deviations, *rounded;
  // [rows][panels]: the largest of a panel's outputs as computed, and what the exact one may be.
  float *maxima, *most;
  float* order;        // [rows][panels]
  uint8_t* is_wanted;  // [panels], or has been
  int32_t* wanted;     // [panels], of which the first num_wanted are computed next
  int64_t num_wanted = 0;
  std::atomic<int64_t> num_exact{0};  // panels that were computed again
  float least[kMostRows];   // a row's likeliest panels have maxima from here on
  float bounds[kMostRows];  // what is less cannot be one of a row's largest outputs
  int64_t panels_per_task = 1;

  Run(const MatMulKernels& used, const MatMul& product, const Plane& coarse, const int32_t* counts,
      Workspace& s)
      : kernels(used),
        call(product),
        plane(plane_of(product)),
        exact(counts),
        dither(coarse.dither),
        largest_scales(coarse.largest_scales),
        ready(coarse.ready),
        panels(num_panels(product)),
        blocks(num_blocks(product)),
        space(s) {
    plane.weights = coarse.weights;
    plane.norm.normalized = nullptr;  // the whole product writes it
    space.all.reserve(kernels, call);
    space.coarse.reserve(kernels, plane);
    const auto rows = static_cast<size_t>(call.rows);
    deviations = space.deviations.reserve<double>(rows * static_cast<size_t>(blocks));
    rounded = space.rounded.reserve<double>(rows * static_cast<size_t>(blocks));
    maxima = space.maxima.reserve<float>(rows * static_cast<size_t>(panels));
    most = space.most.reserve<float>(rows * static_cast<size_t>(panels));
    is_wanted = space.marks.reserve<uint8_t>(static_cast<size_t>(panels));
    wanted = space.panels.reserve<int32_t>(static_cast<size_t>(panels));
    order = space.order.reserve<float>(rows * static_cast<size_t>(panels));
    for (int64_t panel = 0; panel < panels; panel++) is_wanted[panel] = panel >= ready;
    for (float& bound : bounds) bound = -INFINITY;
    panels_per_task = Product(kernels, plane).panels_per_task;
  }

  // Rows to int8 for both products: the same quants, in the order that each wants.
  void quantize() {
    for (int64_t row = 0; row < padded_rows(call); row++) {
      const float* x = row < call.rows ? call.input + row * call.k : nullptr;
      kernels.quantize(call, x, row, 0, blocks);
      kernels.quantize(plane, x, row, 0, blocks);
      for (int64_t block = 0; x && block < blocks; block++) add_dither(row, block);
    }
  }

  // Lets the sums of four bits begin with the dither's, and notes what an output may be wrong by.
  void add_dither(int64_t row, int64_t block) {
    const int64_t at = row_block(call, row, block);
    const int8_t* quants = call.quants + at * call.block_size;
    const uint8_t* d = dither + block * call.block_size;
    int32_t squares = 0, sum = 0;
    for (int64_t i = 0; i < call.block_size; i++) {
      squares += quants[i] * quants[i];
      sum += (kCoarseStep - d[i]) * quants[i];
    }
    const double whole = std::nearbyint(static_cast<double>(sum) / kCoarseStep);
    plane.corrections[at] += static_cast<int32_t>(whole);
    const double scale = call.scales[at], square = squares;
    deviations[row * blocks + block] =
        scale * scale * square * (kVariance * kDeviations * kDeviations);
    rounded[row * blocks + block] = scale * (kRoundedDither + kRoundedFloats * std::sqrt(square));
  }

  int64_t coarse_tasks() const { return ceil_div(panels, panels_per_task); }

  // Some panels' outputs: of those that have a plane by it.
  void approximate(int64_t index) const {
    const int64_t begin = index * panels_per_task;
    const int64_t end = std::min(panels, begin + panels_per_task);
    const int64_t middle = std::clamp(ready, begin, end);
    if (begin < middle) kernels.multiply(plane, part(begin, middle));
    if (middle < end) kernels.multiply(call, part(middle, end));
    for (int64_t row = 0; row < call.rows; row++)
      for (int64_t panel = begin; panel < end; panel++) look_at(row, panel);
  }

  Part part(int64_t begin, int64_t end) const {
    return {begin, end, 0, call.rows, call.output + begin * kPanel, call.n};
  }

  void look_at(int64_t row, int64_t panel) const {
    const int64_t count = std::min(kPanel, call.n - panel * kPanel);
    float* outputs = call.output + row * call.n + panel * kPanel;
    const float top = scaled_top(outputs, count, panel < ready ? kCoarseStep : 1.f);
    const int64_t at = row * panels + panel;
    maxima[at] = most[at] = top;
    if (panel >= ready) return;
    const float* scales = largest_scales + panel * blocks;
    const double error = error_of(row, [=](int64_t block) { return scales[block]; });
    most[at] = error < kMostError ? static_cast<float>(top + error) : NAN;
  }

  void want(int64_t panel) {
    if (is_wanted[panel]) return;
    is_wanted[panel] = 1;
    wanted[num_wanted++] = static_cast<int32_t>(panel);
  }

  void compute(int64_t index) {
    const int64_t panel = wanted[index];
    if (!may_matter(panel)) return;
    kernels.multiply(call, part(panel, panel + 1));
    num_exact.fetch_add(1, std::memory_order_relaxed);
  }

  // Whether an output of a panel may be one of its row's largest. Most panels are wanted because of
  // the one output that has the panel's largest scales, and seldom is that the one in question.
  bool may_matter(int64_t panel) const {
    for (int64_t row = 0; row < call.rows; row++) {
      const int64_t at = row * panels + panel;
      if (most[at] < bounds[row]) continue;
      const double error = static_cast<double>(most[at]) - maxima[at];
      const int64_t count = std::min(kPanel, call.n - panel * kPanel);
      const float* outputs = call.output + row * call.n + panel * kPanel;
      for (int64_t i = 0; i < count; i++)
        if (!(outputs[i] + error < bounds[row]) &&
            !(outputs[i] + error_of(row, panel, i) < bounds[row]))
          return true;
    }
    return false;
  }

  // What an output may be wrong by at most, by its scale of each block.
  template <class ScaleOf>
  double error_of(int64_t row, ScaleOf scale_of_block) const {
    double square = 0, error = kLeastError;
    for (int64_t block = 0; block < blocks; block++) {
      const double scale = scale_of_block(block);
      square += scale * scale * deviations[row * blocks + block];
      error += scale * rounded[row * blocks + block];
    }
    return std::sqrt(square) + error;
  }

  double error_of(int64_t row, int64_t panel, int64_t output) const {
    const uint8_t* scales = plane.weights + panel * panel_bytes(plane) + quant_bytes(plane);
    return error_of(row, [=](int64_t block) {
      return scale_of(plane, scales + block * block_bytes(plane), output);
    });
  }

  // Finds as many panels as the row needs outputs: those that seem to have the largest ones.
  void find_likeliest(int64_t row) {
    const int64_t count = std::min<int64_t>(exact[row], panels);
    const float* tops = maxima + row * panels;
    float* sorted = order + row * panels;
    std::copy(tops, tops + panels, sorted);
    std::nth_element(sorted, sorted + count - 1, sorted + panels, std::greater<float>());
    least[row] = sorted[count - 1];
  }

  void want_likeliest() {
    for (int64_t row = 0; row < call.rows; row++)
      for (int64_t panel = 0; panel < panels; panel++)
        if (maxima[row * panels + panel] >= least[row]) want(panel);
  }

  // Those panels, now computed, tell how large the row's largest outputs are at least.
  void find_bound(int64_t row) {
    Largest largest(exact[row]);
    for (int64_t panel = 0; panel < panels; panel++) {
      if (maxima[row * panels + panel] < least[row]) continue;
      const float* outputs = call.output + row * call.n + panel * kPanel;
      const int64_t count = std::min(kPanel, call.n - panel * kPanel);
      for (int64_t i = 0; i < count; i++) largest.add(outputs[i]);
    }
    bounds[row] = largest.last();
  }

  // Wants all other panels that may have one of their rows' largest outputs.
  void want_possible() {
    for (int64_t row = 0; row < call.rows; row++)
      for (int64_t panel = 0; panel < panels; panel++)
        if (!(most[row * panels + panel] < bounds[row])) want(panel);
  }

  bool has_numbers() const {
    bool are = true;
    for (int64_t i = 0; i < call.rows * panels; i++) are &= std::isfinite(most[i]);
    return are;
  }
};

// Computes the panels that are wanted.
int compute_wanted(Run& run, ParallelFor parallel_for, void* context) {
  const int64_t count = run.num_wanted;
  run.num_wanted = 0;
  if (count == 0) return 0;
  const auto task = [](void* argument, size_t index) {
    static_cast<Run*>(argument)->compute(static_cast<int64_t>(index));
  };
  return run_tasks(count, task, &run, parallel_for, context);
}

// What makes some more panels of a plane.
struct Growth {
  const MatMul& product;
  const MatMul& plane;
  const uint8_t* dither;
  float* largest_scales;
  uint8_t* weights;
  int64_t begin;
  std::atomic<bool> is_good{true};

  void make(int64_t index) {
    const int64_t panel = begin + index;
    if (!convert_panel(product, plane, dither, product.weights + panel * panel_bytes(product),
                       weights + panel * panel_bytes(plane),
                       largest_scales + panel * num_blocks(product)))
      is_good = false;
  }
};

}  // namespace

CoarseProduct::CoarseProduct(const MatMul& product)
    : product_(product), dither_(make_dither(product)) {}

bool CoarseProduct::suits(const MatMul& product) {
  return product.bits == 8 && !product.bias && num_blocks(product) <= kMostBlocks;
}

bool CoarseProduct::pays(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact) {
  if (is_hopeless_ || call.rows == 0 || call.rows > std::min(kernels.coarse_rows, kMostRows))
    return false;
  const auto is_few = [](int32_t count) { return count >= 1 && count <= kMostExact; };
  if (!std::all_of(exact, exact + call.rows, is_few)) return false;
  return rest_ <= 0 || rest_-- <= 0;
}

int CoarseProduct::run(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact,
                       ParallelFor parallel_for, void* context) {
  if (!pays(kernels, call, exact)) return run_matmul(kernels, call, parallel_for, context);
  // The calling thread's; the others only use it until this call is over.
  thread_local Workspace space;
  const int64_t ready = ready_.load(std::memory_order_acquire);
  // What is not ready may be being made by another thread.
  const Plane plane{ready ? memory_->data() : nullptr, dither_.data(),
                    ready ? largest_scales_.data() : nullptr, ready};
  Run run(kernels, call, plane, exact, space);
  run.quantize();
  const auto approximate = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->approximate(static_cast<int64_t>(index));
  };
  const int64_t tasks = run.coarse_tasks();
  if (const int result = run_tasks(tasks, approximate, &run, parallel_for, context)) return result;
  if (run.has_numbers()) {
    const auto likeliest = [](void* argument, size_t row) {
      static_cast<Run*>(argument)->find_likeliest(static_cast<int64_t>(row));
    };
    const auto bound = [](void* argument, size_t row) {
      static_cast<Run*>(argument)->find_bound(static_cast<int64_t>(row));
    };
    if (const int result = run_tasks(call.rows, likeliest, &run, parallel_for, context))
      return result;
    run.want_likeliest();
    if (const int result = compute_wanted(run, parallel_for, context)) return result;
    if (const int result = run_tasks(call.rows, bound, &run, parallel_for, context)) return result;
    run.want_possible();
  } else {
    for (int64_t panel = 0; panel < run.panels; panel++) run.want(panel);
  }
  if (const int result = compute_wanted(run, parallel_for, context)) return result;
  if (ready < run.panels) return grow(parallel_for, context);
  if (run.num_exact > run.panels / kPayingShare) rest_ = kRestingCalls;
  return 0;
}

bool CoarseProduct::reserve() {
  if (memory_) return true;
  try {
    const MatMul plane = plane_of(product_);
    largest_scales_.resize(static_cast<size_t>(num_panels(plane) * num_blocks(plane)));
    const int64_t bytes = num_panels(plane) * panel_bytes(plane);
    memory_ = std::make_unique<WeightMemory>(static_cast<size_t>(bytes));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

int CoarseProduct::grow(ParallelFor parallel_for, void* context) {
  const std::unique_lock<std::mutex> lock(growing_, std::try_to_lock);
  if (!lock) return 0;
  const int64_t panels = num_panels(product_), begin = ready_.load(std::memory_order_relaxed);
  if (begin == panels || is_hopeless_) return 0;
  if (!reserve()) {
    is_hopeless_ = true;
    return 0;
  }
  const MatMul plane = plane_of(product_);
  Growth growth{product_, plane, dither_.data(), largest_scales_.data(), memory_->data(), begin};
  const int64_t count = std::min(panels - begin, ceil_div(panels, kGrowingCalls));
  const auto make = [](void* argument, size_t index) {
    static_cast<Growth*>(argument)->make(static_cast<int64_t>(index));
  };
  if (const int result = run_tasks(count, make, &growth, parallel_for, context)) return result;
  if (growth.is_good)
    ready_.store(begin + count, std::memory_order_release);
  else
    is_hopeless_ = true;
  return 0;
}

}  // namespace onnxport
