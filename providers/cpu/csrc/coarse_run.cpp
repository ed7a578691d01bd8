#include "coarse_run.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>

#include "coarse_error.h"
#include "coarse_front.h"
#include "product.h"
#include "rows/noise.h"

namespace onnxport {
namespace {

static_assert(kPanel == 32, "a word of what is allowed is a panel's");

// Where some outputs are not allowed, and not more than this fraction of the weights is left out,
// all are read at once.
constexpr int64_t kPayingPart = 8;

// What is read of a panel's weights at first.
enum Reading : uint8_t { kNothing, kFourBits, kAllBits };

// Memory of a call, kept from call to call.
struct Workspace {
  Quantized all, coarse;
  Buffer deviations, rounded, maxima, most, gains, readings, marks, computed, panels, order;
};

struct Run {
  const MatMulKernels& kernels;
  MatMul call, plane;
  const int32_t* exact;
  const uint32_t* allowed;
  const Race* races;
  const uint8_t* dither;
  const float* largest_scales;
  const uint8_t* whole;
  const int64_t ready, panels, blocks;
  Workspace& space;
  CoarseErrors errors;
  const float* top_scales;
  // [rows][panels]: the largest of a panel's outputs as computed, and what the exact one may be at
  // most; more than that while a row's largest error stands for the panel's own.
  float *maxima, *most;
  double* gains;         // [rows][panels], the most that noise adds to outputs; null: there is none
  float* order;          // [rows][panels]
  Reading* readings;     // [panels]
  uint8_t* is_wanted;    // [panels], or has been, or need not be
  uint8_t* is_computed;  // [panels], whose outputs are exact but `maxima` is not
  int32_t* wanted;       // [panels], of which the first num_wanted are computed next
  int64_t num_wanted = 0;
  std::atomic<int64_t> num_exact{0};  // panels that were computed again
  float least[kMostCoarseRows];    // a row's likeliest panels have maxima from here on
  double bounds[kMostCoarseRows];  // what is less cannot be one of a row's largest outputs
  double per_unit[kMostCoarseRows];
  rows::Noise noise[kMostCoarseRows];
  // Where there is noise, a row's likeliest outputs, and how many they are.
  int32_t likeliest[kMostCoarseRows][kMostExact];
  int64_t num_likeliest[kMostCoarseRows];
  double row_errors[kMostCoarseRows];  // of any output, where there are top_scales
  int64_t panels_per_task = 1;

  Run(const CoarseCall& of, Workspace& s)
      : kernels(of.kernels),
        call(of.product),
        plane(plane_of(of.product)),
        exact(of.exact),
        allowed(of.allowed),
        races(of.races),
        dither(of.plane.dither),
        largest_scales(of.plane.largest_scales),
        whole(of.plane.whole),
        ready(of.plane.ready),
        panels(num_panels(of.product)),
        blocks(num_blocks(of.product)),
        space(s),
        top_scales(of.plane.top_scales) {
    plane.weights = of.plane.weights;
    plane.norm.normalized = nullptr;  // the whole product writes it
    plane.summaries = nullptr;
    space.all.reserve(kernels, call);
    space.coarse.reserve(kernels, plane);
    const auto rows = static_cast<size_t>(call.rows);
    errors = {blocks, space.deviations.reserve<double>(rows * static_cast<size_t>(blocks)),
              space.rounded.reserve<double>(rows * static_cast<size_t>(blocks))};
    maxima = space.maxima.reserve<float>(rows * static_cast<size_t>(panels));
    most = space.most.reserve<float>(rows * static_cast<size_t>(panels));
    readings = space.readings.reserve<Reading>(static_cast<size_t>(panels));
    is_wanted = space.marks.reserve<uint8_t>(static_cast<size_t>(panels));
    wanted = space.panels.reserve<int32_t>(static_cast<size_t>(panels));
    gains = races ? space.gains.reserve<double>(rows * static_cast<size_t>(panels)) : nullptr;
    order = space.order.reserve<float>(rows * static_cast<size_t>(panels));
    is_computed = space.computed.reserve<uint8_t>(static_cast<size_t>(panels));
    choose_readings();
    for (int64_t panel = 0; panel < panels; panel++) {
      is_wanted[panel] = readings[panel] != kFourBits;
      is_computed[panel] = 0;
    }
    for (int64_t row = 0; row < call.rows; row++) {
      bounds[row] = -INFINITY;
      per_unit[row] = has_noise(row) ? races[row].per_unit : 1.0;
      if (has_noise(row)) noise[row] = rows::Noise(races[row].uniform);
    }
    panels_per_task = Product(kernels, plane).panels_per_task;
  }

  bool has_noise(int64_t row) const { return races && races[row].per_unit > 0.0; }

  bool has_plane(int64_t panel) const { return panel < ready && !whole[panel]; }

  void choose_readings() {
    for (int64_t panel = 0; panel < panels; panel++)
      readings[panel] = allowed ? kNothing : has_plane(panel) ? kFourBits : kAllBits;
    for (int64_t row = 0; allowed && row < call.rows; row++) {
      const Reading all = exact[row] == kAllAllowed ? kAllBits : kFourBits;
      const uint32_t* words = allowed + row * panels;
      for (int64_t panel = 0; panel < panels; panel++) {
        const Reading own = has_plane(panel) ? all : kAllBits;
        readings[panel] = words[panel] ? std::max(readings[panel], own) : readings[panel];
      }
    }
  }

  // Whether enough of the weights is left out; else it takes less time to read all.
  bool pays() const {
    int64_t halves = 0;
    for (int64_t panel = 0; panel < panels; panel++) halves += readings[panel];
    return !allowed || halves < 2 * (panels - panels / kPayingPart);
  }

  // Rows to int8 for both products: the same quants, in the order that each wants.
  void quantize() {
    for (int64_t row = 0; row < call.padded_rows; row++) {
      const float* x = row < call.rows ? call.input + row * call.k : nullptr;
      kernels.quantize(call, x, row, 0, blocks);
      kernels.quantize(plane, x, row, 0, blocks);
      // Sums of four bits begin with the dither's.
      for (int64_t block = 0; x && block < blocks; block++)
        plane.corrections[row_block(call, row, block)] +=
            errors.note(call, row, block, dither + block * call.block_size);
    }
    for (int64_t row = 0; top_scales && row < call.rows; row++)
      row_errors[row] = errors.of(row, [=](int64_t block) { return top_scales[block]; });
  }

  int64_t coarse_tasks() const { return ceil_div(panels, panels_per_task); }

  // Some panels' outputs, by what is read of each at first.
  void approximate(int64_t index) const {
    const int64_t end = std::min(panels, (index + 1) * panels_per_task);
    for (int64_t begin = index * panels_per_task, next; begin < end; begin = next) {
      const Reading reading = readings[begin];
      next = begin + 1;
      while (next < end && readings[next] == reading) next++;
      if (reading != kNothing)
        kernels.multiply(reading == kFourBits ? plane : call, part(begin, next));
      for (int64_t row = 0; row < call.rows; row++) {
        if (reading == kNothing)
          forbid(row, begin, next);
        else
          look_at(row, begin, next, reading);
      }
    }
  }

  Part part(int64_t begin, int64_t end) const {
    return {begin, end, 0, call.rows, call.output + begin * kPanel, call.n};
  }

  // Of a row, panels of which none is allowed.
  void forbid(int64_t row, int64_t begin, int64_t end) const {
    float* outputs = call.output + row * call.n;
    std::fill(outputs + begin * kPanel, outputs + std::min(call.n, end * kPanel), kForbidden);
    std::fill(maxima + row * panels + begin, maxima + row * panels + end, kForbidden);
    std::fill(most + row * panels + begin, most + row * panels + end, kForbidden);
  }

  // Of a row, panels of which the same is read.
  void look_at(int64_t row, int64_t begin, int64_t end, Reading reading) const {
    const int64_t first = row * panels;
    scale(row, begin, end, reading == kFourBits ? kCoarseStep : 1.f, maxima + first + begin);
    note_gains(row, begin, end);
    for (int64_t panel = begin; panel < end; panel++) {
      const float top = maxima[first + panel];
      most[first + panel] = reading == kAllBits ? top
                            : top_scales        ? with_error(top, row_errors[row])
                                                : with_error(top, panel_error(row, panel));
    }
  }

  void note_gains(int64_t row, int64_t begin, int64_t end) const {
    for (int64_t panel = begin; gains && panel < end; panel++)
      gains[row * panels + panel] =
          has_noise(row) ? noise[row].most_of_group(panel * kPanel / rows::Noise::kTokens) : 0.0;
  }

  // The most that an output of a panel may be, noise included.
  double most_of(int64_t row, int64_t panel) const {
    const int64_t at = row * panels + panel;
    return gains ? most[at] * per_unit[row] + gains[at] : most[at];
  }

  // The most that an output may be, by how far off it may be.
  double most_of(int64_t row, int64_t output, double error) const {
    const double value = call.output[row * call.n + output] + error;
    return has_noise(row) ? value * per_unit[row] + noise[row].most_of(output) : value;
  }

  // What an output is now, noise included.
  double sum_of(int64_t row, int64_t output) const {
    return call.output[row * call.n + output] * per_unit[row] + noise[row].of(output);
  }

  void scale(int64_t row, int64_t begin, int64_t end, float factor, float* largest) const {
    kernels.scale_outputs(call.output + row * call.n + begin * kPanel,
                          std::min(call.n, end * kPanel) - begin * kPanel, factor,
                          allowed ? allowed + row * panels + begin : nullptr, largest);
  }

  static float with_error(float top, double error) {
    return error < kMostError ? static_cast<float>(top + error) : NAN;
  }

  double panel_error(int64_t row, int64_t panel) const {
    const float* scales = largest_scales + panel * blocks;
    return errors.of(row, [=](int64_t block) { return scales[block]; });
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
    float largest;
    for (int64_t row = 0; allowed && row < call.rows; row++)
      scale(row, panel, panel + 1, 1.f, &largest);
    is_computed[panel] = 1;
    num_exact.fetch_add(1, std::memory_order_relaxed);
  }

  // Whether an output of a panel may be one of its row's largest. Most panels are wanted because of
  // the one output that has the panel's largest scales, and seldom is that the one in question.
  bool may_matter(int64_t panel) const {
    for (int64_t row = 0; row < call.rows; row++) {
      const int64_t at = row * panels + panel;
      if (!has_allowed(row, panel) || most_of(row, panel) < bounds[row]) continue;
      const double error = static_cast<double>(most[at]) - maxima[at];
      const int64_t count = std::min(kPanel, call.n - panel * kPanel);
      for (int64_t i = 0; i < count; i++)
        if (!(most_of(row, panel * kPanel + i, error) < bounds[row]) &&
            !(most_of(row, panel * kPanel + i, error_of(row, panel, i)) < bounds[row]))
          return true;
    }
    return false;
  }

  double error_of(int64_t row, int64_t panel, int64_t output) const {
    const uint8_t* scales = plane.weights + panel * panel_bytes(plane) + quant_bytes(plane);
    return errors.of(row, [=](int64_t block) {
      return scale_of(plane, scales + block * block_bytes(plane), output);
    });
  }

  // Finds as many panels as the row needs outputs: those that seem to have the largest ones.
  void find_likeliest(int64_t row) {
    least[row] = INFINITY;
    if (exact[row] == kAllAllowed) return;
    if (has_noise(row)) return race(row);
    const int64_t count = std::min<int64_t>(exact[row], panels);
    const float* tops = maxima + row * panels;
    if (count == 1) {
      least[row] = *std::max_element(tops, tops + panels);
      return;
    }
    float* sorted = order + row * panels;
    std::copy(tops, tops + panels, sorted);
    std::nth_element(sorted, sorted + count - 1, sorted + panels, std::greater<float>());
    least[row] = sorted[count - 1];
  }

  // With noise, finds the outputs themselves, by what they seem to be. The panel that seems to have
  // the largest comes first.
  void race(int64_t row) {
    Front front(exact[row]);
    int64_t first = 0;
    double top = -INFINITY;
    for (int64_t panel = 0; panel < panels; panel++) {
      const double sum = seeming(row, panel);
      if (sum > top) {
        top = sum;
        first = panel;
      }
    }
    look_for_likeliest(row, first, front);
    for (int64_t panel = 0; panel < panels; panel++)
      if (panel != first && seeming(row, panel) > front.last())
        look_for_likeliest(row, panel, front);
    num_likeliest[row] = front.copy_to(likeliest[row]);
  }

  double seeming(int64_t row, int64_t panel) const {
    const int64_t at = row * panels + panel;
    return has_allowed(row, panel) ? maxima[at] * per_unit[row] + gains[at] : -INFINITY;
  }

  void look_for_likeliest(int64_t row, int64_t panel, Front& front) const {
    const int64_t end = std::min(call.n, (panel + 1) * kPanel);
    for (int64_t output = panel * kPanel; output < end; output++)
      if (is_allowed(row, output) && most_of(row, output, 0.0) > front.last())
        front.add(sum_of(row, output), static_cast<int32_t>(output));
  }

  bool is_allowed(int64_t row, int64_t output) const {
    return !allowed || allowed[row * panels + output / kPanel] >> output % kPanel & 1;
  }

  bool has_allowed(int64_t row, int64_t panel) const {
    return !allowed || allowed[row * panels + panel];
  }

  bool is_likely(int64_t row, int64_t panel) const {
    return maxima[row * panels + panel] >= least[row] && has_allowed(row, panel);
  }

  void want_likeliest() {
    for (int64_t row = 0; row < call.rows; row++) {
      if (has_noise(row) && exact[row] != kAllAllowed) {
        for (int64_t i = 0; i < num_likeliest[row]; i++) want(likeliest[row][i] / kPanel);
        continue;
      }
      for (int64_t panel = 0; panel < panels; panel++)
        if (is_likely(row, panel)) want(panel);
    }
  }

  // Those panels, now computed, tell how large the row's largest outputs are at least.
  void find_bound(int64_t row) {
    if (exact[row] == kAllAllowed) {
      bounds[row] = INFINITY;  // all of them are exact already
      return;
    }
    if (has_noise(row)) {
      const int64_t count = num_likeliest[row];
      if (count < exact[row]) return;  // these are all that may come, or there are others
      bounds[row] = INFINITY;
      for (int64_t i = 0; i < count; i++)
        bounds[row] = std::min(bounds[row], sum_of(row, likeliest[row][i]));
      return;
    }
    Largest largest(exact[row]);
    for (int64_t panel = 0; panel < panels; panel++) {
      if (!is_likely(row, panel)) continue;
      const float* outputs = call.output + row * call.n + panel * kPanel;
      const int64_t count = std::min(kPanel, call.n - panel * kPanel);
      for (int64_t i = 0; i < count; i++) largest.add(outputs[i]);
    }
    bounds[row] = largest.last();
  }

  // Wants all other panels that may have one of their rows' largest outputs.
  void want_possible() {
    for (int64_t row = 0; row < call.rows; row++)
      for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t at = row * panels + panel;
        if (!has_allowed(row, panel) || most_of(row, panel) < bounds[row]) continue;
        if (top_scales && readings[panel] == kFourBits)
          most[at] = with_error(maxima[at], panel_error(row, panel));
        if (!(most_of(row, panel) < bounds[row])) want(panel);
      }
  }

  float largest_of(int64_t row, int64_t panel) const {
    if (!is_computed[panel]) return maxima[row * panels + panel];
    const float* outputs = call.output + row * call.n + panel * kPanel;
    return *std::max_element(outputs, outputs + std::min(kPanel, call.n - panel * kPanel));
  }

  // Tells of a row what is known of its outputs as they are. How small they are was not looked at.
  void summarize(int64_t row) const {
    if (!call.summaries || !(call.summary_scales[row] >= rows::kNoSums)) return;
    constexpr int64_t kGroupPanels = rows::kGroup / kPanel;
    const rows::Summary summary = summary_of(call, row);
    for (int64_t chunk = 0; chunk < rows::num_chunks(call.n); chunk++) {
      float* groups = summary.groups + chunk * rows::kGroups;
      for (int64_t group = 0; group < rows::kGroups; group++) {
        const int64_t first = (chunk * rows::kGroups + group) * kGroupPanels;
        float most = -INFINITY;
        for (int64_t panel = first; panel < std::min(panels, first + kGroupPanels); panel++)
          most = std::max(most, largest_of(row, panel));
        groups[group] = most + 0.f;  // no negative zero
      }
      summary.largest[chunk] = *std::max_element(groups, groups + rows::kGroups);
      summary.least[chunk] = -INFINITY;
    }
    *summary.scale = rows::kNoSums;
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

// All steps but the first: finds out where the largest outputs may be, and computes those panels.
int compute_largest(Run& run, ParallelFor parallel_for, void* context) {
  const auto likeliest = [](void* argument, size_t row) {
    static_cast<Run*>(argument)->find_likeliest(static_cast<int64_t>(row));
  };
  const auto bound = [](void* argument, size_t row) {
    static_cast<Run*>(argument)->find_bound(static_cast<int64_t>(row));
  };
  const int64_t rows = run.call.rows;
  if (const int result = run_tasks(rows, likeliest, &run, parallel_for, context)) return result;
  run.want_likeliest();
  if (const int result = compute_wanted(run, parallel_for, context)) return result;
  if (const int result = run_tasks(rows, bound, &run, parallel_for, context)) return result;
  run.want_possible();
  if (const int result = compute_wanted(run, parallel_for, context)) return result;
  const auto summarize = [](void* argument, size_t row) {
    static_cast<const Run*>(argument)->summarize(static_cast<int64_t>(row));
  };
  return run_tasks(rows, summarize, &run, parallel_for, context);
}

int compute_all(Run& run, ParallelFor parallel_for, void* context) {
  for (int64_t panel = 0; panel < run.panels; panel++) run.want(panel);
  return compute_wanted(run, parallel_for, context);
}

}  // namespace

int run_coarse(CoarseCall& call, ParallelFor parallel_for, void* context) {
  // The calling thread's; the others only use it until this call is over.
  thread_local Workspace space;
  Run run(call, space);
  if (!run.pays()) return run_matmul(call.kernels, call.product, parallel_for, context);
  run.quantize();
  const auto approximate = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->approximate(static_cast<int64_t>(index));
  };
  const int64_t tasks = run.coarse_tasks();
  if (const int result = run_tasks(tasks, approximate, &run, parallel_for, context)) return result;
  const auto compute = run.has_numbers() ? compute_largest : compute_all;
  const int result = compute(run, parallel_for, context);
  call.num_exact = run.num_exact;
  return result;
}

}  // namespace onnxport
