#include "coarse.h"

#include <algorithm>
#include <new>

#include "coarse_error.h"
#include "coarse_plane.h"
#include "coarse_run.h"
#include "product.h"

namespace onnxport {
namespace {

constexpr int64_t kGrowingCalls = 8;  // in which the plane is made
constexpr int64_t kIdleParts = 64;    // or so many between calls
// If more than this fraction of the panels is computed twice, so many calls do without the plane.
constexpr int64_t kRestingCalls = 64, kPayingShare = 3;

// What makes some more panels of a plane.
struct Growth {
  const MatMul& product;
  const MatMul& plane;
  const uint8_t* dither;
  float* largest_scales;
  uint8_t *weights, *whole;
  int64_t begin;
  std::atomic<bool> is_good{true};

  void make(int64_t index) {
    const int64_t panel = begin + index;
    const Conversion found =
        convert_panel(product, plane, dither, product.weights + panel * panel_bytes(product),
                      weights + panel * panel_bytes(plane),
                      largest_scales + panel * num_blocks(product));
    whole[panel] = found == Conversion::kTooLarge;
    if (found == Conversion::kNoNumber) is_good = false;
  }
};

// All tasks on this thread.
int one_by_one(void*, size_t count, Task task, void* argument) {
  for (size_t i = 0; i < count; i++) task(argument, i);
  return 0;
}

// The products there are. Never destroyed, as threads that ask for them may outlive static objects.
struct Register {
  std::mutex mutex;
  std::vector<CoarseProduct*> products;
};

Register& living() {
  static Register* instance = new Register;
  return *instance;
}

}  // namespace

CoarseProduct::CoarseProduct(const MatMul& product)
    : product_(product), dither_(make_dither(product)) {
  const std::lock_guard<std::mutex> lock(living().mutex);
  living().products.push_back(this);
}

CoarseProduct::~CoarseProduct() {
  const std::lock_guard<std::mutex> lock(living().mutex);
  std::vector<CoarseProduct*>& products = living().products;
  products.erase(std::remove(products.begin(), products.end(), this), products.end());
}

bool CoarseProduct::suits(const MatMul& product) {
  return product.bits == 8 && !product.bias && !product.zeros && num_blocks(product) <= kMostBlocks;
}

bool CoarseProduct::pays(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact,
                         bool has_allowed, std::atomic<int64_t>& rest) const {
  if (is_hopeless_ || call.rows == 0 || call.rows > std::min(kernels.coarse_rows, kMostCoarseRows))
    return false;
  const auto is_few = [has_allowed](int32_t count) {
    return (count >= 1 && count <= kMostExact) || (has_allowed && count == kAllAllowed);
  };
  if (!std::all_of(exact, exact + call.rows, is_few)) return false;
  return rest <= 0 || rest-- <= 0;
}

int CoarseProduct::run(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact,
                       const uint32_t* allowed, const Race* races, std::atomic<int64_t>& rest,
                       ParallelFor parallel_for, void* context) {
  if (!pays(kernels, call, exact, allowed, rest))
    return run_matmul(kernels, call, parallel_for, context);
  const int64_t panels = num_panels(call), ready = ready_.load(std::memory_order_acquire);
  // What is not ready may be being made by another thread.
  const Plane plane{ready ? memory_->data() : nullptr, dither_.data(),
                    ready ? largest_scales_.data() : nullptr,
                    ready == panels ? top_scales_.data() : nullptr, ready ? whole_.data() : nullptr,
                    ready};
  CoarseCall coarse{kernels, call, plane, exact, allowed, races};
  if (const int result = run_coarse(coarse, parallel_for, context)) return result;
  if (ready < panels) return grow(kGrowingCalls, parallel_for, context);
  if (coarse.num_exact > panels / kPayingShare) rest = kRestingCalls;
  return 0;
}

bool CoarseProduct::reserve() {
  if (memory_) return true;
  try {
    const MatMul plane = plane_of(product_);
    largest_scales_.resize(static_cast<size_t>(num_panels(plane) * num_blocks(plane)));
    top_scales_.resize(static_cast<size_t>(num_blocks(plane)));
    whole_.resize(static_cast<size_t>(num_panels(plane)));
    const int64_t bytes = num_panels(plane) * panel_bytes(plane);
    memory_ = std::make_unique<WeightMemory>(static_cast<size_t>(bytes));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool CoarseProduct::has_begun() const { return ready_ > 0; }

int64_t CoarseProduct::parts_left() const {
  const int64_t panels = num_panels(product_), missing = panels - ready_;
  return is_hopeless_ ? 0 : ceil_div(missing, ceil_div(panels, kIdleParts));
}

// Makes one of so many parts.
int CoarseProduct::grow(int64_t parts, ParallelFor parallel_for, void* context) {
  const std::unique_lock<std::mutex> lock(growing_, std::try_to_lock);
  if (!lock) return 0;
  const int64_t panels = num_panels(product_), begin = ready_.load(std::memory_order_relaxed);
  if (begin == panels || is_hopeless_) return 0;
  if (!reserve()) {
    is_hopeless_ = true;
    return 0;
  }
  const MatMul plane = plane_of(product_);
  Growth growth{product_,         plane,         dither_.data(), largest_scales_.data(),
                memory_->data(), whole_.data(), begin};
  const int64_t count = std::min(panels - begin, ceil_div(panels, parts));
  const auto make = [](void* argument, size_t index) {
    static_cast<Growth*>(argument)->make(static_cast<int64_t>(index));
  };
  if (const int result = run_tasks(count, make, &growth, parallel_for, context)) return result;
  const int64_t num_whole = std::count(whole_.begin(), whole_.begin() + begin + count, 1);
  if (!growth.is_good || num_whole > panels / kPayingShare) {
    is_hopeless_ = true;
    return 0;
  }
  const float* largest = largest_scales_.data() + begin * num_blocks(product_);
  for (int64_t panel = 0; panel < count; panel++)
    for (float& top : top_scales_) top = std::max(top, *largest++);
  ready_.store(begin + count, std::memory_order_release);
  return 0;
}

int64_t plane_parts_left() {
  const std::lock_guard<std::mutex> lock(living().mutex);
  int64_t parts = -1;
  for (const CoarseProduct* product : living().products)
    if (product->has_begun()) parts = std::max<int64_t>(parts, 0) + product->parts_left();
  return parts;
}

bool make_plane_part() {
  const std::lock_guard<std::mutex> lock(living().mutex);  // so that none of them goes meanwhile
  for (CoarseProduct* product : living().products)
    if (const int64_t left = product->has_begun() ? product->parts_left() : 0)
      return product->grow(kIdleParts, one_by_one, nullptr) == 0 && product->parts_left() < left;
  return false;
}

}  // namespace onnxport
