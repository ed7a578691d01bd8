// onnxport.GatherRows: rows of a table as float32, as com.microsoft.GatherBlockQuantized gives them of
// one in 8 bits, and Gather and Cast of one in floats. The table, an initializer [rows][width], is uint8
// around 128 with scales [rows][width / block_size], or floats. A large one is read from the file that
// it was mapped from, see MappedFile.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "half.h"
#include "mapped_file.h"
#include "op.h"
#include "op_weights.h"
#include "pages.h"
#include "product.h"

namespace onnxport::op {
namespace {

constexpr const char* kName = "GatherRows";

enum GatherInput : size_t { kTable, kIndices, kScales, kGatherInputs };

constexpr int64_t kTaskElements = 1 << 15;
constexpr int64_t kLeastBlock = 16;
constexpr int64_t kPiece = 8192;                   // bytes of a row that are read at once
constexpr int64_t kSmallTable = int64_t{1} << 20;  // bytes, which may as well stay in memory

// An initializer, of which few bytes are needed at a time.
class Stored {
 public:
  // Lets what there is in memory of it go, where it can be read of the file.
  void open(const void* data, int64_t bytes) {
    data_ = static_cast<const uint8_t*>(data);
    if (bytes < kSmallTable) return;
    file_.emplace(data, static_cast<size_t>(bytes));
    if (*file_) return forget_file_pages(data, static_cast<size_t>(bytes));
    file_.reset();
  }

  // So many bytes, which `room` is for. What the system cannot read it could not map either: how
  // that ends is up to it.
  const uint8_t* read(int64_t offset, int64_t bytes, uint8_t* room) const {
    const bool is_read =
        file_ && file_->read(static_cast<size_t>(offset), static_cast<size_t>(bytes), room);
    return is_read ? room : data_ + offset;
  }

 private:
  const uint8_t* data_ = nullptr;
  std::optional<MappedFile> file_;
};

struct GatherKernel {
  Api api;
  ort::ElementType stored;  // of the table
  ort::ElementType scale_type;
  int64_t rows, width, block_size;
  Stored table, scales;
};

constexpr int64_t bytes_of(ort::ElementType type) {
  return type == ort::kUint8 ? 1 : type == ort::kFloat ? 4 : 2;
}

// Floats of any type.
void widen(ort::ElementType type, const uint8_t* data, int64_t count, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(data);
  if (type == ort::kFloat) {
    std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
  } else if (type == ort::kFloat16) {
    for (int64_t i = 0; i < count; i++) out[i] = float_from_half(halves[i]);
  } else {
    for (int64_t i = 0; i < count; i++) out[i] = float_from_bfloat16(halves[i]);
  }
}

struct Run {
  const GatherKernel& kernel;
  const int64_t* indices;
  int64_t count, per_task;
  float* output;

  void gather(int64_t task) const {
    const int64_t end = std::min(count, (task + 1) * per_task);
    for (int64_t i = task * per_task; i < end; i++) {
      float* out = output + i * kernel.width;
      kernel.stored == ort::kUint8 ? dequantize(indices[i], out) : copy(indices[i], out);
    }
  }

 private:
  void copy(int64_t row, float* out) const {
    alignas(64) uint8_t room[kPiece];
    const int64_t bytes = bytes_of(kernel.stored), most = kPiece / bytes;
    for (int64_t first = 0; first < kernel.width; first += most) {
      const int64_t columns = std::min(most, kernel.width - first);
      const int64_t offset = (row * kernel.width + first) * bytes;
      widen(kernel.stored, kernel.table.read(offset, columns * bytes, room), columns, out + first);
    }
  }

  // Some blocks at a time.
  void dequantize(int64_t row, float* out) const {
    alignas(64) uint8_t room[kPiece], scale_room[kPiece];
    float scales[kPiece / sizeof(float)];
    const int64_t blocks = kernel.width / kernel.block_size, size = bytes_of(kernel.scale_type);
    const int64_t most = kPiece / kernel.block_size;
    for (int64_t first = 0; first < blocks; first += most) {
      const int64_t some = std::min(most, blocks - first), block = row * blocks + first;
      const int64_t columns = some * kernel.block_size;
      widen(kernel.scale_type, kernel.scales.read(block * size, some * size, scale_room), some,
            scales);
      const uint8_t* quants = kernel.table.read(block * kernel.block_size, columns, room);
      float* at = out + first * kernel.block_size;
      for (int64_t i = 0; i < some; i++)
        for (int64_t j = i * kernel.block_size; j < (i + 1) * kernel.block_size; j++)
          at[j] = static_cast<float>(static_cast<int>(quants[j]) - 128) * scales[i];
    }
  }
};

template <ort::ElementType kStored, ort::ElementType kScaleType>
std::unique_ptr<GatherKernel> make_kernel(const Api& api, const ort::KernelInfo* info) {
  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api.constant_input(info, kTable, &is_constant, &value));
  if (!is_constant) fail(api, ort::kNotImplemented, "%s: table must be an initializer", kName);
  const Tensor table = describe(api, "table", value);
  if (table.rank != 2 || elements(table) == 0)
    fail(api, ort::kInvalidArgument, "%s: table must be [rows, width], with some of each", kName);
  auto kernel = std::make_unique<GatherKernel>();
  kernel->api = api;
  kernel->stored = kStored;
  kernel->rows = table.dims[0];
  kernel->width = table.dims[1];
  kernel->scale_type = kScaleType;
  if (kStored == ort::kUint8) {
    kernel->block_size = read_attribute(api, info, "block_size");
    if (kernel->block_size < kLeastBlock || kernel->block_size > kPiece ||
        kernel->width % kernel->block_size)
      fail(api, ort::kInvalidArgument,
           "%s: block_size must be from %lld to %lld and divide the width %lld, found %lld", kName,
           static_cast<long long>(kLeastBlock), static_cast<long long>(kPiece),
           static_cast<long long>(kernel->width), static_cast<long long>(kernel->block_size));
    const int64_t scales = elements(table) / kernel->block_size;
    kernel->scales.open(read_floats(api, info, kName, kScales, "scales", scales),
                        scales * bytes_of(kScaleType));
  } else {
    check(api.constant_input(info, kScales, &is_constant, &value));
    if (is_constant) fail(api, ort::kInvalidArgument, "%s: a table of floats has no scales", kName);
  }
  kernel->table.open(table.data, elements(table) * bytes_of(kStored));
  return kernel;
}

void compute(const GatherKernel& kernel, ort::KernelContext* context) {
  const Api& api = kernel.api;
  const ort::Value* value = nullptr;
  check(api.input(context, kIndices, &value));
  Tensor shape = describe(api, "indices", value);
  const auto* indices = shape.as<const int64_t>();
  const int64_t count = elements(shape);
  const int64_t* wrong = std::find_if(indices, indices + count, [&](int64_t row) {
    return row < 0 || row >= kernel.rows;
  });
  if (wrong != indices + count)
    fail(api, ort::kInvalidArgument, "%s: indices must be from 0 to %lld, found %lld", kName,
         static_cast<long long>(kernel.rows - 1), static_cast<long long>(*wrong));
  if (shape.rank == kMaxRank)
    fail(api, ort::kInvalidArgument, "%s: indices must have less than %zu dimensions", kName,
         kMaxRank);
  shape.dims[shape.rank++] = kernel.width;
  auto* output = static_cast<float*>(open_output(api, context, shape));
  if (count == 0) return;
  const int64_t per_task = std::max<int64_t>(1, kTaskElements / kernel.width);
  const Run run{kernel, indices, count, per_task, output};
  Parallel parallel{api, context};
  const auto task = [](void* argument, size_t index) {
    static_cast<const Run*>(argument)->gather(static_cast<int64_t>(index));
  };
  if (run_tasks(ceil_div(count, per_task), task, const_cast<Run*>(&run), parallel_for, &parallel))
    check(parallel.status);
}

template <ort::ElementType kStored, ort::ElementType kScaleType>
ort::CustomOp make_operator() {
  ort::CustomOp op = base_operator();
  op.name = [](const ort::CustomOp*) { return kName; };
  op.input_type = [](const ort::CustomOp*, size_t index) -> int {
    return index == kTable ? kStored : index == kIndices ? ort::kInt64 : kScaleType;
  };
  op.output_type = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.input_type_count = [](const ort::CustomOp*) { return size_t{kGatherInputs}; };
  op.output_type_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_characteristic = [](const ort::CustomOp*, size_t index) -> int {
    return index == kScales ? ort::kOptional : ort::kRequired;  // floats have none
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  set_kernel<GatherKernel, make_kernel<kStored, kScaleType>, compute>(op);
  return op;
}

}  // namespace

ort::CustomOp gather_rows_operator() { return make_operator<ort::kUint8, ort::kFloat>(); }
ort::CustomOp gather_rows_half_operator() { return make_operator<ort::kUint8, ort::kFloat16>(); }
ort::CustomOp gather_floats_operator() { return make_operator<ort::kFloat, ort::kFloat>(); }
ort::CustomOp gather_halves_operator() { return make_operator<ort::kFloat16, ort::kFloat>(); }
ort::CustomOp gather_bfloat16_operator() { return make_operator<ort::kBFloat16, ort::kFloat>(); }

}  // namespace onnxport::op
