// The largest outputs of a product with 8-bit weights, for rows that ask for no others: greedy and
// top-k sampling of a vocabulary, and drawing from all of it, whose weights are a third and more of
// all that a decode step reads. Four bits of each weight are read first. They tell where the largest
// outputs may be, and only there all eight are.
//
// With a fixed dither d of each input, uniform in [0, 17),
//
//   w = 17 * u - 119 - d + e,    u = (w + 127 + d) / 17, rounded down: 0 to 15
//
// and e is uniform in [-8, 8] whatever w is (subtractive dithering: Roberts, 1962), for inputs one
// by one and independent of each other. So the error of an output,
//
//   sum over blocks of x_scale * w_scale * sum of e * x,
//
// is sub-Gaussian with the variance 24 * sum of (x_scale * w_scale)^2 * sum of x^2, 24 being that
// of e: it exceeds 7 standard deviations with a chance below 2.3e-11 (Hoeffding, 1963, with the
// variance in place of the squared range: the moments of e allow it). That is the chance to miss
// one of a row's largest outputs, for any weights and inputs that were not made knowing the dither.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "matmul.h"
#include "pages.h"

namespace onnxport {

constexpr int64_t kMostExact = 64;  // outputs of a row

// How a row draws from all of its outputs: see rows/noise.h. Outputs are as large as they are times
// per_unit, and their noise; where per_unit is 0, as they are.
struct Race {
  double uniform;
  double per_unit;
};

constexpr int32_t kAllAllowed = -1;  // as many as are allowed

class CoarseProduct {
 public:
  // Whether a product can have one: 8 bits, no bias, no zero points, and not very many inputs.
  static bool suits(const MatMul& product);

  // The product's packed weights must outlive this.
  explicit CoarseProduct(const MatMul& product);
  CoarseProduct(const CoarseProduct&) = delete;
  CoarseProduct& operator=(const CoarseProduct&) = delete;
  ~CoarseProduct();

  // As run_matmul, but of each row only its `exact` largest outputs, and what equals the last of
  // them, have their exact bits; all others are less. exact is [rows], and where one is not 1 to
  // kMostExact, or there are more rows than pay, all outputs of all rows are exact.
  //
  // Of rows of which some outputs are allowed alone, that is said of these, and the others may be
  // any finite numbers, or what they are; exact may also be kAllAllowed there. allowed is
  // [rows][num_panels]: bit i % 32 of word i / 32 is that of output i. Null: all are.
  //
  // races, [rows], say for each row how large its outputs are; null: as they are.
  //
  // The first calls compute all, and keep four bits of a part of the weights each; what is missing
  // then can be made between calls, see make_plane_part. Concurrent calls are allowed.
  //
  // rest is the caller's own, 0 at first: how many of its calls do without, as the last one with four
  // bits did not pay. Another model with the same weights may have other outputs.
  int run(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact,
          const uint32_t* allowed, const Race* races, std::atomic<int64_t>& rest,
          ParallelFor parallel_for, void* context);

 private:
  bool pays(const MatMulKernels& kernels, const MatMul& call, const int32_t* exact,
            bool has_allowed, std::atomic<int64_t>& rest) const;
  int grow(int64_t parts, ParallelFor parallel_for, void* context);
  bool reserve();
  bool has_begun() const;
  int64_t parts_left() const;

  friend int64_t plane_parts_left();
  friend bool make_plane_part();

  const MatMul product_;
  const std::vector<uint8_t> dither_;  // [k, up to whole blocks]
  std::unique_ptr<WeightMemory> memory_;
  std::vector<float> largest_scales_;  // [panels][blocks], magnitudes
  std::vector<float> top_scales_;      // [blocks], the largest of all panels, once these are ready
  std::vector<uint8_t> whole_;         // [panels], of those that are ready, which no plane stands for
  std::atomic<int64_t> ready_{0};      // panels that have a plane; of the first ones
  std::atomic<bool> is_hopeless_{false};
  std::mutex growing_;
};

// How many parts are missing of the planes that calls have begun, of all products there are; -1: no
// call has begun one. A part takes a thread some milliseconds. From any thread.
int64_t plane_parts_left();

// Makes one of them; false: there is none to make. From any thread.
bool make_plane_part();

}  // namespace onnxport
