#include "shared_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pack.h"

namespace onnxport {
namespace {

// The weights there are, by what their first panels are like. Never destroyed, as sessions may
// outlive static objects.
struct Known {
  std::mutex mutex;
  std::unordered_multimap<uint64_t, std::weak_ptr<SharedWeights>> weights;
  size_t most = 64;  // then those that are gone are removed
};

Known& known() {
  static Known* instance = new Known;
  return *instance;
}

std::atomic<int64_t> num_compared{0};

std::vector<std::shared_ptr<SharedWeights>> living(uint64_t key) {
  std::vector<std::shared_ptr<SharedWeights>> found;  // goes after the lock, and what it has with it
  const std::lock_guard<std::mutex> lock(known().mutex);
  const auto range = known().weights.equal_range(key);
  for (auto one = range.first; one != range.second; ++one)
    if (std::shared_ptr<SharedWeights> weights = one->second.lock())
      found.push_back(std::move(weights));
  return found;
}

void remember(uint64_t key, const std::shared_ptr<SharedWeights>& weights) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& all = known().weights;
  if (all.size() >= known().most) {
    for (auto one = all.begin(); one != all.end();)
      one = one->second.expired() ? all.erase(one) : std::next(one);
    known().most = std::max(known().most, 2 * all.size());
  }
  all.emplace(key, weights);
}

// FNV-1a of words: what differs is compared in full only where these are the same.
uint64_t hash_of(const uint8_t* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;
  for (size_t place = 0; place < bytes; place += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + place, std::min(sizeof(word), bytes - place));
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 32;
  }
  return hash;
}

int64_t stored_row_bytes(const MatMul& product) {
  return num_blocks(product) * product.block_size * product.bits / 8;
}

// Packs one of a product's panels.
void pack_panel(const MatMul& product, const uint8_t* quants, const Scales& scales, int64_t panel,
                uint8_t* packed) {
  num_compared++;
  const int64_t first = panel * kPanel;
  MatMul part = product;
  part.n = std::min(kPanel, product.n - first);
  pack_weights(part, quants + first * stored_row_bytes(product),
               scales_from(scales, first * num_blocks(product)), packed);
}

// Whether panels [begin, end) of a product are packed like this. Packs one at a time, so that what is
// compared takes next to no memory.
bool are_packed(const MatMul& product, const uint8_t* quants, const Scales& scales, int64_t begin,
                int64_t end, const uint8_t* packed) {
  const auto bytes = static_cast<size_t>(panel_bytes(product));
  // Where there is no memory for a panel, nothing is shared.
  const std::unique_ptr<uint8_t[]> scratch(new (std::nothrow) uint8_t[bytes]);
  if (!scratch) return false;
  for (int64_t panel = begin; panel < end; panel++) {
    pack_panel(product, quants, scales, panel, scratch.get());
    if (std::memcmp(scratch.get(), packed + static_cast<size_t>(panel) * bytes, bytes) != 0)
      return false;
  }
  return true;
}

// What weights have in common that may be the same. A model may have thousands of matrices of one
// shape, so they are told apart without a look at each other.
uint64_t key_of(const MatMul& product, const uint8_t* quants, const Scales& scales) {
  std::vector<uint8_t> first(static_cast<size_t>(panel_bytes(product)));
  pack_panel(product, quants, scales, 0, first.data());
  return hash_of(first.data(), first.size());
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
  if (!has_shape(product)) return false;
  const int64_t row_bytes = stored_row_bytes(product);
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
  const uint64_t key = key_of(product, quants, scales);
  for (std::shared_ptr<SharedWeights>& one : living(key))
    if (one->equals(product, quants, scales)) return std::move(one);
  const std::shared_ptr<SharedWeights> made(new SharedWeights(product));
  pack_weights_in_parts(product, quants, scales, made->memory_.data());
  remember(key, made);
  return made;
}

int64_t num_compared_panels() { return num_compared; }

}  // namespace onnxport
