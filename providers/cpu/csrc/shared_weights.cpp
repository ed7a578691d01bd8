#include "shared_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "pack.h"

namespace onnxport {
namespace {

// The weights there are. Never destroyed, as sessions may outlive static objects.
struct Known {
  std::mutex mutex;
  std::vector<std::weak_ptr<SharedWeights>> weights;
};

Known& known() {
  static Known* instance = new Known;
  return *instance;
}

std::vector<std::shared_ptr<SharedWeights>> living() {
  const std::lock_guard<std::mutex> lock(known().mutex);
  std::vector<std::shared_ptr<SharedWeights>> found;
  for (const std::weak_ptr<SharedWeights>& one : known().weights)
    if (std::shared_ptr<SharedWeights> weights = one.lock()) found.push_back(std::move(weights));
  return found;
}

void remember(const std::shared_ptr<SharedWeights>& weights) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& all = known().weights;
  const auto is_gone = [](const std::weak_ptr<SharedWeights>& one) { return one.expired(); };
  all.erase(std::remove_if(all.begin(), all.end(), is_gone), all.end());
  all.push_back(weights);
}

// Whether panels [begin, end) of a product are packed like this. Packs one at a time, so that what is
// compared takes next to no memory.
bool are_packed(const MatMul& product, const uint8_t* quants, const Scales& scales, int64_t begin,
                int64_t end, const uint8_t* packed) {
  const int64_t blocks = num_blocks(product);
  const int64_t row_bytes = blocks * product.block_size * product.bits / 8;
  const auto bytes = static_cast<size_t>(panel_bytes(product));
  // Where there is no memory for a panel, nothing is shared.
  const std::unique_ptr<uint8_t[]> scratch(new (std::nothrow) uint8_t[bytes]);
  if (!scratch) return false;
  for (int64_t panel = begin; panel < end; panel++) {
    const int64_t first = panel * kPanel;
    MatMul part = product;
    part.n = std::min(kPanel, product.n - first);
    pack_weights(part, quants + first * row_bytes, scales_from(scales, first * blocks),
                 scratch.get());
    if (std::memcmp(scratch.get(), packed + static_cast<size_t>(panel) * bytes, bytes) != 0)
      return false;
  }
  return true;
}

}  // namespace

SharedWeights::SharedWeights(const MatMul& product)
    : shape_(product), memory_(static_cast<size_t>(num_panels(product) * panel_bytes(product))) {}

bool SharedWeights::has_shape(const MatMul& product) const {
  return product.k == shape_.k && product.n == shape_.n && product.bits == shape_.bits &&
         product.block_size == shape_.block_size && product.half_scales == shape_.half_scales &&
         product.is_fp4 == shape_.is_fp4;
}

bool SharedWeights::equals(const MatMul& product, const uint8_t* quants,
                           const Scales& scales) const {
  // Other layers' matrices of this shape differ at once, and are not worth a thread.
  if (!has_shape(product) || !are_packed(product, quants, scales, 0, 1, data())) return false;
  const int64_t row_bytes = num_blocks(product) * product.block_size * product.bits / 8;
  std::atomic<bool> are_same{true};
  in_parts(num_panels(product), panel_bytes(product), [&](int64_t begin, int64_t end) {
    if (are_same && !are_packed(product, quants, scales, begin, end, data())) are_same = false;
    const int64_t first = begin * kPanel, rows = std::min(product.n, end * kPanel) - first;
    forget_file_pages(quants + first * row_bytes, static_cast<size_t>(rows * row_bytes));
  });
  return are_same;
}

CoarseProduct* SharedWeights::coarse(const MatMul& product) {
  if (!CoarseProduct::suits(product)) return nullptr;
  const std::lock_guard<std::mutex> lock(known().mutex);
  if (!coarse_) coarse_ = std::make_unique<CoarseProduct>(product);
  return coarse_.get();
}

std::shared_ptr<SharedWeights> share_weights(const MatMul& product, const uint8_t* quants,
                                             const Scales& scales) {
  for (std::shared_ptr<SharedWeights>& one : living())
    if (one->equals(product, quants, scales)) return std::move(one);
  const std::shared_ptr<SharedWeights> made(new SharedWeights(product));
  pack_weights_in_parts(product, quants, scales, made->memory_.data());
  remember(made);
  return made;
}

}  // namespace onnxport
