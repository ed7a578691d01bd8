// Checks how adapters come, and computes what they add to a product.
#include "add_lora.h"

#include <algorithm>

#include "product.h"

namespace onnxport {
namespace {

constexpr const char* kName = "AddLora";
constexpr int64_t kLine = 64;

long long number(int64_t value) { return static_cast<long long>(value); }

void expect(const char* op, bool fits, const char* what, int64_t found, int64_t wanted) {
  if (!fits) refuse("%s: %s must be %lld, found %lld", op, what, number(wanted), number(found));
}

void expect_equal(const char* op, const char* what, int64_t found, int64_t wanted) {
  expect(op, found == wanted, what, found, wanted);
}

// Integers mean nothing without scales, and scales would be passed over without integers.
void check_scales(const char* op, const AdapterInputs& in, LoraType type, int64_t max_rank) {
  const Tensor& scales = in.scales;
  if (bool(scales) != is_integer(type))
    refuse("%s: adapters in int8 and int4 %s, found %s", op,
           scales ? "alone have scales" : "need scales", scales ? "others" : "none");
  if (!scales) return;
  if (scales.rank != 4) refuse("%s: scales have 4 dimensions, found %zu", op, scales.rank);
  for (size_t axis = 0; axis < 3; axis++)
    expect_equal(op, "scales' dimensions, as those of ranks,", scales.dims[axis],
                 in.ranks.dims[axis]);
  expect_equal(op, "scales of a projection", scales.dims[3], max_rank);
}

void check_shapes(const char* op, const AdapterInputs& in, int64_t rows) {
  if (in.slots.rank != 1 || in.ranks.rank != 3 || in.weights.rank != 2)
    refuse("%s: slots, ranks and weights must have 1, 3 and 2 dimensions, found %zu, %zu and %zu",
           op, in.slots.rank, in.ranks.rank, in.weights.rank);
  expect_equal(op, "the number of token slots", in.slots.dims[0], rows);
  expect_equal(op, "the slots with ranks", in.ranks.dims[0], in.weights.dims[0] + 1);
}

void check_room(const char* op, const AdapterInputs& in, LoraType type, const LoraPlace& place,
                int64_t max_rank) {
  const int64_t end = place.offset + lora_numbers(type, place, max_rank);
  const int64_t numbers = in.weights.dims[1], in_slot = in.ranks.dims[1] * in.ranks.dims[2];
  expect(op, end <= numbers, "the numbers of a slot, at least,", numbers, end);
  expect(op, place.ranks + place.parts <= in_slot, "the ranks of a slot, at least,", in_slot,
         place.ranks + place.parts);
}

// A in integers is read like a product's weights.
void check_lines(const char* op, const Tensor& weights, const LoraPlace& place) {
  const bool is_line = reinterpret_cast<uintptr_t>(weights.data) % kLine == 0;
  if (!is_line || weights.dims[1] % kLine || place.offset % kLine)
    refuse("%s: adapters in int8 and int4 must lie at multiples of %lld bytes; the slots are %s, of "
           "%lld bytes each, and the place in a slot is %lld",
           op, number(kLine), is_line ? "so" : "not", number(weights.dims[1]),
           number(place.offset));
}

void check_ranks(const char* op, const LoraSlots& all, const LoraPlace& place, int32_t slot) {
  for (int64_t part = 0; part < place.parts; part++) {
    const int64_t rank = lora_rank(all, place, slot, part);
    if (rank < 0 || rank > all.max_rank)
      refuse("%s: rank %lld; there are 0 to %lld", op, number(rank), number(all.max_rank));
  }
}

// Fails where a call would read or write outside of the product and the activations.
void check_rows(const Tensor& product, const Tensor& activations, int64_t width) {
  if (product.rank != 2 || activations.rank != 2)
    refuse("%s: product and activations must have 2 dimensions, found %zu and %zu", kName,
           product.rank, activations.rank);
  expect_equal(kName, "the product's columns", product.dims[1], width);
  expect_equal(kName, "the activations' rows", activations.dims[0], product.dims[0]);
}

// A product that adapters in integers add to, whose weights nobody needs.
MatMul product_of(const LoraPlace& place, int64_t depth, int64_t rows) {
  MatMul product{};
  product.k = depth;
  product.n = 1;
  product.bits = place.bits;
  product.block_size = place.block_size;
  product.rows = rows;
  return product;
}

// What a call works in, the calling thread's.
struct Workspace {
  Buffer factors;
  Quantized quantized;
};

struct Run {
  LoraSum sum;
  float* output;
  bool is_added;
};

// Sets the outputs of tokens that no task of the sum sets.
void set_others(const LoraSlots& slots, const LoraPlace& place, const Tensor& output) {
  for (int64_t row = 0; row < output.dims[0]; row++)
    if (lora_work(slots, place, slots.tokens[row]) == 0)
      std::fill_n(output.as<float>() + row * output.dims[1], output.dims[1], 0.f);
}

}  // namespace

void check_place(const char* op, const LoraPlace& place, int64_t max_rank) {
  const int64_t* end = place.columns + kLoraParts;
  const bool is_negative = place.offset < 0 || place.ranks < 0 ||
                           std::any_of(place.columns, end, [](int64_t n) { return n < 0; });
  if (is_negative || max_rank < 1 || place.parts < 1)
    refuse("%s: an attribute is negative, or there are no columns or no ranks", op);
}

LoraSlots check_adapters(const char* op, const AdapterInputs& in, LoraType type, int64_t max_rank,
                         int64_t rows, std::initializer_list<LoraPlace> places) {
  check_shapes(op, in, rows);
  for (const LoraPlace& place : places) {
    check_room(op, in, type, place, max_rank);
    if (is_integer(type)) check_lines(op, in.weights, place);
  }
  check_scales(op, in, type, max_rank);
  const LoraSlots all{type,
                      in.slots.as<const int32_t>(),
                      in.ranks.as<const int32_t>(),
                      in.weights.as<const char>(),
                      in.scales.as<const float>(),
                      in.ranks.dims[1] * in.ranks.dims[2],
                      in.weights.dims[1],
                      max_rank};
  int32_t checked = 0;  // most tokens have the slot of the one before
  for (int64_t row = 0; row < rows; row++) {
    const int32_t slot = all.tokens[row];
    if (slot == checked) continue;
    if (slot < 0 || slot >= in.ranks.dims[0])
      refuse("%s: slot %d; there are 0 to %lld", op, slot, number(in.ranks.dims[0] - 1));
    for (const LoraPlace& place : places) check_ranks(op, all, place, slot);
    checked = slot;
  }
  return all;
}

void check_node(const AddLora& node) {
  check_place(kName, node.place, node.max_rank);
  if (is_integer(node.type)) check_product(kName, product_of(node.place, 1, 0));
}

int add_lora(const AddLoraCall& call) {
  const AddLora& node = *call.node;
  int64_t width = 0;
  for (int64_t columns : node.place.columns) width += columns;
  check_rows(call.output, call.activations, width);
  LoraPlace place = node.place;
  place.depth = call.activations.dims[1];
  const int64_t rows = call.output.dims[0];
  const LoraSlots slots =
      check_adapters(kName, call.adapters, node.type, node.max_rank, rows, {place});
  thread_local Workspace space;
  Run run{LoraSum(slots, place, rows), call.output.as<float>(), call.is_added};
  if (!call.is_added) set_others(slots, place, call.output);
  if (run.sum.is_empty()) return 0;
  const float* input = call.activations.as<const float>();
  float* factors = space.factors.reserve<float>(static_cast<size_t>(run.sum.num_factors()));
  if (is_integer(node.type)) {
    if (place.depth < 1)
      refuse("%s: adapters in int8 and int4 need activations of a number or more, found none",
             kName);
    const MatMulKernels& kernels = *active_matmul();
    MatMul product = product_of(place, place.depth, rows);
    product.input = input;
    space.quantized.reserve(kernels, product);
    Product quantized(kernels, product);
    const auto quantize = [](void* argument, size_t index) {
      static_cast<const Product*>(argument)->quantize(static_cast<int64_t>(index));
    };
    const int result = run_tasks(quantized.quantize_tasks(), quantize, &quantized,
                                 call.parallel_for, call.context);
    if (result != 0) return result;
    run.sum.set(kernels, product, factors);
  } else {
    run.sum.set(input, factors);
  }
  const auto add = [](void* argument, size_t index) {
    const Run& own = *static_cast<const Run*>(argument);
    own.sum.run(static_cast<int64_t>(index), own.output, own.is_added);
  };
  return run_tasks(run.sum.tasks(), add, &run, call.parallel_for, call.context);
}

}  // namespace onnxport
