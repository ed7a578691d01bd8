// Stands in for NVIDIA's driver: runs the kernel of providers/nvidia/add_lora.cu on the host, compiled
// as C++. The threads of a block are fibers that take turns at barriers and where lanes exchange
// numbers, so what a kernel gets wrong about either is found here, on any machine.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "half.h"

namespace {

struct Index {
  unsigned int x, y, z;
};
Index threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t kStack = 64 << 10, kShared = 48 << 10;
constexpr unsigned int kLanes = 32;

[[noreturn]] void die(const char* why) {
  std::fprintf(stderr, "CUDA kernel: %s (thread %u of block %u, %u)\n", why, threadIdx.x, blockIdx.x,
               blockIdx.y);
  std::abort();
}

struct Fiber {
  ucontext_t state;
  std::unique_ptr<char[]> stack;
  bool is_done;
};

// Threads that wait for one another.
struct Barrier {
  unsigned int waiting = 0, generation = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<float> lanes;  // what each hands to others
  Barrier all;
  ucontext_t scheduler;
  unsigned int num_done = 0, current = 0;
  bool has_moved = false;
};
Block* block;

// All of `count` threads come here, or none goes on.
void wait(Barrier& barrier, unsigned int count) {
  block->has_moved = true;
  const unsigned int generation = barrier.generation;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    barrier.generation++;
    return;
  }
  while (barrier.generation == generation)
    swapcontext(&block->fibers[threadIdx.x].state, &block->scheduler);
  block->has_moved = true;
}

Barrier& own_warp() { return block->warps[threadIdx.x / kLanes]; }

// What kernels call.
void __syncthreads() { wait(block->all, blockDim.x); }
void __syncwarp() { wait(own_warp(), kLanes); }
float __shfl_xor_sync(unsigned int mask, float value, int bits) {
  if (mask != 0xffffffffu) die("not all lanes exchange a number");
  block->lanes[threadIdx.x] = value;
  wait(own_warp(), kLanes);
  const float other = block->lanes[threadIdx.x ^ static_cast<unsigned int>(bits)];
  wait(own_warp(), kLanes);
  return other;
}

}  // namespace

alignas(16) float shared[kShared / sizeof(float)];

#define __launch_bounds__(threads)
#define __grid_constant__
#define ONNXPORT_KERNEL static
using std::min;

#include "../../providers/nvidia/add_lora.h"

#define NUMBER_TYPE 1
namespace float32 {
namespace onnxport_cuda {
using namespace ::onnxport_cuda;
}
#include "../../providers/nvidia/add_lora.cu"
}  // namespace float32
#undef NUMBER_TYPE

#define NUMBER_TYPE 10
namespace float16 {
namespace onnxport_cuda {
using namespace ::onnxport_cuda;
inline float float_of_half(unsigned short bits) { return onnxport::float_from_half(bits); }
inline unsigned short half_of_float(float value) { return onnxport::half_from_float(value); }
}  // namespace onnxport_cuda
#include "../../providers/nvidia/add_lora.cu"
}  // namespace float16
#undef NUMBER_TYPE

#define NUMBER_TYPE 16
namespace bfloat16 {
namespace onnxport_cuda {
using namespace ::onnxport_cuda;
inline float float_of_bfloat16(unsigned short bits) { return onnxport::float_from_bfloat16(bits); }
inline unsigned short bfloat16_of_float(float value) {
  return onnxport::bfloat16_from_float(value);
}
}  // namespace onnxport_cuda
#include "../../providers/nvidia/add_lora.cu"
}  // namespace bfloat16

namespace {

using Kernel = void (*)(const onnxport_cuda::AddLora);
struct Image {
  const char* name;
  Kernel kernel;
};
const Image kImages[] = {{"float32", float32::add_lora},
                         {"float16", float16::add_lora},
                         {"bfloat16", bfloat16::add_lora}};
enum Status { kSuccess = 0, kInvalidValue = 1, kInvalidImage = 200, kNotFound = 500 };

Kernel running;
const onnxport_cuda::AddLora* arguments;

void run_thread() {
  running(*arguments);
  block->fibers[threadIdx.x].is_done = true;
  block->num_done++;
  block->has_moved = true;
  swapcontext(&block->fibers[threadIdx.x].state, &block->scheduler);
}

void run_block(unsigned int threads, unsigned int shared_bytes) {
  for (Fiber& fiber : block->fibers) {
    getcontext(&fiber.state);
    fiber.state.uc_stack.ss_sp = fiber.stack.get();
    fiber.state.uc_stack.ss_size = kStack;
    fiber.state.uc_link = nullptr;
    fiber.is_done = false;
    makecontext(&fiber.state, run_thread, 0);
  }
  std::fill(std::begin(shared), std::end(shared), std::numeric_limits<float>::quiet_NaN());
  block->warps.assign(threads / kLanes, Barrier());
  block->all = Barrier();
  block->num_done = 0;
  while (block->num_done < threads) {
    block->has_moved = false;
    for (unsigned int i = 0; i < threads; i++) {
      if (block->fibers[i].is_done) continue;
      threadIdx = {i, 0, 0};
      swapcontext(&block->scheduler, &block->fibers[i].state);
    }
    if (!block->has_moved) die("threads wait for others that have ended, or wait elsewhere");
  }
  for (size_t i = (shared_bytes + 3) / sizeof(float); i < kShared / sizeof(float); i++)
    if (!std::isnan(shared[i])) die("shared memory is written to behind its end");
}

}  // namespace

#define DRIVER extern "C" __attribute__((visibility("default")))

// For tests: launches, and those of them whose sum is where the product is.
extern "C" {
__attribute__((visibility("default"))) int num_launches = 0;
__attribute__((visibility("default"))) int num_in_place = 0;
}

DRIVER int cuCtxGetCurrent(void** context) {
  static int here;
  *context = std::getenv("ONNXPORT_CUDA_NO_CONTEXT") ? nullptr : &here;
  return kSuccess;
}

DRIVER int cuGetErrorString(int status, const char** words) {
  *words = status == kInvalidImage ? "device kernel image is invalid" : "another error";
  return kSuccess;
}

DRIVER int cuModuleLoadData(void** module, const void* image) {
  for (const Image& one : kImages)
    if (!std::strcmp(static_cast<const char*>(image), one.name)) {
      *module = const_cast<Image*>(&one);
      return kSuccess;
    }
  return kInvalidImage;
}

DRIVER int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (std::strcmp(name, "add_lora")) return kNotFound;
  *function = module;
  return kSuccess;
}

DRIVER int cuLaunchKernel(void* function, unsigned int blocks_x, unsigned int blocks_y,
                          unsigned int blocks_z, unsigned int threads, unsigned int threads_y,
                          unsigned int threads_z, unsigned int shared_bytes, void*,
                          void** parameters, void**) {
  if (!blocks_x || !blocks_y || blocks_z != 1 || !threads || threads % kLanes || threads > 1024 ||
      threads_y != 1 || threads_z != 1 || shared_bytes > kShared)
    return kInvalidValue;
  Block own;
  own.fibers.resize(threads);
  for (Fiber& fiber : own.fibers) fiber.stack.reset(new char[kStack]);
  own.lanes.resize(threads);
  block = &own;
  num_launches++;
  running = static_cast<const Image*>(function)->kernel;
  arguments = static_cast<const onnxport_cuda::AddLora*>(parameters[0]);
  num_in_place += arguments->product == arguments->output;
  blockDim = {threads, 1, 1};
  gridDim = {blocks_x, blocks_y, 1};
  for (unsigned int y = 0; y < blocks_y; y++)
    for (unsigned int x = 0; x < blocks_x; x++) {
      blockIdx = {x, y, 0};
      run_block(threads, shared_bytes);
    }
  block = nullptr;
  return kSuccess;
}
