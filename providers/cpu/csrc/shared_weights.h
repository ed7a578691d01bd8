// Packed weights that kernels share: a draft head has its model's output head, and may have it all to
// itself otherwise, packed in another session.
#pragma once

#include <cstdint>
#include <memory>

#include "coarse.h"
#include "matmul.h"
#include "pages.h"

namespace onnxport {

class SharedWeights {
 public:
  SharedWeights(const SharedWeights&) = delete;
  SharedWeights& operator=(const SharedWeights&) = delete;

  const uint8_t* data() const { return memory_.data(); }

  // What finds the largest outputs of such a product, whose weights these are. All that share the
  // weights share it. Null where it does not suit.
  CoarseProduct* coarse(const MatMul& product);

 private:
  explicit SharedWeights(const MatMul& product);
  bool has_shape(const MatMul& product) const;
  bool equals(const MatMul& product, const uint8_t* quants, const Scales& scales) const;

  friend std::shared_ptr<SharedWeights> share_weights(const MatMul& product, const uint8_t* quants,
                                                      const Scales& scales);

  const MatMul shape_;
  const WeightMemory memory_;
  std::unique_ptr<CoarseProduct> coarse_;  // which reads the memory
};

// A product's packed weights, as pack_weights_in_parts makes them: those that another kernel has where
// they are the same to the byte, else new ones. They live as long as somebody has them.
std::shared_ptr<SharedWeights> share_weights(const MatMul& product, const uint8_t* quants,
                                             const Scales& scales);

// How many panels were packed to see whether others have the same. From any thread.
int64_t num_compared_panels();

}  // namespace onnxport
